"""FastRL inside TRL's GRPOTrainer.

    trainer = FastGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), train_dataset=...,
                              fastrl=FastRLConfig(tau=0.8))

The loader yields one row per prompt; groups are expanded inside the trainer, so G_t can be any
number without touching the data order, the schedule or a resume. Rewards and advantages are
TRL's, over full groups. Then the method selects, and only survivors are turned into micro-batches:
sorted by length, trimmed, with old and reference log-probs computed for them alone. The loss is
TRL's own, called through `super()` and rescaled to exact denominators.
"""

import contextlib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from fastrl.batching import WindowPlan, align_top_up, plan_round
from fastrl.config import FastRLConfig
from fastrl.integrations._trl_data import PROMPT_ID, NumberedRows, PromptSampler, prompt_ids_of
from fastrl.integrations._trl_rows import MicroBatch, OncePerPrompt, repeat_prompts, split_rows, take_rows
from fastrl.integrations._trl_stages import StageTimesMixin, differing_signatures
from fastrl.method import FastRL
from fastrl.trace import forget_rollouts, write_rollouts
from fastrl.types import ConfigError, FastRLError, Group, GroupError, Selection, StateError

STATE_FILE = "fastrl_state.json"

_ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
_TOKEN_SUM_LOSSES = ("dapo", "cispo", "vespo")
_FORWARD_FIELDS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def signature_problems() -> list[str]:
    """Name what differs between the installed TRL and the one this adapter was written for."""
    return differing_signatures(GRPOTrainer)


class TimedGRPOTrainer(StageTimesMixin, GRPOTrainer):
    """TRL's GRPOTrainer with stage clocks and row counts: the baseline that FastRL is compared with."""

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._log_metric_value("num_rollouts/mean", float(self.num_generations))
            self._log_metric_value("rollouts", float(len(inputs) * self.accelerator.num_processes))
            self._log_metric_value("trained/rows", float(len(inputs) * self.accelerator.num_processes))
        return output


