"""FastRL inside verl's V1 trainer.

    python -m fastrl.integrations.verl <any override of verl.trainer.main_ppo> +fastrl.tau=0.8

Distribution, sharding, generation, checkpoints and fault handling are verl's. Once the rewards of a step are known,
advantages are estimated over full groups by verl's own estimator, the method selects, and the rows of dropped
rollouts leave the transfer queue before any log-prob is computed. The number of rollouts of a prompt is
verl's own per-prompt key, `__rollout_n__`.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from verl.trainer import main_ppo
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from fastrl.batching import align_top_up, denominators, rows_per_update
from fastrl.budgets import REMEMBERING
from fastrl.integrations._ray_metrics import all_and_trained
from fastrl.integrations._ray_state import load_state, write_state
from fastrl.integrations._signatures import differing_signatures
from fastrl.integrations._verl_loss import ROWS, TOKENS, loss_over_denominators
from fastrl.integrations._verl_plugin import STOCK
from fastrl.integrations._verl_round import Round, prompt_ids_of, read_round
from fastrl.integrations._verl_settings import ESTIMATORS, check_supported, settings_of
from fastrl.method import FastRL
from fastrl.trace import forget_steps, write_rollouts
from fastrl.types import ConfigError, FastRLError, Group, NoSignalError, Selection

if TYPE_CHECKING:  # a mixin: its methods are those of the trainer it is mixed into
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object

_EXPECTED = {
    "__init__": "config",
    "_balance_batch": "batch metrics",
    "_compute_advantage": "batch metrics",
    "_compute_metrics": "batch metrics timing_raw",
    "_compute_old_log_prob": "batch metrics",
    "_get_required_batch_multiple": "dp_size",
    "_init_dataloader": "",
    "_load_checkpoint": "",
    "_log_rollout_data": "batch timing_raw rollout_data_dir",
    "_save_checkpoint": "",
    "_setup": "",
    "_submit_batch_to_rollout": "batch",
    "_update_actor": "batch metrics",
    "on_step_end": "",
}
"""Leading parameters of verl's methods that are overridden; a new verl that differs must be looked at."""


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """What a round trains on.

    Args:
        push: Frozen advantage times weight, by key of the transfer queue.
        rows_per_update: Rows of a mini-batch, over all ranks.
        extra_info: Denominators, as the loss reads them.
        num_sampled: Rollouts before pruning.
    """

    push: Mapping[str, float]
    rows_per_update: int
    extra_info: Mapping[str, float]
    num_sampled: int


