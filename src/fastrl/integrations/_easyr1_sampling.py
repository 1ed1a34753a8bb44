"""Sampling in EasyR1 with the numbers of rollouts that a budget plans."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from fastrl.budgets import REMEMBERING
from fastrl.types import ConfigError

GROUP = "fastrl_group"
"""Column of a batch: which prompt of the step a row belongs to."""


class PlannedData:
    """The data of one batch, read with the number of rollouts that each prompt is to have."""

    def __init__(self, trainer: Any, iterator: Iterator[dict[str, Any]]) -> None:
        self.trainer, self.iterator = trainer, iterator
        self.num_read = 0

    def __iter__(self) -> "PlannedData":
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            rows = next(self.iterator)
        except StopIteration:  # here, so that EasyR1 goes on reading through this
            self.iterator = iter(self.trainer.train_dataloader)
            rows = next(self.iterator)
        self.num_read += 1
        config, fastrl = self.trainer.config, self.trainer.fastrl
        num_prompts = len(rows["input_ids"])
        if "id" not in rows and fastrl.config.budget in REMEMBERING:
            raise ConfigError(
                f"fastrl.budget={fastrl.config.budget} remembers prompts, but the training data has no column `id`. "
                "Add one (`fastrl data --to easyr1` does), or choose another budget."
            )
        places = [f"{self.num_read}.{place}" for place in range(num_prompts)]
        ids = [str(name) for name in rows.get("id", places)]
        rows = {**rows, GROUP: np.array(places, dtype=object)}
        counts = fastrl.plan(ids)
        if (counts == counts[0]).all():
            config.worker.rollout.n = int(counts[0])
            return rows
        counts = _filled_up(counts, self.trainer.actor_rollout_ref_wg.world_size)
        config.worker.rollout.n, config.data.rollout_batch_size = 1, int(counts.sum())
        repeated = np.repeat(np.arange(num_prompts), counts)
        return {name: values[repeated] for name, values in rows.items()}

    def sampler(self, workers: Any) -> "PlannedSampler":
        return PlannedSampler(workers, self.trainer.config.worker.rollout)


def _filled_up(counts: np.ndarray, multiple: int) -> np.ndarray:
    """Raise the smallest counts above 0 by one until the sum is a multiple: every rank samples as many rows."""
    counts = counts.copy()
    for _ in range(-int(counts.sum()) % multiple):
        sampled = np.flatnonzero(counts)
        counts[sampled[np.argmin(counts[sampled])]] += 1
    return counts


class PlannedSampler:
    """The worker group, with the planned number of rollouts sent along to the sampler."""

    def __init__(self, workers: Any, rollout: Any) -> None:
        self._workers, self._rollout = workers, rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def generate_sequences(self, prompts: Any) -> Any:
        prompts.meta_info.setdefault("n", self._rollout.n)
        return self._workers.generate_sequences(prompts)
