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
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch.utils.data import Sampler
from trl import GRPOTrainer

from fastrl.batching import Sharing, align_top_up, plan_round
from fastrl.config import FastRLConfig
from fastrl.integrations._signatures import differing_signatures
from fastrl.integrations._trl_checkpoint import STATE_FILE, CheckpointMixin
from fastrl.integrations._trl_data import PROMPT_ID, NumberedRows, PromptSampler, Reserve, prompt_ids_of
from fastrl.integrations._trl_logps import DeferredLogpsMixin, loss_mask
from fastrl.integrations._trl_prefill import VERIFIED as SHARED_PREFILL_MODELS
from fastrl.integrations._trl_prefix import VERIFIED as SHARED_PREFIX_MODELS
from fastrl.integrations._trl_prefix import SharedPrefix
from fastrl.integrations._trl_round import RoundRows, build_micro_batches, join_waves
from fastrl.integrations._trl_rows import MicroBatch
from fastrl.integrations._trl_run_folder import RunFolder, model_card_section
from fastrl.integrations._trl_schedule import Schedule, check_supported
from fastrl.integrations._trl_stages import EXPECTED, STAGES, StageTimesMixin
from fastrl.integrations._trl_waves import Wave, WavesMixin
from fastrl.method import FastRL
from fastrl.types import FastRLError, Group, GroupError, NonFiniteError, NoSignalError, Selection

__all__ = [
    "SHARED_PREFILL_MODELS",
    "SHARED_PREFIX_MODELS",
    "STATE_FILE",
    "FastGRPOTrainer",
    "FastRLMixin",
    "TimedGRPOTrainer",
    "signature_problems",
]

_ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
_TOKEN_SUM_LOSSES = ("dapo", "cispo", "vespo")
_TABLE = ("kept", "weight", "cluster", "group")
"""Columns of the table of completions that are ours, under `fastrl/`."""


def signature_problems() -> list[str]:
    """Name what differs between the installed TRL and the one this adapter was written for."""
    return differing_signatures(GRPOTrainer, EXPECTED)


class TimedGRPOTrainer(StageTimesMixin, GRPOTrainer):
    """TRL's GRPOTrainer with stage clocks and row counts: the baseline that FastRL is compared with."""

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._log_metric_value("num_rollouts/mean", float(self.num_generations))
            self._counts["rollouts"] += len(inputs) * self.accelerator.num_processes
        return output

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        if self.model.training:
            mask = inputs["completion_mask"]
            rows, tokens = self.accelerator.reduce(mask.new_tensor([len(mask), int(mask.sum())])).tolist()
            self._counts["trained/rows"] += rows
            self._counts["trained/tokens"] += tokens
        return super()._compute_loss(model, inputs)