class FastRLMixin(StageTimesMixin):
    """Pruning and adaptive rollouts for a GRPOTrainer: `class Mine(FastRLMixin, MyGRPOTrainer)`.

    Args:
        fastrl: The settings; None is the published setting. `FastRLConfig(pruner="none",
            budget="fixed")` gives the trainer's own gradients.

    Raises:
        ConfigError: a setting of the trainer that FastRL cannot serve; says which and what to do.
    """

    # What TRL's trainer holds and this class sets, for a while or for good.
    num_generations: int
    beta: float
    processing_class: Any
    current_gradient_accumulation_steps: float
    _signature_columns: list[str] | None
    _tag_names: list[str]

    def __init__(self, *args: Any, fastrl: FastRLConfig | None = None, **kwargs: Any) -> None:
        mro = type(self).__mro__
        problems = differing_signatures(mro[mro.index(StageTimesMixin) + 1])
        if problems:
            raise FastRLError(
                f"this trainer is not the one FastRL was written for (TRL 1.16): {'; '.join(problems)}. Install "
                "trl 1.16, or adapt the overrides in fastrl.integrations.trl."
            )
        self._micro_batches: list[MicroBatch | None] = []
        self._round_slots: list[int] | None = None
        self._round_fields: dict[str, Any] | None = None
        self._defer_logps = False
        super().__init__(*args, **kwargs)
        config = fastrl or FastRLConfig()
        _check_supported(self, config)
        self._prompts_per_round = self.args.generation_batch_size // self.num_generations
        self._prompt_ids = prompt_ids_of(self.train_dataset)
        total_rounds, rounds_per_epoch = _round_counts(self, len(self._prompt_ids))
        self.fastrl = FastRL(
            config,
            num_rollouts=self.num_generations,
            total_steps=total_rounds,
            steps_per_epoch=rounds_per_epoch,
        )
        if config.budget == "ars" and total_rounds <= rounds_per_epoch:
            warnings.warn(
                f"budget: ars changes G_t after each epoch of {rounds_per_epoch} rounds, and this run has only "
                f"{total_rounds}: G_t stays at {self.num_generations}. Train for several epochs, or set budget: fixed.",
                stacklevel=2,
            )
        self._tag_names = [*self._tag_names, "fastrl"]

    # Data: one row per prompt, the same prompts on every rank.

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        self._signature_columns = columns if PROMPT_ID in columns else [*columns, PROMPT_ID]

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return PromptSampler(
            len(self._prompt_ids),
            self._prompts_per_round,
            self.num_iterations * self.args.steps_per_generation * self.accelerator.num_processes,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int((self.state.epoch or 0) + 1e-6),
        )

    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(
            dataset=NumberedRows(self.train_dataset, self._prompt_ids),
            description="Training",
            batch_size=self._prompts_per_round,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    # Generation: groups of G_t, rewards and advantages by TRL, log-probs put off.

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        counts_P = self.fastrl.plan(self._round_prompt_ids)
        num_generations = int(counts_P[0])
        assert (counts_P == num_generations).all(), (
            "the budgets of this version give all prompts the same count"
        )
        slots = [p for p in range(len(inputs)) for _ in range(num_generations)]
        with self._full_groups(num_generations, slots):
            return super()._generate_and_score_completions([dict(inputs[p]) for p in slots])

    @contextlib.contextmanager
    def _full_groups(self, num_generations: int, slots: list[int]) -> Iterator[None]:
        """Let TRL generate and score groups of another size, without log-probs and with images once per prompt."""
        saved = self.num_generations, self.beta, self.processing_class
        self.num_generations = num_generations
        if not self.use_vllm:  # with vLLM, TRL's importance ratio needs old log-probs at once
            self.beta, self._defer_logps = 0.0, True
        if self._is_vlm and not (self.tools or self.environment_factories or self.rollout_func):
            self._round_slots = slots
            self.processing_class = OncePerPrompt(self.processing_class, lambda: self._round_fields)
        try:
            yield
        finally:
            self.num_generations, self.beta, self.processing_class = saved
            self._defer_logps, self._round_slots, self._round_fields = False, None, None

    def _tokenize_prompts(self, prompts: list) -> Any:
        if self._round_slots is None or len(prompts) != len(self._round_slots):
            return super()._tokenize_prompts(prompts)
        slots = self._round_slots
        first_row = [slots.index(p) for p in range(slots[-1] + 1)]
        prompt_ids, images, fields = super()._tokenize_prompts([prompts[row] for row in first_row])
        repeated = repeat_prompts(fields, images, slots)
        if repeated is None:
            self._round_slots = None
            return super()._tokenize_prompts(prompts)
        self._round_fields = repeated
        return [prompt_ids[p] for p in slots], images and [images[p] for p in slots], repeated

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> Any:
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:
            names = ", ".join(self.reward_func_names)
            error.add_note(f"FastRL: raised while scoring the prompts {self._named_prompts()} with {names}.")
            raise
        if self.model.training:
            self._rewards_per_func = rewards
            self._num_tokens = [len(ids) for ids in completion_ids_list]
        return rewards

    def _named_prompts(self) -> str:
        ids = getattr(self, "_round_prompt_ids", [])
        return ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._defer_logps:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    # Selection: from full groups to the micro-batches of the survivors.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        model.train()
        start = time.perf_counter()
        per_round = self.args.steps_per_generation
        if self._step % (per_round * self.num_iterations) == 0 or not self._micro_batches:
            self._micro_batches = self._new_round(inputs)
        micro_batch = self._micro_batches[self._step % per_round]
        self._current_train_step_time += time.perf_counter() - start
        if micro_batch is None:  # a surplus micro-step: no forward, no backward, on any rank
            self._step += 1
            return torch.zeros((), device=self.accelerator.device)
        return super().training_step(model, micro_batch, num_items_in_batch)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _new_round(self, inputs: list) -> list[MicroBatch | None]:
        """Sample, select, and plan one round; returns its micro-steps."""
        inputs = [dict(row) for row in inputs]
        self._round_prompt_ids = [row.pop(PROMPT_ID) for row in inputs]
        batch = self._generate_and_score_completions(inputs)
        with self._clock("select"):
            groups = self._groups(batch)
            selections = self.fastrl.select(groups)
            micro_batches = self._plan_micro_batches(batch, groups, selections)
        self._compute_deferred_logps(
            [micro_batch for micro_batch in micro_batches if micro_batch is not None]
        )
        with self._clock("select"):
            self.fastrl.observe(groups, selections)
            self._report_round(groups, selections)
        return micro_batches

    def _groups(self, batch: dict[str, Any]) -> list[Group]:
        per_func = self._rewards_per_func.detach().cpu().double()  # (N, number of reward functions)
        weighted = (per_func * self.reward_weights.cpu().double()).nansum(1)
        rewards_N = torch.where(per_func.isnan().all(1), torch.nan, weighted).numpy()
        outcomes_N = None
        if self.fastrl.config.outcome_key is not None:
            outcomes_N = per_func[:, self.reward_func_names.index(self.fastrl.config.outcome_key)].numpy()
        advantages_N = batch["advantages"].cpu().double().numpy()
        tokens_N = batch["completion_ids"].cpu().numpy()
        size = len(rewards_N) // len(self._round_prompt_ids)
        groups = []
        for p, prompt_id in enumerate(self._round_prompt_ids):
            rows = slice(p * size, (p + 1) * size)
            self._check_finite(per_func[rows], prompt_id)
            groups.append(
                Group(
                    prompt_id=prompt_id,
                    tokens_G=[tokens_N[i, : self._num_tokens[i]] for i in range(rows.start, rows.stop)],
                    rewards_G=rewards_N[rows],
                    advantages_G=advantages_N[rows],
                    outcomes_G=None if outcomes_N is None else outcomes_N[rows],
                )
            )
        return groups if self.fastrl.config.is_identity else self.fastrl.with_advantages(groups)

    def _check_finite(self, per_func: torch.Tensor, prompt_id: str) -> None:
        for row, func in per_func.isinf().nonzero().tolist():
            raise GroupError(
                f"reward function {self.reward_func_names[func]!r} returned {per_func[row, func].item()} for rollout "
                f"{row} of prompt {prompt_id!r}. Rewards must be finite, or None for a rollout that cannot be scored."
            )

    def _plan_micro_batches(
        self, batch: dict[str, Any], groups: Sequence[Group], selections: Sequence[Selection]
    ) -> list[MicroBatch | None]:
        num_ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        aligned, num_added = list(selections), 0
        if self.fastrl.config.align == "top_up":
            aligned, num_added = align_top_up(groups, selections, num_ranks)
        loss_mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        tokens_N = loss_mask.sum(1).cpu().numpy()
        size_P = [group.num_rollouts for group in groups]
        num_windows, num_steps = _windows(
            self.args.steps_per_generation, self.args.gradient_accumulation_steps
        )
        plans = plan_round(
            np.concatenate([selection.keep_G for selection in aligned]),
            tokens_N=tokens_N,
            length_N=(batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).cpu().numpy(),
            live_N=np.repeat([bool(np.any(group.advantages_G)) for group in groups], size_P),
            num_windows=num_windows,
            num_steps=num_steps,
            size=self.args.per_device_train_batch_size,
            denominator=self.fastrl.denominator,
            num_ranks=num_ranks,
            rng=self.fastrl.rng(purpose=1),
        )
        trained = [row for plan in plans for step in plan.steps_R[rank] for row in step or [] if row >= 0]
        self._round_sizes = sum(size_P), len(trained)
        self._log_metric_value("rollouts", float(sum(size_P)))
        self._log_metric_value("trained/rows", float(len(trained)))
        self._log_metric_value("trained/tokens", float(tokens_N[trained].sum()))
        self._log_metric_value("top_up/frac", num_added / max(len(trained), 1))
        weight_N = np.concatenate([selection.weight_G for selection in aligned])
        advantage_N = np.concatenate([group.advantages_G for group in groups])
        batch = {**batch, "advantages": torch.from_numpy(advantage_N * weight_N).to(batch["advantages"])}
        return self._collate(batch, plans, rank)

    def _collate(
        self, batch: dict[str, Any], plans: Sequence[WindowPlan], rank: int
    ) -> list[MicroBatch | None]:
        # TRL permutes each round's rows here. Drawing the same numbers keeps the random state, and so
        # the next round's samples, what they are without FastRL.
        torch.randperm(len(batch["advantages"]))
        filler = int(batch["prompt_mask"].sum(1).argmin())
        split = split_rows(batch)
        micro_batches: list[MicroBatch | None] = []
        for plan in plans:
            # TRL's token-sum losses divide by num_items_in_batch * (micro-batches / steps_per_generation).
            divide_by = plan.denominators.tokens * self.args.steps_per_generation / plan.num_micro_batches
            for rows in plan.steps_R[rank]:
                if rows is None:
                    micro_batches.append(None)
                    continue
                taken = take_rows(split, rows, filler=filler, multiple=self.pad_to_multiple_of)
                taken["num_items_in_batch"] = torch.tensor(divide_by, device=self.accelerator.device)
                micro_batches.append(MicroBatch(taken, plan))
        return micro_batches

    def _compute_deferred_logps(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Compute old and reference log-probs of survivors, under the conditions and models of TRL."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        need_old = self.args.gradient_accumulation_steps % generate_every != 0
        if self.use_vllm or not (need_old or self.beta):
            return
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            for micro_batch in micro_batches:
                if need_old:
                    micro_batch["old_per_token_logps"] = self._logps(self.model, micro_batch)
                if self.beta:
                    micro_batch["ref_per_token_logps"] = self._reference_logps(micro_batch)

    def _reference_logps(self, micro_batch: MicroBatch) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, micro_batch)
        # A PEFT model is its own reference: without its adapter, or with the frozen copy named "ref".
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps(self.model, micro_batch)

    def _logps(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([micro_batch["prompt_ids"], micro_batch["completion_ids"]], dim=1),
            torch.cat([micro_batch["prompt_mask"], micro_batch["completion_mask"]], dim=1),
            micro_batch["completion_ids"].size(1),
            **{key: micro_batch[key] for key in _FORWARD_FIELDS if key in micro_batch},
        )[0]

    # Loss: TRL's own, brought to exact denominators.

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return TRL's loss times the factor that makes it divide by the planned denominators.

        With M micro-batches in the window, b rows in this one, R ranks and N rows (T tokens) to
        divide by, TRL's value is a mean over b rows (tokens) and over accumulation steps. Setting
        the steps to M and multiplying by b M R / N makes the sum over the window, averaged over
        ranks as DDP does, the sum over rows divided by N.
        """
        if not isinstance(inputs, MicroBatch):
            return super()._compute_loss(model, inputs)
        plan, steps = inputs.plan, self.current_gradient_accumulation_steps
        rounds_in_window = max(1.0, steps / len(plan.steps_R[0]))
        self.current_gradient_accumulation_steps = plan.num_micro_batches * rounds_in_window
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.current_gradient_accumulation_steps = steps
        spread = plan.num_micro_batches * self.accelerator.num_processes
        if self.loss_type in _ROW_MEAN_LOSSES:
            return loss * (len(inputs["completion_ids"]) * spread / plan.denominators.rows)
        if self.loss_type in _TOKEN_SUM_LOSSES:  # divided by num_items_in_batch, set when collating
            return loss
        num_tokens = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
        return loss * (num_tokens * spread / plan.denominators.tokens)

    # Records and state.

    def _log_stage_times(self) -> None:
        """Add what the pruned rows would have cost, at the price per row of this step's survivors."""
        num_sampled, num_trained = self._round_sizes
        spent_s = self._stage_s["update"] + self._stage_s["old_ref"]
        saved_s = spent_s * (num_sampled / num_trained - 1) if num_trained else 0.0
        self._log_metric_value("time/saved_est_s", saved_s)
        super()._log_stage_times()

    def _report_round(self, groups: Sequence[Group], selections: Sequence[Selection]) -> None:
        for name, value in self.fastrl.metrics().items():
            self._log_metric_value(name, value)
        if self.fastrl.config.trace and self.accelerator.is_main_process:
            write_rollouts(self._trace_path, groups, selections, step=self.fastrl.step - 1)

    @property
    def _trace_path(self) -> Path:
        return Path(self.args.output_dir) / "fastrl" / "rollouts.jsonl"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            path = Path(self._get_output_dir(trial=trial)) / folder / STATE_FILE
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.fastrl.state_dict()), encoding="utf-8")
            temporary.replace(path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_FILE
        if not path.is_file():
            raise StateError(
                f"{checkpoint} holds no {STATE_FILE}: it was not saved by a FastRL run, so its G_t and history are "
                "unknown. Resume from a checkpoint of this run, or start from its weights as a new run."
            )
        self.fastrl.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        if self.accelerator.is_main_process:
            forget_rollouts(self._trace_path, from_step=self.fastrl.step)


class FastGRPOTrainer(FastRLMixin, GRPOTrainer):
    """TRL's GRPOTrainer on the rollouts that teach something. All of its arguments, and `fastrl=`."""


def _check_supported(trainer: Any, config: FastRLConfig) -> None:
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"{trainer.accelerator.num_processes} processes: this version of the TRL adapter trains in one process. "
            "Launch a single process."
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ConfigError(
            "train_dataset is an IterableDataset: its prompts have no stable number to key G_t and a resume by. "
            "Give a map-style datasets.Dataset."
        )
    if config.outcome_key is not None and config.outcome_key not in trainer.reward_func_names:
        raise ConfigError(
            f"outcome_key: {config.outcome_key!r} is none of the reward functions "
            f"{', '.join(trainer.reward_func_names)}. Name the one that says whether the task was solved."
        )
    if trainer.beta and config.zero_variance == "drop":
        warnings.warn(
            f"zero_variance: drop with beta={trainer.beta:g} also drops the KL term of these groups. Set "
            "zero_variance: keep_all to keep it.",
            stacklevel=3,
        )


def _round_counts(trainer: Any, num_prompts: int) -> tuple[int, int]:
    """Rounds of the whole run and of one epoch, from the trainer's own schedule."""
    args = trainer.args
    rounds_per_epoch = num_prompts // trainer._prompts_per_round
    if rounds_per_epoch == 0:
        raise ConfigError(
            f"train_dataset has {num_prompts} prompts, fewer than the {trainer._prompts_per_round} of one round "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {trainer.num_generations}). Give "
            "more prompts, or lower per_device_train_batch_size or steps_per_generation."
        )
    steps_per_round = args.steps_per_generation * trainer.num_iterations
    updates_per_epoch = -(-rounds_per_epoch * steps_per_round // args.gradient_accumulation_steps)
    updates = args.max_steps if args.max_steps > 0 else -int(-args.num_train_epochs * updates_per_epoch // 1)
    return max(1, -(-updates * args.gradient_accumulation_steps // steps_per_round)), rounds_per_epoch


def _windows(steps_per_generation: int, accumulation: int) -> tuple[int, int]:
    """(optimizer windows that a round feeds, micro-steps it gives to each)."""
    if steps_per_generation % accumulation == 0:
        return steps_per_generation // accumulation, accumulation
    if accumulation % steps_per_generation == 0:
        return 1, steps_per_generation
    return steps_per_generation, 1  # misaligned: every micro-step may end up in another window
