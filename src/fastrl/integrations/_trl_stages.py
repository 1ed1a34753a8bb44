"""Stage clocks for a TRL GRPO trainer: how long generation, rewards, log-probs and the update take."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # a mixin: its methods are those of the trainer it is mixed into
    from trl import GRPOTrainer as _Host
else:
    _Host = object

STAGES = ("generation", "rewards", "old_ref", "select", "update")
COUNTS = ("rollouts", "trained/rows", "trained/tokens", "prompt_tokens_saved")

EXPECTED = {
    "_calculate_rewards": "inputs prompts completions completion_ids_list",
    "_compute_loss": "model inputs",
    "_generate": "prompts",
    "_generate_and_score_completions": "inputs",
    "_generate_single_turn": "prompt_ids images multimodal_fields num_generations",
    "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size compute_entropy",
    "_get_train_sampler": "dataset",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_prepare_inputs": "generation_batch",
    "_push_from_checkpoint": "checkpoint_folder",
    "_save_checkpoint": "model trial",
    "_set_signature_columns_if_needed": "",
    "_tokenize_prompts": "prompts",
    "create_model_card": "model_name dataset_name tags",
    "get_train_dataloader": "",
    "train": "resume_from_checkpoint",
    "training_step": "model inputs num_items_in_batch",
}
"""Leading parameters of the TRL methods that we override or call; a new TRL that differs must be looked at."""


class StageTimesMixin(_Host):
    """Log seconds by stage and counts of rows of every optimizer step under `fastrl/`; change nothing else.

    "update" is forward, loss and backward. On an accelerator every stage waits for the device, so
    that its work is counted where it was asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stage_s = dict.fromkeys((*STAGES, "prepare"), 0.0)
        self._counts: Counter[str] = Counter()
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        self._wait_for_device()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wait_for_device()
            self._stage_s[stage] += time.perf_counter() - start

    def _wait_for_device(self) -> None:
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize()

    def _log_metric_value(self, name: str, value: float) -> None:
        """Hand a value to TRL's own averaging and reporting."""
        self._metrics["train"][f"fastrl/{name}"].append(value)

    def _generate(self, prompts: list) -> Any:
        if not self.model.training:
            return super()._generate(prompts)
        with self._clock("generation"):
            return super()._generate(prompts)

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> Any:
        if not self.model.training:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        with self._clock("rewards"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training or torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._clock("old_ref"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self._clock("prepare"):
            return super()._prepare_inputs(generation_batch)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        prepared_s = self._stage_s["prepare"]
        self._wait_for_device()
        start = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._wait_for_device()
        self._stage_s["update"] += time.perf_counter() - start - (self._stage_s["prepare"] - prepared_s)
        if self.accelerator.sync_gradients:
            self._end_optimizer_step()
        return loss

    def _end_optimizer_step(self) -> None:
        """Log what this optimizer step took and did: seconds by stage, rollouts sampled, rows trained on."""
        for stage in STAGES:
            self._log_metric_value(f"time/{stage}_s", self._stage_s[stage])
        for name in COUNTS:
            self._log_metric_value(name, float(self._counts[name]))
        self._stage_s = dict.fromkeys(self._stage_s, 0.0)
        self._counts.clear()