class FastRLMixin(_Host):
    """Pruning and adaptive rollouts for a V1 trainer of verl: `class Mine(FastRLMixin, PPOTrainerSync)`.

    Settings are the block `fastrl` of verl's configuration. With `pruner: none` and `budget: fixed`, every
    override but the metrics is verl's own method.

    Raises:
        ConfigError: a setting of verl that FastRL cannot serve; says which and what to do.
    """

    def __init__(self, config: Any) -> None:
        self._settings = settings_of(config)
        check_supported(config, self._settings)
        self._trained: _Trained | None = None
        self._of_all: dict[str, float] = {}
        self._seconds: dict[str, float] | None = None
        self._stopped_by: NoSignalError | None = None
        print(f"FastRL is active: {self._settings}", flush=True)  # where verl prints its configuration
        super().__init__(config)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self._check_index()
        self.fastrl = FastRL(
            self._settings,
            num_rollouts=self.config.actor_rollout_ref.rollout.n,
            total_steps=self.total_training_steps,
            steps_per_epoch=max(1, self.steps_per_epoch),
        )

    def _check_index(self) -> None:
        """A budget that remembers prompts must be able to tell them apart."""
        if self._settings.budget not in REMEMBERING:
            return
        frame = self.train_dataset.dataframe
        rows = frame["extra_info"] if "extra_info" in frame.column_names else [{}] * len(frame)
        index = [(row or {}).get("index", 0) for row in rows]
        if len(set(index)) < len(index):
            raise ConfigError(
                f"fastrl.budget={self._settings.budget} remembers prompts by extra_info.index, of which the training "
                f"data has {len(set(index))} different ones for {len(index)} rows. Number the rows (`fastrl data --to "
                "verl` does), or choose another budget."
            )

    def _setup(self) -> None:
        super()._setup()
        if self.fastrl.config.is_identity:
            return
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(loss_over_denominators, config=actor))

    # Rollouts per prompt.

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if not self.fastrl.config.is_identity:
            counts = self.fastrl.plan(prompt_ids_of(batch["index"]))
            batch["__rollout_n__"] = NonTensorStack(*counts.tolist())
        return super()._submit_batch_to_rollout(batch)

    # Selection: after the rewards, before the first log-prob.

    def _balance_batch(self, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> Any:
        batch = self._select(batch, metrics)
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _select(self, batch: Any, metrics: dict) -> Any:
        config = self.fastrl.config
        if config.is_identity and str(self.config.algorithm.adv_estimator) not in ESTIMATORS:
            self._log_all(batch)  # verl's own run, with advantages that are not one number per rollout
            return batch
        sampled = read_round(
            batch,
            self.config.algorithm,
            outcome_key=config.outcome_key,
            with_logps=config.similarity == "surprisal",
        )
        groups = sampled.groups if config.is_identity else self.fastrl.with_advantages(sampled.groups)
        selections = self.fastrl.select(groups)
        self._log_all(batch)
        try:
            self.fastrl.observe(groups, selections, seconds=self._seconds)
        except NoSignalError as error:  # raised once this step is done and saved
            self._stopped_by = error
        self._report(groups, selections, sampled, metrics)
        if config.is_identity:
            return batch
        return self._keep(batch, sampled, groups, selections, metrics)

    def _keep(
        self,
        batch: Any,
        sampled: Round,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        metrics: dict,
    ) -> Any:
        """Remove the rows of dropped rollouts from the batch and from the queue, and plan the update."""
        per_update, num_added = self._rows_per_update(sum(s.num_kept for s in selections)), 0
        if self.fastrl.config.align == "top_up":
            selections, num_added = align_top_up(groups, selections, per_update)
        keep_N = sampled.rows(selections)
        per_update = self._rows_per_update(int(keep_N.sum()))
        self._trained = _Trained(
            push=sampled.pushes(selections),
            rows_per_update=per_update,
            extra_info=self._denominators(sampled, keep_N, per_update),
            num_sampled=len(keep_N),
        )
        metrics["fastrl/top_up/frac"] = num_added / max(int(keep_N.sum()), 1)
        metrics["fastrl/trained/rows"] = float(keep_N.sum())
        metrics["fastrl/trained/tokens"] = float(sampled.tokens_N[keep_N].sum())
        metrics["fastrl/trained/rows_per_update"] = float(per_update)
        keys = np.array(sampled.keys, dtype=object)
        dropped, kept = keys[~keep_N].tolist(), set(keys[keep_N])
        trained = (
            batch.select_keys([key for key in batch.keys if key in kept])
            if kept
            else self._only_filling(batch)
        )
        if dropped:  # verl clears the rows that it trains on, and knows of no others
            tq.kv_clear(keys=dropped, partition_id=batch.partition_id)
        return trained

    def _only_filling(self, batch: Any) -> Any:
        """Where nothing is kept: one filling row of verl's, which has no loss, so that every rank has a batch."""
        first = batch.select_keys(batch.keys[:1])
        filled = upsample_batch_to_divisible_size(first, 2, self.tokenizer.eos_token_id)
        return filled.select_keys(filled.keys[1:])

    def _rows_per_update(self, num_rows: int) -> int:
        """Rows of a mini-batch: `updates: fixed` follows the kept count, `rows` is verl's own number."""
        config = self.config.actor_rollout_ref
        if self.fastrl.config.updates == "rows":
            return config.actor.ppo_mini_batch_size * config.rollout.n
        return rows_per_update(num_rows, self._num_updates, multiple=self._row_multiple())

    @property
    def _num_updates(self) -> int:
        """Optimizer steps of one pass over a step's rollouts, without pruning."""
        return max(
            1, self.config.data.train_batch_size // self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        )

    def _row_multiple(self) -> int:
        """What the rows of a mini-batch must be a multiple of: the ranks, and micro-batches of a fixed size on each."""
        group, config = self.actor_rollout_wg, self.config.actor_rollout_ref
        ranks = group._dispatch_info.get("actor") or group._query_dispatch_info("actor")
        num_ranks = max(ranks) + 1
        if config.actor.use_dynamic_bsz:
            return num_ranks
        sizes = [config.actor.ppo_micro_batch_size_per_gpu, config.rollout.log_prob_micro_batch_size_per_gpu]
        if self.use_reference_policy:
            sizes.append(config.ref.log_prob_micro_batch_size_per_gpu)
        return num_ranks * math.lcm(*[size or 1 for size in sizes])

    def _denominators(self, sampled: Round, keep_N: np.ndarray, per_update: int) -> dict[str, float]:
        kind = self.fastrl.denominator
        is_kept = kind == "kept"
        num_updates = max(1, -(-int(keep_N.sum()) // per_update)) if is_kept else self._num_updates
        divide_by = denominators(
            kind,
            tokens_N=sampled.tokens_N,
            live_N=sampled.live_N,
            window=np.flatnonzero(keep_N),
            num_windows=num_updates,
        )
        if is_kept:  # rows: spread evenly over the updates; tokens: verl counts those of each mini-batch
            return {ROWS: max(1.0, divide_by.rows / num_updates), TOKENS: 0.0}
        return {ROWS: divide_by.rows, TOKENS: divide_by.tokens}

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self._trained is None:
            return super()._get_required_batch_multiple(dp_size)
        return self._trained.rows_per_update

    # Training: frozen advantages, mini-batches that follow the kept count.

    @property
    def _trains_on_nothing(self) -> bool:
        return self._trained is not None and not self._trained.push

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        if self._trains_on_nothing:  # verl compares sampler and actor here, and refuses to over no tokens
            return self._put(batch, {"old_log_probs": {}, "entropy": {}})
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        if not self._trains_on_nothing:
            batch = super()._compute_advantage(batch, metrics)  # with its rollout correction
        if self._trained is None:
            return batch
        return self._put(batch, {"advantages": self._trained.push, "returns": self._trained.push})

    def _put(self, batch: Any, columns: Mapping[str, Mapping[str, float]]) -> Any:
        """Write columns with one number per row on its response tokens; 0 for a row without a number."""
        read = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"]
        )
        mask = read["response_mask"]
        padded = mask.to_padded_tensor(padding=0)
        fields = {}
        for name, number_of in columns.items():
            numbers = torch.tensor([number_of.get(key, 0.0) for key in batch.keys], dtype=torch.float32)
            fields[name] = response_to_nested(numbers[:, None] * padded, mask)
        return tq.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
        )

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        if self._trained is None:
            return super()._update_actor(batch, metrics)
        batch.extra_info.update(self._trained.extra_info)
        with self._mini_batches_of(self._trained.rows_per_update):
            return super()._update_actor(batch, metrics)

    @contextlib.contextmanager
    def _mini_batches_of(self, rows: int) -> Iterator[None]:
        """verl multiplies two settings to a number of rows, and reads them nowhere else while it updates."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        own = actor.ppo_mini_batch_size, rollout.n
        actor.ppo_mini_batch_size, rollout.n = rows, 1
        try:
            yield
        finally:
            actor.ppo_mini_batch_size, rollout.n = own

    # Records and state.

    def _report(
        self, groups: Sequence[Group], selections: Sequence[Selection], sampled: Round, metrics: dict
    ) -> None:
        self._of_all = sampled.metrics
        metrics.update({f"fastrl/{name}": value for name, value in self.fastrl.metrics().items()})
        metrics["fastrl/rollouts"] = float(sum(group.num_rollouts for group in groups))
        if self.fastrl.config.trace:
            write_rollouts(self._records, groups, selections, step=self.fastrl.step - 1)

    @property
    def _records(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / "fastrl" / "rollouts.jsonl"

    def _log_all(self, batch: Any) -> None:
        """Dump all rollouts where verl is asked to, while they are all there."""
        folder = self.config.trainer.get("rollout_data_dir", None)
        if folder:
            super()._log_rollout_data(batch, self.timing_raw, folder)

    def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None:
        """Nothing: `_log_all` wrote this step's rollouts, before the dropped ones left the queue."""

    def _compute_metrics(
        self, batch: Any, metrics: dict, timing_raw: dict, *args: Any, **kwargs: Any
    ) -> None:
        """Log verl's metrics of data over all rollouts; those of the trained ones are under `fastrl/trained/`."""
        if self._trains_on_nothing:  # verl takes extremes over rows that are no filling: there must be one
            batch = replace(batch, tags=[{**tag, "is_padding": False} for tag in batch.tags])
        super()._compute_metrics(batch, metrics, timing_raw, *args, **kwargs)
        metrics.update(self._of_all if self._trains_on_nothing else all_and_trained(self._of_all, metrics))
        spent = {
            name: timing_raw.get(name, 0.0) for name in ("gen", "old_log_prob", "ref", "update_actor", "step")
        }
        update_s = spent["old_log_prob"] + spent["ref"] + spent["update_actor"]
        self._seconds = {"generation": spent["gen"], "update": update_s, "step": spent["step"]}
        if self._trained is not None:
            num_trained = len(self._trained.push)
            saved = update_s * (self._trained.num_sampled / num_trained - 1) if num_trained else 0.0
            metrics["fastrl/time/saved_est_s"] = saved

    def on_step_end(self) -> None:
        super().on_step_end()
        if self._stopped_by is not None:
            self._save_checkpoint()
            raise self._stopped_by

    def _save_checkpoint(self) -> None:
        """Write FastRL's state first: verl names a checkpoint as the latest when all of it is there."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        write_state(folder, self.fastrl)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            load_state(self._resumed_from(), self.fastrl)
        forget_steps(self._records, from_step=self.fastrl.step)

    def _resumed_from(self) -> Path:
        trainer = self.config.trainer
        if trainer.resume_mode == "resume_path":
            return Path(trainer.resume_from_path)
        return Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"


def with_fastrl(host: type) -> type:
    """Return a V1 trainer of verl with FastRL mixed in.

    Raises:
        FastRLError: a trainer whose methods are not those that this adapter overrides.
    """
    host = vars(host).get(STOCK, host)
    if issubclass(host, FastRLMixin):
        return host
    problems = differing_signatures(host, _EXPECTED)
    if problems:
        raise FastRLError(
            f"this trainer is not the one FastRL was written for (verl 0.9.1): {'; '.join(problems)}. Install verl "
            "0.9.1, or adapt the overrides in fastrl.integrations.verl."
        )
    return type(f"FastRL{host.__name__}", (FastRLMixin, host), {})


def install(mode: str) -> type:
    """Let verl build FastRL's trainer where it would build its own of this mode, in this process.

    Args:
        mode: `trainer.v1.trainer_mode`.

    Raises:
        ConfigError: an unknown mode.
    """
    from verl.trainer.ppo.v1 import trainer_base

    if mode not in trainer_base.TRAINER_REGISTRY:
        known = ", ".join(sorted(trainer_base.TRAINER_REGISTRY))
        raise ConfigError(f"trainer.v1.trainer_mode={mode} is none of verl's modes: {known}.")
    trainer_base.TRAINER_REGISTRY[mode] = with_fastrl(trainer_base.TRAINER_REGISTRY[mode])
    return trainer_base.TRAINER_REGISTRY[mode]


class FastRLTaskRunner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner, with FastRL's trainer in place of its own."""

    def run(self, config: Any) -> None:
        install(config.trainer.v1.trainer_mode)
        super().run(config)


def main() -> None:
    """Run verl's training with FastRL; takes every override of `verl.trainer.main_ppo`."""
    import hydra

    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(_main)()


def _main(config: Any) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    if not config.trainer.use_v1:
        raise ConfigError(
            "trainer.use_v1=False: verl's older trainer computes a whole step in one function and cannot train on "
            "fewer rollouts than it sampled. Leave trainer.use_v1 at True."
        )
    check_supported(config, settings_of(config))
    auto_set_device(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    main_ppo.run_ppo(config, task_runner_class=ray.remote(FastRLTaskRunner))


if __name__ == "__main__":
    # By its importable name: what runs as __main__ is pickled whole into Ray's processes.
    from fastrl.integrations.verl import main as _run

    _run()
