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
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from fastrl.batching import DUMMY, WindowPlan, align_top_up, plan_round
from fastrl.config import FastRLConfig
from fastrl.integrations._trl_data import PROMPT_ID, NumberedRows, PromptSampler, own_row, prompt_ids_of
from fastrl.integrations._trl_rows import (
    FORWARD_FIELDS,
    MicroBatch,
    OncePerPrompt,
    repeat_prompts,
    split_rows,
    take_rows,
)
from fastrl.integrations._trl_schedule import Schedule, check_supported
from fastrl.integrations._trl_stages import StageTimesMixin, differing_signatures
from fastrl.method import FastRL
from fastrl.trace import forget_rollouts, write_rollouts
from fastrl.types import FastRLError, Group, GroupError, Selection, StateError

STATE_FILE = "fastrl_state.json"

_ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
_TOKEN_SUM_LOSSES = ("dapo", "cispo", "vespo")


def signature_problems() -> list[str]:
    """Name what differs between the installed TRL and the one this adapter was written for."""
    return differing_signatures(GRPOTrainer)


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
            self._counts["trained/rows"] += len(inputs["completion_ids"]) * self.accelerator.num_processes
            self._counts["trained/tokens"] += (
                int(inputs["completion_mask"].sum()) * self.accelerator.num_processes
            )
        return super()._compute_loss(model, inputs)


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
        self._round_prompt_ids: list[str] = []
        self._defer_logps = False
        self._has_traced = False
        super().__init__(*args, **kwargs)
        config = fastrl or FastRLConfig()
        check_supported(self, config)
        self._prompt_ids = prompt_ids_of(self.train_dataset)
        self._schedule = schedule = Schedule.of(self.args, self.num_iterations, len(self._prompt_ids))
        self.fastrl = FastRL(
            config,
            num_rollouts=self.num_generations,
            total_steps=schedule.total_rounds,
            steps_per_epoch=schedule.rounds_per_epoch,
        )
        if config.budget == "ars" and schedule.total_rounds <= schedule.rounds_per_epoch:
            warnings.warn(
                f"budget: ars changes G_t after each epoch of {schedule.rounds_per_epoch} rounds, and this run has "
                f"only {schedule.total_rounds}: G_t stays at {self.num_generations}. Train for several epochs, or "
                "set budget: fixed.",
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
            self._schedule.prompts_per_round,
            num_micro_steps=self._schedule.micro_steps_per_round,
            num_ranks=self.accelerator.num_processes,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int((self.state.epoch or 0) + 1e-6),
        )

    def get_train_dataloader(self) -> Any:
        return self._get_dataloader(
            dataset=NumberedRows(self.train_dataset, self._prompt_ids),
            description="Training",
            batch_size=self._schedule.prompts_per_round,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    # Generation: groups of G_t, rewards and advantages by TRL, log-probs put off.

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        counts_P = self.fastrl.plan(self._round_prompt_ids)
        num_generations = int(counts_P[0])
        assert (counts_P == num_generations).all(), "every budget so far gives all prompts the same count"
        slots = [p for p in range(len(inputs)) for _ in range(num_generations)]
        for logged in self._logs.values():
            logged.clear()  # TRL keeps the last full batch of rows: more than a round with a smaller G_t
        with self._full_groups(num_generations, slots):
            return super()._generate_and_score_completions([own_row(inputs[p]) for p in slots])

    @contextlib.contextmanager
    def _full_groups(self, num_generations: int, slots: list[int]) -> Iterator[None]:
        """Let TRL generate and score groups of another size, without log-probs and with images once per prompt."""
        saved = self.num_generations, self.beta, self.processing_class
        self.num_generations = num_generations
        if not self.use_vllm:  # with vLLM, TRL's importance ratio needs old log-probs at once
            self.beta, self._defer_logps = 0.0, True
        if self._is_vlm and not (self.tools or self.environment_factories or self.rollout_func):
            self.processing_class = OncePerPrompt(self.processing_class, slots)
        try:
            yield
        finally:
            self.num_generations, self.beta, self.processing_class = saved
            self._defer_logps = False

    def _tokenize_prompts(self, prompts: list) -> Any:
        once = self.processing_class
        if not isinstance(once, OncePerPrompt) or len(prompts) != len(once.slots):
            return super()._tokenize_prompts(prompts)
        slots = once.slots
        first_row = np.unique(slots, return_index=True)[1]
        prompt_ids, images, fields = super()._tokenize_prompts([prompts[row] for row in first_row])
        repeated = repeat_prompts(fields, images, slots)
        if repeated is None:
            return super()._tokenize_prompts(prompts)
        once.fields = repeated
        return [prompt_ids[p] for p in slots], images and [images[p] for p in slots], repeated

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> Any:
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        except Exception as error:
            if self.model.training:
                names, ids = ", ".join(self.reward_func_names), ", ".join(self._round_prompt_ids)
                error.add_note(f"FastRL: raised while scoring the prompts {ids} with {names}.")
            raise
        if self.model.training:
            self._rewards_per_func = rewards
            self._num_tokens = [len(ids) for ids in completion_ids_list]
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._defer_logps:
            return None, None, None
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    # Selection: from full groups to the micro-batches of the survivors.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        model.train()
        # As transformers does, but before anything is sampled: such optimizers swap weights here.
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        start = time.perf_counter()
        if self._step % self._schedule.micro_steps_per_round == 0 or not self._micro_batches:
            self._micro_batches = self._new_round(inputs)
        micro_batch = self._micro_batches[self._step % self.args.steps_per_generation]
        self._current_train_step_time += time.perf_counter() - start
        if micro_batch is None:  # a surplus micro-step: no forward, no backward, on any rank
            self._step += 1
            return torch.zeros((), device=self.accelerator.device)
        self._counts["trained/rows"] += micro_batch.num_rows
        self._counts["trained/tokens"] += int(_loss_mask(micro_batch).sum())
        return super().training_step(model, micro_batch, num_items_in_batch)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if isinstance(generation_batch, MicroBatch):
            return generation_batch
        return super()._prepare_inputs(generation_batch)

    def _new_round(self, inputs: list) -> list[MicroBatch | None]:
        """Sample, select, and plan one round; returns its micro-steps."""
        self._state_before_round = self.fastrl.state_dict()
        inputs = [dict(row) for row in inputs]
        self._round_prompt_ids = [row.pop(PROMPT_ID) for row in inputs]
        if not inputs[0]:  # a resume inside a round, whose first micro-step is past
            inputs = self._rows_of(self._round_prompt_ids)
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

    def _rows_of(self, prompt_ids: Sequence[str]) -> list[dict[str, Any]]:
        number = {prompt_id: row for row, prompt_id in enumerate(self._prompt_ids)}
        rows = [self.train_dataset[number[prompt_id]] for prompt_id in prompt_ids]
        if not self.args.remove_unused_columns:
            return rows
        return [{key: row[key] for key in row if key in (self._signature_columns or [])} for row in rows]

    def _groups(self, batch: dict[str, Any]) -> list[Group]:
        per_func = self._rewards_per_func.detach().cpu().double()  # (N, number of reward functions)
        weighted = (per_func * self.reward_weights.cpu().double()).nansum(1)
        rewards_N = torch.where(per_func.isnan().all(1), torch.nan, weighted).numpy()
        advantages_N = batch["advantages"].cpu().double().numpy()
        tokens_N = batch["completion_ids"].cpu().numpy()
        outcomes_N = rewards_N
        if self.fastrl.config.outcome_key is not None:
            outcomes_N = per_func[:, self.reward_func_names.index(self.fastrl.config.outcome_key)].numpy()
        elif self.multi_objective_aggregation == "normalize_then_sum":
            outcomes_N = advantages_N  # not a function of the total reward: equal totals can differ in it
        if not self.fastrl.config.is_identity:
            # A rollout without loss tokens (cut off, and masked) teaches nothing and stands for nobody.
            # It stays in the baseline and in the outcomes: TRL has counted it there.
            rewards_N = np.where(_loss_mask(batch).any(1).cpu().numpy(), rewards_N, np.nan)
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
                    outcomes_G=outcomes_N[rows],
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
        tokens_N = _loss_mask(batch).sum(1).cpu().numpy()
        size_P = [group.num_rollouts for group in groups]
        plans = plan_round(
            np.concatenate([selection.keep_G for selection in aligned]),
            tokens_N=tokens_N,
            length_N=(batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).cpu().numpy(),
            live_N=np.repeat([bool(np.any(group.advantages_G)) for group in groups], size_P),
            num_windows=self._schedule.windows_per_round,
            num_steps=self._schedule.steps_per_window,
            size=self.args.per_device_train_batch_size,
            denominator=self.fastrl.denominator,
            num_ranks=num_ranks,
            rng=self.fastrl.rng(purpose=1),
        )
        num_kept = sum(selection.num_kept for selection in aligned)
        self._round_sizes = sum(size_P), num_kept
        self._counts["rollouts"] += sum(size_P)
        self._log_metric_value("top_up/frac", num_added / max(num_kept, 1))
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
                num_rows = sum(row != DUMMY for row in rows)
                micro_batches.append(MicroBatch(taken, plan, num_rows))
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
            **{key: micro_batch[key] for key in FORWARD_FIELDS if key in micro_batch},
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
        return loss * (_loss_mask(inputs).sum() * spread / plan.denominators.tokens)

    # Records and state.

    def _end_optimizer_step(self) -> None:
        """Add what the pruned rows would have cost, at the price per row of this step's survivors."""
        num_sampled, num_trained = self._round_sizes
        spent_s = self._stage_s["update"] + self._stage_s["old_ref"]
        saved_s = spent_s * (num_sampled / num_trained - 1) if num_trained else 0.0
        self._log_metric_value("time/saved_est_s", saved_s)
        super()._end_optimizer_step()

    def _report_round(self, groups: Sequence[Group], selections: Sequence[Selection]) -> None:
        for name, value in self.fastrl.metrics().items():
            self._log_metric_value(name, value)
        if self.fastrl.config.trace and self.accelerator.is_main_process:
            step = self.fastrl.step - 1
            if not self._has_traced:  # an earlier run in this folder, or steps that a resume does again
                forget_rollouts(self._trace_path, from_step=step)
            write_rollouts(self._trace_path, groups, selections, step=step)
            self._has_traced = True

    @property
    def _trace_path(self) -> Path:
        return Path(self.args.output_dir) / "fastrl" / "rollouts.jsonl"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # First ours, then TRL's: once its checkpoint is complete, older ones may be deleted.
        if self.args.should_save:
            is_between_rounds = self._step % self._schedule.micro_steps_per_round == 0
            state = self.fastrl.state_dict() if is_between_rounds else self._state_before_round
            folder = (
                Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            )
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"{STATE_FILE}.tmp"
            temporary.write_text(json.dumps(state), encoding="utf-8")
            temporary.replace(folder / STATE_FILE)
        super()._save_checkpoint(model, trial)

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
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise StateError(f"{path} is damaged ({error}). Resume from an earlier checkpoint.") from error
        self.fastrl.load_state_dict(state)
        # TRL counts micro-steps from 0 again. Rounds are counted by them, so go on where the run stood.
        self._step = self._schedule.micro_steps(self.state.global_step)


class FastGRPOTrainer(FastRLMixin, GRPOTrainer):
    """TRL's GRPOTrainer on the rollouts that teach something. All of its arguments, and `fastrl=`."""


def _loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    """(B, C): tokens that the loss is taken over."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)
