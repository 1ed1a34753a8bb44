"""FastRL inside EasyR1, in EasyR1's own environment (its package is called `verl`, too).

    python -m fastrl.integrations.easyr1 config=examples/config.yaml fastrl.tau=0.8

EasyR1's step is one function that makes a batch and then trains on it. FastRL takes part where the batch is made:
rewards are computed there, over full groups, advantages by EasyR1's own estimator, and only survivors are handed on.
What the rest of the step computes from a batch - advantages, metrics of data, seconds - it looks up by name in its
module, where three functions are wrapped. Workers get a subclass with two methods.
"""

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from fastrl.batching import align_top_up, denominators, rows_per_update
from fastrl.config import FastRLConfig
from fastrl.integrations._easyr1_hooks import (
    OF_ALL,
    PUSH,
    UPDATES,
    frozen_advantages,
    metrics_of_all,
    recorded_seconds,
    with_varying_batches,
)
from fastrl.integrations._easyr1_sampling import GROUP, PlannedData
from fastrl.integrations._easyr1_settings import check_supported, settings_of
from fastrl.integrations._ray_state import load_state, write_state
from fastrl.integrations._signatures import differing_signatures
from fastrl.method import FastRL
from fastrl.trace import forget_steps, write_rollouts
from fastrl.types import FastRLError, Group, GroupError, NoSignalError, Selection

_Host: Any = object  # a mixin: its methods are those of the trainer it is mixed into
_EXPECTED = {"_make_batch_data": "metrics", "_save_checkpoint": "", "_load_checkpoint": "", "fit": ""}
_EXPECTED_OF_WORKER = {"_process_multi_modal_inputs": "data", "update_actor": "data"}