class FastRLMixin(CheckpointMixin, WavesMixin, DeferredLogpsMixin):
    """Pruning and adaptive rollouts for a GRPOTrainer: `class Mine(FastRLMixin, MyGRPOTrainer)`.

    Args:
        fastrl: The settings; None is the published setting. `FastRLConfig(pruner="none",
            budget="fixed")` gives the trainer's own gradients.

    Raises:
        ConfigError: a setting of the trainer that FastRL cannot serve; says which and what to do.
    """

    # What TRL's trainer holds and this class sets, for a while or for good.
    current_gradient_accumulation_steps: float
    _signature_columns: list[str] | None
    _tag_names: list[str]

    def __init__(self, *args: Any, fastrl: FastRLConfig | None = None, **kwargs: Any) -> None:
        after_ours = type(self).__mro__[type(self).__mro__.index(FastRLMixin) :]
        host = next(c for c in after_ours if issubclass(c, GRPOTrainer) and c not in FastRLMixin.__mro__)
        problems = differing_signatures(host, EXPECTED)
        if problems:
            raise FastRLError(
                f"this trainer is not the one FastRL was written for (TRL 1.16): {'; '.join(problems)}. Install "
                "trl 1.16, or adapt the overrides in fastrl.integrations.trl."
            )
        for name in ("_get_train_sampler", "get_train_dataloader"):
            if getattr(host, name) is not getattr(GRPOTrainer, name):
                warnings.warn(
                    f"{host.__name__}.{name} is not called in training: FastRL reads one row per prompt, the same on "
                    "every rank. Order the data set itself (shuffle_dataset=False keeps its order).",
                    stacklevel=2,
                )
        self._micro_batches: list[MicroBatch | None] = []
        self._round_sizes = 0, 0  # rollouts sampled and trained on, over all ranks
        self._stopped_by: NoSignalError | None = None
        super().__init__(*args, **kwargs)
        config = fastrl or FastRLConfig()
        check_supported(self, config)
        self._share_prompt = config.share_prompt
        self._prefix = SharedPrefix(
            self.model, is_on=config.share_prompt == "auto" and not config.is_identity
        )
        self._prompt_ids = prompt_ids_of(self.train_dataset)
        self._row_of_id = {prompt_id: row for row, prompt_id in enumerate(self._prompt_ids)}
        self._numbered_rows = NumberedRows(self.train_dataset, self._prompt_ids)
        self._reserve = Reserve(len(self._prompt_ids), self.args.seed)
        self._finished_s: Counter[str] = Counter()
        self._schedule = schedule = Schedule.of(self.args, self.num_iterations, len(self._prompt_ids))
        self.fastrl = FastRL(
            config,
            num_rollouts=self.num_generations,
            total_steps=schedule.total_rounds,
            steps_per_epoch=schedule.rounds_per_epoch,
        )
        self._initial_state = self.fastrl.state_dict()
        if config.budget == "ars" and schedule.total_rounds <= schedule.rounds_per_epoch:
            warnings.warn(
                f"budget: ars changes G_t after each epoch of {schedule.rounds_per_epoch} rounds, and this run has "
                f"only {schedule.total_rounds}: G_t stays at {self.num_generations}. Train for several epochs, or "
                "set budget: fixed.",
                stacklevel=2,
            )
        self._num_not_finite = torch.zeros((), device=self.accelerator.device)
        self._run_folder = RunFolder(
            self.args.output_dir,
            self.fastrl,
            num_ranks=self.accelerator.num_processes,
            is_main=self.accelerator.is_main_process,
        )
        self.add_callback(self._run_folder)
        self._tag_names = [*self._tag_names, "fastrl"]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as GRPOTrainer does; `resume_from_checkpoint=True` goes on from the last whole checkpoint.

        Raises:
            StateError: a checkpoint that is not whole, or of another run; names the last whole one.
            NoSignalError: `max_empty_steps` steps had nothing to learn from; a checkpoint was saved first.
        """
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        self._stopped_by = None
        if not checkpoint:  # also when the same trainer trains a second time: a run from its weights
            self._step, self._remembered = 0, None
            self._reserve.num_drawn = 0
            self._prefix.is_checked = False
            self._finished_s.clear()
            self.fastrl.load_state_dict(self._initial_state)
        output = super().train(checkpoint, *args, **kwargs)
        if self._stopped_by is not None:
            raise self._stopped_by
        return output

    # Data: one row per prompt, the same prompts on every rank.

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        self._signature_columns = columns if PROMPT_ID in columns else [*columns, PROMPT_ID]

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return PromptSampler(
            len(self._prompt_ids),
            self._schedule.prompts_per_round,
            num_micro_steps=self._schedule.micro_steps_per_round,
            num_ranks=self.accelerator.num_processes,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int((self.state.epoch or 0) + 1e-6),
        )

    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(
            dataset=self._numbered_rows,
            description="Training",
            batch_size=self._schedule.prompts_per_round,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    # Selection: from full groups to the micro-batches of the survivors.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        model.train()
        # As transformers does, but before anything is sampled: such optimizers swap weights here.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        start = time.perf_counter()
        self._remember()
        if self._step % self._schedule.micro_steps_per_round == 0:
            self._micro_batches = []  # their memory is for what is sampled now
            self._micro_batches = self._new_round(inputs)
        micro_batch = self._micro_batches[self._step % self.args.steps_per_generation]
        self._current_train_step_time += time.perf_counter() - start
        if micro_batch is None:  # a surplus micro-step: no forward, no backward, on any rank
            self._step += 1
            return torch.zeros((), device=self.accelerator.device)
        self._counts["trained/rows"] += micro_batch.num_rows
        self._counts["trained/tokens"] += micro_batch.num_tokens
        return super().training_step(model, micro_batch, num_items_in_batch)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _new_round(self, inputs: list) -> list[MicroBatch | None]:
        """Sample, select, and plan one round; returns this rank's micro-steps."""
        seconds = self._seconds_of_last_round()
        waves, groups = self._sample_round(inputs)
        with self._clock("select"):
            self._round_prompt_ids = [prompt_id for wave in waves for prompt_id in wave.prompt_ids]
            rows = join_waves([wave.rows for wave in waves])
            selections = self.fastrl.select(groups, num_prompts=len(inputs))
            micro_batches = self._plan_micro_batches([w.batch for w in waves], rows, groups, selections)
            del waves  # what was pruned needs no memory while log-probs are computed
        trained = [step for step in micro_batches if step is not None]
        self._check_shared_prefix(trained)
        self._compute_deferred_logps(trained)
        with self._clock("select"):
            self._end_round(groups, selections, seconds)
            self._report_round(groups, selections)
        return micro_batches

    def _seconds_of_last_round(self) -> dict[str, float] | None:
        """What a budget with measured prices reads: the main process's clocks, the same on every rank."""
        finished, self._finished_s = self._finished_s, Counter()
        config = self.fastrl.config
        if config.budget != "discovery" or config.rollout_cost is not None or not finished:
            return None
        seconds = {
            "generation": finished["generation"] + finished["rewards"],
            "update": finished["update"] + finished["old_ref"],
            "step": finished.total(),
        }
        return broadcast_object_list([seconds], from_process=0)[0]

    def _groups(self, wave: Wave) -> list[Group]:
        rows = wave.rows
        config, per_func = self.fastrl.config, wave.rewards_per_func.detach().cpu().double()
        weighted = (per_func * self.reward_weights.cpu().double()).nansum(1)
        rewards_N = torch.where(per_func.isnan().all(1), torch.nan, weighted).numpy()
        outcomes_N = rewards_N
        if config.outcome_key is not None:
            outcomes_N = per_func[:, self.reward_func_names.index(config.outcome_key)].numpy()
        elif self.multi_objective_aggregation == "normalize_then_sum":
            # Not a function of the total reward: equal totals can differ in it.
            outcomes_N = rows.advantages_N
        if not config.is_identity:
            # What no forward pass can learn from (cut off and masked, or with an image token that stands for
            # nothing) stands for nobody. It stays in the baseline and in the outcomes: TRL has counted it there.
            rewards_N = np.where((rows.loss_N > 0) & ~rows.foreign_N, rewards_N, np.nan)
        self._log_metric_value("frac_image_token", float(rows.foreign_N.mean()))
        groups, ends = [], np.cumsum(wave.counts_P)
        for prompt_id, end, count in zip(wave.prompt_ids, ends, wave.counts_P, strict=True):
            of_group = slice(int(end - count), int(end))
            self._check_finite(per_func[of_group], prompt_id)
            groups.append(
                Group(
                    prompt_id=prompt_id,
                    tokens_G=rows.tokens_N[of_group],
                    rewards_G=rewards_N[of_group],
                    advantages_G=rows.advantages_N[of_group],
                    outcomes_G=outcomes_N[of_group],
                    logps_G=None
                    if rows.logps_N is None
                    else [row.tolist() for row in rows.logps_N[of_group]],
                )
            )
        return groups if config.is_identity else self.fastrl.with_advantages(groups)

    def _check_finite(self, per_func: torch.Tensor, prompt_id: str) -> None:
        for row, func in per_func.isinf().nonzero().tolist():
            raise GroupError(
                f"reward function {self.reward_func_names[func]!r} returned {per_func[row, func].item()} for rollout "
                f"{row} of prompt {prompt_id!r}. Rewards must be finite, or None for a rollout that cannot be scored."
            )

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        """Evaluate, as TRL does; in its table the rows of an evaluation stand behind those of the last round."""
        batch = super()._generate_and_score_completions(inputs)
        for name in _TABLE:
            num_rows = len(inputs) * self.accelerator.num_processes
            self._logs["extra"][f"fastrl/{name}"].extend([None] * num_rows)
        return batch

    def _plan_micro_batches(
        self,
        batches: Sequence[dict[str, Any]],
        rows: RoundRows,
        groups: Sequence[Group],
        selections: Sequence[Selection],
    ) -> list[MicroBatch | None]:
        config, num_ranks = self.fastrl.config, self.accelerator.num_processes
        aligned, num_added = list(selections), 0
        if config.align == "top_up":
            aligned, num_added = align_top_up(groups, selections, num_ranks)
        keep_N = np.concatenate([selection.keep_G for selection in aligned]) & ~rows.foreign_N
        sizes = [group.num_rollouts for group in groups]
        group_N = np.repeat(np.arange(len(groups)), sizes)
        plans = plan_round(
            keep_N,
            tokens_N=rows.loss_N,
            length_N=rows.length_N,
            live_N=np.repeat(
                [
                    group.has_signal and selection.reason != "surplus"
                    for group, selection in zip(groups, selections, strict=True)
                ],
                sizes,
            ),
            image_N=rows.image_N,
            owner_N=rows.owner_N,
            sharing=Sharing(group_N=group_N, prompt_N=rows.prompt_N) if self._prefix.is_active else None,
            num_windows=self._schedule.windows_per_round,
            num_steps=self._schedule.steps_per_window,
            size=self.args.per_device_train_batch_size,
            shrink=config.micro_batches == "shrink",
            denominator=self.fastrl.denominator,
            num_ranks=num_ranks,
            rng=self.fastrl.rng(purpose=1),
        )
        num_kept = int(keep_N.sum())
        self._round_sizes = len(keep_N), num_kept
        self._counts["rollouts"] += len(keep_N)
        self._log_metric_value("top_up/frac", num_added / max(num_kept, 1))
        # TRL permutes each round's rows here. Drawing the same numbers keeps the random state, and so
        # the next round's samples, what they are without FastRL.
        torch.randperm(len(batches[0]["advantages"]))
        push_N = np.concatenate(
            [selection.push_G(group) for group, selection in zip(groups, aligned, strict=True)]
        )
        return build_micro_batches(
            self.accelerator,
            batches,
            plans,
            rows,
            keep_N=keep_N,
            advantages_N=push_N,
            group_N=group_N,
            steps_per_generation=self.args.steps_per_generation,
            pad_token_id=self._tokenizer.pad_token_id,
            multiple=self.pad_to_multiple_of,
        )

    def _end_round(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        seconds: dict[str, float] | None,
    ) -> None:
        try:
            self.fastrl.observe(groups, selections, seconds=seconds)
        except NoSignalError as error:  # raised by `train`, once this optimizer step is done and saved
            self._stopped_by = error

    # Loss: TRL's own, brought to exact denominators.

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return TRL's loss times the factor that makes it divide by the planned denominators.

        With M micro-batches in the window, b rows in this one, R ranks and N rows (T tokens) to
        divide by, TRL's value is a mean over b rows (tokens) and over accumulation steps. Setting
        the steps to M and multiplying by b M R / N makes the sum over the window, averaged over
        ranks as DDP does, the sum over rows divided by N.

        Raises:
            NonFiniteError: on all ranks, before the optimizer step.
        """
        if not isinstance(inputs, MicroBatch):
            return super()._compute_loss(model, inputs)
        steps = self.current_gradient_accumulation_steps
        rounds_in_window = max(1.0, steps / inputs.num_steps)
        self.current_gradient_accumulation_steps = inputs.num_micro_batches * rounds_in_window
        try:
            with self._unreported_if_empty(inputs), self._sharing(inputs):
                loss = super()._compute_loss(model, inputs)
        finally:
            self.current_gradient_accumulation_steps = steps
        loss = loss * self._loss_factor(inputs)
        self._check_loss(loss)
        return loss

    @contextlib.contextmanager
    def _unreported_if_empty(self, inputs: MicroBatch) -> Iterator[None]:
        """Where a window trains on no token, take back what TRL reports of it: an entropy, KL and clip ratio of 0.

        Its adaptive entropy coefficient would take that 0 for a collapse and rise.
        """
        trains = inputs.num_tokens > 0 or getattr(self, "_entropy_window_stats", None) is not None
        if trains or self.fastrl.config.is_identity:
            yield
            return
        metrics = self._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        entropy = {name: getattr(self, name) for name in ("entropy_coef", "_last_world_entropy")}
        yield
        for name, values in metrics.items():
            del values[lengths.get(name, 0) :]
        for name, value in entropy.items():
            setattr(self, name, value)

    def _loss_factor(self, inputs: MicroBatch) -> float | torch.Tensor:
        spread = inputs.num_micro_batches * self.accelerator.num_processes
        if self.loss_type in _ROW_MEAN_LOSSES:
            return len(inputs["completion_ids"]) * spread / inputs.denominators.rows
        if self.loss_type in _TOKEN_SUM_LOSSES:  # divided by num_items_in_batch, set when collating
            return 1.0
        return loss_mask(inputs).sum() * spread / inputs.denominators.tokens

    def _check_loss(self, loss: torch.Tensor) -> None:
        self._num_not_finite += (~torch.isfinite(loss.detach())).float()
        if not self.accelerator.sync_gradients:
            return
        # Before the last backward pass of the window: engines such as DeepSpeed step inside it.
        num_not_finite = int(self.accelerator.reduce(self._num_not_finite, reduction="sum"))
        self._num_not_finite.zero_()
        if num_not_finite:
            raise NonFiniteError(
                f"the loss of optimizer step {self.state.global_step + 1} is not finite in {num_not_finite} "
                "micro-batches: the step would destroy the weights and was not taken. Usual causes: a learning rate "
                "that is too high, float16 that overflows, or log-probs of a sampler that differs from the trainer. "
                "Resume from the last checkpoint with a lower learning rate, bfloat16 or max_grad_norm."
            )

    # Records and state.

    def _end_optimizer_step(self) -> None:
        """Add what the pruned rows would have cost, at the price per row of this step's survivors."""
        num_sampled, num_trained = self._round_sizes
        spent_s = self._stage_s["update"] + self._stage_s["old_ref"]
        saved_s = spent_s * (num_sampled / num_trained - 1) if num_trained else 0.0
        self._log_metric_value("time/saved_est_s", saved_s)
        self._finished_s.update({stage: self._stage_s[stage] for stage in STAGES})
        if self._stopped_by is not None:
            self.control.should_save = self.control.should_training_stop = True
        super()._end_optimizer_step()

    def _report_round(self, groups: Sequence[Group], selections: Sequence[Selection]) -> None:
        for name, value in self.fastrl.metrics().items():
            self._log_metric_value(name, value)
        self._run_folder.write_rollouts(groups, selections, step=self.fastrl.step - 1)
        self._add_to_table(selections)

    def _add_to_table(self, selections: Sequence[Selection]) -> None:
        """Show in TRL's table of completions what became of each: beside its columns, under our prefix."""
        extra = self._logs["extra"]
        columns: dict[str, list] = {f"fastrl/{name}": [] for name in _TABLE}
        taken = sorted(set(columns) & set(extra))
        if taken:
            raise FastRLError(
                f"a reward function logs {', '.join(taken)} with log_extra: columns under fastrl/ are FastRL's own. "
                "Rename it."
            )
        for prompt_id, selection in zip(self._round_prompt_ids, selections, strict=True):
            columns["fastrl/kept"] += selection.keep_G.tolist()
            columns["fastrl/weight"] += selection.weight_G.tolist()
            columns["fastrl/cluster"] += selection.cluster_G.tolist()
            columns["fastrl/group"] += [prompt_id] * len(selection.keep_G)
        for name, values in columns.items():
            extra[name].extend(values)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            with (Path(self.args.output_dir) / "README.md").open("a", encoding="utf-8") as card:
                card.write(model_card_section(self.fastrl.config.to_dict()))


class FastGRPOTrainer(FastRLMixin, GRPOTrainer):
    """TRL's GRPOTrainer on the rollouts that teach something. All of its arguments, and `fastrl=`."""
