"""Adaptive Rollout Sampling: the published budget."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fastrl.budgets.base import check_keys, check_unchanged
from fastrl.types import ConfigError, Group, Selection


class ARS:
    """Adaptive Rollout Sampling: one G_t for all prompts, updated once per epoch (paper, Eq. 10-14).

    Over an epoch, the mean and the maximum over prompts of the retained count are collected per
    step and averaged over the epoch's steps: G'mean, G'max. With alpha = step / total_steps,

        G'_t   = alpha * G'mean + (1 - alpha) * G'max                                      (Eq. 12)
        G'_ref = (G'mean + G'max) / 2            after the first epoch                     (Eq. 13)
        G      = max(round(G_1 - max(0, G'_ref - G'_t)), 2)                                (Eq. 14)

    and G never exceeds G_1. Retained counts are those of the pruner, before any alignment. `round`
    goes to the even neighbour at .5, as Python's does.

    Args:
        num_rollouts: G_1.
        min_rollouts: Floor under G (2 in the paper).
        total_steps: Steps of the whole run, for alpha.
        steps_per_epoch: Steps after which G is updated.

    Raises:
        ConfigError: total_steps or steps_per_epoch missing or below 1.
    """

    options: ClassVar[tuple[str, ...]] = ("min_rollouts", "total_steps", "steps_per_epoch")

    def __init__(
        self,
        *,
        num_rollouts: int,
        min_rollouts: int = 2,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("steps_per_epoch", steps_per_epoch)):
            if value is None or value < 1:
                raise ConfigError(
                    f"budget: ars needs {name} of at least 1, got {value}: G_t is updated once per epoch from "
                    "the share of the run that is over. Give both, or set budget: fixed."
                )
        assert total_steps is not None
        assert steps_per_epoch is not None
        self.num_rollouts = num_rollouts
        self.min_rollouts = min_rollouts
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.current = num_rollouts
        self.reference: float | None = None
        self.steps_seen = 0
        self._means: list[float] = []
        self._maxima: list[float] = []

    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray:
        return np.full(len(prompt_ids), self.current)

    def weights(self, counts_P: np.ndarray) -> np.ndarray:
        return np.ones(len(counts_P))

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        kept_P = np.array([selection.num_kept for selection in selections])
        self._means.append(float(kept_P.mean()))
        self._maxima.append(float(kept_P.max()))
        self.steps_seen += 1
        if len(self._means) == self.steps_per_epoch:
            self._end_epoch(float(np.mean(self._means)), float(np.mean(self._maxima)))
            self._means, self._maxima = [], []

    def _end_epoch(self, mean: float, maximum: float) -> None:
        alpha = min(1.0, self.steps_seen / self.total_steps)
        target = alpha * mean + (1 - alpha) * maximum
        if self.reference is None:
            self.reference = (mean + maximum) / 2
        delta = max(0.0, self.reference - target)
        self.current = min(self.num_rollouts, max(round(self.num_rollouts - delta), self.min_rollouts))

    def state_dict(self) -> dict[str, Any]:
        return {
            "total_steps": self.total_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "current": self.current,
            "reference": self.reference,
            "steps_seen": self.steps_seen,
            "epoch_means": list(self._means),
            "epoch_maxima": list(self._maxima),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "ARS budget")
        schedule = {"total_steps": self.total_steps, "steps_per_epoch": self.steps_per_epoch}
        check_unchanged({key: state[key] for key in schedule}, schedule)
        current, steps_seen = int(state["current"]), int(state["steps_seen"])
        reference = None if state["reference"] is None else float(state["reference"])
        means, maxima = ([float(v) for v in state[key]] for key in ("epoch_means", "epoch_maxima"))
        # All of it could be read: only now does anything change.
        self.current, self.reference, self.steps_seen = current, reference, steps_seen
        self._means, self._maxima = means, maxima

    def metrics(self) -> dict[str, float]:
        return {
            "budget/ars_current": float(self.current),
            "budget/ars_reference": float("nan") if self.reference is None else self.reference,
        }