class FastRLMixin(_Host):
    """Pruning and adaptive rollouts for EasyR1's RayPPOTrainer. Made by `with_fastrl`, which sets what it needs.

    Raises:
        ConfigError: a setting of EasyR1 that FastRL cannot serve; says which and what to do.
    """

    settings: FastRLConfig
    estimate: Any  # its own compute_advantage
    measure: Any  # its own compute_data_metrics
    seconds: dict[str, float]
    data_iterator: Any
    actor_rollout_ref_wg: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        check_supported(config, self.settings)
        super().__init__(config, *args, **kwargs)
        self.config: Any
        self._stopped_by: NoSignalError | None = None
        self.fastrl = FastRL(
            self.settings,
            num_rollouts=config.worker.rollout.n,
            total_steps=self.training_steps,
            steps_per_epoch=max(1, len(self.train_dataloader)),
        )
        print(f"FastRL is active: {self.settings}", flush=True)

    # Sampling: as many rollouts as the budget says.

    def _make_batch_data(self, metrics: dict[str, Any]) -> Any:
        if self._stopped_by is not None:  # the step before had its checkpoint
            raise self._stopped_by
        if self.fastrl.config.is_identity:
            return super()._make_batch_data(metrics)
        with self._planned_rollouts():
            batch = super()._make_batch_data(metrics)
        # EasyR1 numbers rows as it reads them, so prompts that were repeated have several numbers.
        batch.non_tensor_batch["uid"] = batch.non_tensor_batch[GROUP]
        return self._select(batch, metrics)

    @contextlib.contextmanager
    def _planned_rollouts(self) -> Iterator[None]:
        """Let EasyR1 make a batch with the planned counts.

        It repeats every prompt `worker.rollout.n` times, here and in its workers. Equal counts are that number, sent
        along to the workers. Different ones are rows of the data that are repeated, each sampled once.
        """
        rollout, data = self.config.worker.rollout, self.config.data
        own = rollout.n, data.rollout_batch_size, self.data_iterator, self.actor_rollout_ref_wg
        planned = PlannedData(self, own[2])
        self.data_iterator, self.actor_rollout_ref_wg = planned, planned.sampler(own[3])
        try:
            yield
        finally:
            rollout.n, data.rollout_batch_size, self.actor_rollout_ref_wg = own[0], own[1], own[3]
            self.data_iterator = planned.iterator

    # Selection.

    def _select(self, batch: Any, metrics: dict[str, Any]) -> Any:
        extra = self._score(batch, metrics)
        groups, rows_PG = self._groups(batch, extra)
        groups = self.fastrl.with_advantages(groups)
        selections = self.fastrl.select(groups)
        of_all = self._metrics_of_all(batch)
        try:
            self.fastrl.observe(groups, selections, seconds=dict(self.seconds) or None)
        except NoSignalError as error:
            self._stopped_by = error
        metrics.update({f"fastrl/{name}": value for name, value in self.fastrl.metrics().items()})
        metrics["fastrl/rollouts"] = float(len(batch))
        if self.fastrl.config.trace:
            write_rollouts(self._records, groups, selections, step=self.fastrl.step - 1)
        trained = self._keep(batch, groups, selections, rows_PG, metrics)
        trained.meta_info[OF_ALL] = of_all
        return trained

    def _score(self, batch: Any, metrics: dict[str, Any]) -> Mapping[str, Sequence[float]]:
        """Compute rewards of all rollouts, if EasyR1 has not yet; returns what the reward function says beside them."""
        known = "token_level_scores" in batch.batch.keys()  # noqa: SIM118 - a TensorDict
        if known and self.settings.outcome_key is None:
            return {}
        scores, extra = ray.get(self.reward_fn.compute_reward.remote(batch))
        batch.batch["token_level_scores"] = scores
        if not known:
            metrics.update({f"reward/{name}": float(np.mean(values)) for name, values in extra.items()})
        return extra

    def _groups(
        self, batch: Any, extra: Mapping[str, Sequence[float]]
    ) -> tuple[list[Group], list[list[int]]]:
        """The rollouts of each prompt, and their rows; prompts in the order of their ids."""
        rewards = batch.batch["token_level_scores"].double().sum(-1).numpy()
        mask = batch.batch["response_mask"].bool()
        advantages = self._advantages(batch)
        outcomes = rewards if self.settings.outcome_key is None else self._outcomes(extra)
        rows_of: dict[str, list[int]] = defaultdict(list)
        for row, place in enumerate(batch.non_tensor_batch[GROUP]):
            rows_of[place].append(row)
        ids = batch.non_tensor_batch.get("id", batch.non_tensor_batch[GROUP])
        ordered = sorted(rows_of.values(), key=lambda rows: (str(ids[rows[0]]), rows))
        groups = []
        for rows in ordered:
            if not np.isfinite(rewards[rows]).all():
                raise GroupError(
                    f"the reward function returned {rewards[rows].tolist()} for prompt {ids[rows[0]]!r}. EasyR1's "
                    "rewards must be finite: return 0 for a rollout that cannot be scored."
                )
            learns_G = mask[rows].any(-1).numpy()
            groups.append(
                Group(
                    prompt_id=str(ids[rows[0]]),
                    tokens_G=[batch.batch["responses"][row][mask[row]].tolist() for row in rows],
                    rewards_G=np.where(learns_G, rewards[rows], np.nan),
                    advantages_G=advantages[rows],
                    outcomes_G=outcomes[rows],
                )
            )
        return groups, ordered

    def _outcomes(self, extra: Mapping[str, Sequence[float]]) -> np.ndarray:
        key = self.settings.outcome_key or ""
        if key not in extra:
            raise GroupError(
                f"outcome_key: {key!r} is not what the reward function returned ({', '.join(extra) or 'nothing'}). Let "
                "it return that entry."
            )
        return np.array(extra[key], dtype=np.float64)

    def _advantages(self, batch: Any) -> np.ndarray:
        """(rows,) EasyR1's own, over full groups."""
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        mask = torch.ones_like(batch.batch["response_mask"])
        data = copy.copy(batch.select(["token_level_rewards", "response_mask"], ["uid"]))
        data.batch = data.batch.clone()
        data.batch["response_mask"] = mask  # also a rollout without loss tokens is part of the baseline
        algorithm = self.config.algorithm
        estimated = type(self).estimate(
            data, adv_estimator=algorithm.adv_estimator, gamma=algorithm.gamma, lam=algorithm.lam
        )
        batch.batch["advantages"] = estimated.batch["advantages"] * batch.batch["response_mask"]
        batch.batch["returns"] = batch.batch["advantages"]
        return estimated.batch["advantages"][:, 0].double().numpy()

    def _metrics_of_all(self, batch: Any) -> dict[str, Any]:
        found = type(self).measure(batch=batch, use_critic=False)
        for name in ("advantages", "returns"):
            batch.batch.pop(name)
        return found

    # What is trained on.

    def _keep(
        self,
        batch: Any,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        rows_PG: Sequence[Sequence[int]],
        metrics: dict[str, Any],
    ) -> Any:
        """Survivors and rows that fill up the ranks, with what the update needs to know."""
        world = self.actor_rollout_ref_wg.world_size
        per_update, num_added = self._rows_per_update(sum(s.num_kept for s in selections), world), 0
        if self.settings.align == "top_up":
            selections, num_added = align_top_up(groups, selections, per_update)
        push = np.zeros(len(batch))
        kept: list[int] = []
        for group, selection, rows in zip(groups, selections, rows_PG, strict=True):
            push[rows] = selection.push_G(group)
            kept += [row for row, keep in zip(rows, selection.keep_G, strict=True) if keep]
        num_kept = len(kept)
        lengths = batch.batch["response_mask"].sum(-1).numpy()
        push *= self._scale(groups, rows_PG, kept, lengths)
        shortest = int(lengths.argmin()) if not kept else min(kept, key=lengths.__getitem__)
        per_update = self._rows_per_update(num_kept, world)
        num_updates = max(1, -(-num_kept // per_update))
        filling = [shortest] * (num_updates * per_update - num_kept)
        trained = batch[[*kept, *filling]]
        pushes = torch.tensor([*push[kept], *([0.0] * len(filling))], dtype=torch.float32)
        trained.batch[PUSH] = pushes[:, None] * trained.batch["response_mask"]
        if kept:
            trained.batch["response_mask"][num_kept:] = 0
        # else: EasyR1 divides by the response tokens of a mini-batch, of which there must be some. A = 0 there.
        trained.meta_info[UPDATES] = num_updates
        metrics["fastrl/top_up/frac"] = num_added / max(num_kept, 1)
        metrics["fastrl/trained/rows"] = float(num_kept)
        metrics["fastrl/trained/tokens"] = float(lengths[kept].sum())
        return trained

    def _rows_per_update(self, num_kept: int, world: int) -> int:
        actor, data = self.config.worker.actor, self.config.data
        if self.settings.updates == "rows":
            return actor.global_batch_size * self.config.worker.rollout.n
        num_updates = max(1, data.rollout_batch_size // actor.global_batch_size)
        return rows_per_update(num_kept, num_updates, multiple=world)

    def _scale(
        self,
        groups: Sequence[Group],
        rows_PG: Sequence[Sequence[int]],
        kept: Sequence[int],
        lengths: np.ndarray,
    ) -> float:
        """What makes EasyR1's mean over survivors one over what `denominator` says, in the policy term."""
        window = np.array(sorted(kept), dtype=np.int64)
        live_N = np.zeros(len(lengths), dtype=bool)
        for group, rows in zip(groups, rows_PG, strict=True):
            live_N[rows] = group.has_signal
        found, own = (
            denominators(kind, tokens_N=lengths, live_N=live_N, window=window, num_windows=1)
            for kind in (self.fastrl.denominator, "kept")
        )
        if self.config.worker.actor.loss_avg_mode == "token":
            return own.tokens / found.tokens
        return own.rows / found.rows

    # Records and state.

    @property
    def _records(self) -> Path:
        return Path(self.config.trainer.save_checkpoint_path) / "fastrl" / "rollouts.jsonl"

    def _save_checkpoint(self) -> None:
        write_state(
            Path(self.config.trainer.save_checkpoint_path) / f"global_step_{self.global_step}", self.fastrl
        )
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.global_step: int
        if self.global_step:
            given = self.config.trainer.load_checkpoint_path
            found = Path(self.config.trainer.save_checkpoint_path) / f"global_step_{self.global_step}"
            load_state(Path(given) if given else found, self.fastrl)
        forget_steps(self._records, from_step=self.fastrl.step)


# How it gets into EasyR1.


def with_fastrl(host: type, engine: Any, settings: FastRLConfig) -> type:
    """Return EasyR1's trainer with FastRL mixed in, and wrap the functions that its step looks up.

    Args:
        host: RayPPOTrainer.
        engine: Its module, verl.trainer.ray_trainer.
        settings: Of FastRL.

    Raises:
        FastRLError: a trainer whose methods are not those that this adapter overrides.
    """
    _check(host, _EXPECTED)
    seconds: dict[str, float] = {}
    own = {name: getattr(engine, name) for name in ("compute_advantage", "compute_data_metrics")}
    members = {
        "settings": settings,
        "estimate": staticmethod(own["compute_advantage"]),
        "measure": staticmethod(own["compute_data_metrics"]),
        "seconds": seconds,
    }
    engine.compute_advantage = frozen_advantages(own["compute_advantage"])
    engine.compute_data_metrics = metrics_of_all(own["compute_data_metrics"])
    timing = engine.compute_timing_metrics
    engine.compute_timing_metrics = recorded_seconds(timing, seconds)
    return type(f"FastRL{host.__name__}", (FastRLMixin, host), members)


def _check(host: type, expected: Mapping[str, str]) -> None:
    problems = differing_signatures(host, expected)
    if problems:
        raise FastRLError(
            f"this EasyR1 is not the one FastRL was written for (b44b311, July 2026): {'; '.join(problems)}. Use that "
            "version, or adapt fastrl.integrations.easyr1."
        )


def install(main_module: Any, engine: Any, settings: FastRLConfig) -> None:
    """Let EasyR1's runner build FastRL's trainer and workers, in this process.

    Args:
        main_module: verl.trainer.main, which looks both up by name.
        engine: verl.trainer.ray_trainer.
    """
    main_module.RayPPOTrainer = with_fastrl(main_module.RayPPOTrainer, engine, settings)
    _check(main_module.FSDPWorker, _EXPECTED_OF_WORKER)
    main_module.FSDPWorker = with_varying_batches(main_module.FSDPWorker)


def runner_with(settings: FastRLConfig, runner: Any) -> Any:
    """EasyR1's runner, which installs FastRL in its own process first."""

    class FastRLRunner(runner.__ray_metadata__.modified_class):
        def run(self, config: Any) -> Any:
            from verl.trainer import main as main_module
            from verl.trainer import ray_trainer

            install(main_module, ray_trainer, settings)
            return super().run(config)

    return ray.remote(num_cpus=1)(FastRLRunner)


def main() -> None:
    """Run EasyR1's training with FastRL; takes every argument of `verl.trainer.main`."""
    settings, sys.argv[1:] = settings_of(sys.argv[1:])
    try:
        from verl.trainer import main as main_module
        from verl.trainer import ray_trainer  # noqa: F401 - verl itself has no such module
    except ImportError as error:
        raise FastRLError(
            f"EasyR1 is not installed here ({error}). Run this in EasyR1's own environment; with verl itself, use "
            "python -m fastrl.integrations.verl."
        ) from error
    main_module.Runner = runner_with(settings, main_module.Runner)
    main_module.main()


if __name__ == "__main__":
    main()
