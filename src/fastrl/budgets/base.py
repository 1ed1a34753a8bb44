"""What all budgets share: the protocol, weights of uneven groups, strict states; and the budget that never moves."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from fastrl.types import Group, Selection, StateError


class Budget(Protocol):
    """What the registry holds.

    `options` names what the class takes beside the ceiling `num_rollouts`: fields of `FastRLConfig`, and `total_steps`
    and `steps_per_epoch` of the run.
    """

    options: ClassVar[tuple[str, ...]]

    def __init__(self, *, num_rollouts: int, **options: Any) -> None: ...
    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray: ...
    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None: ...
    def weights(self, counts_P: np.ndarray) -> np.ndarray: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class FixedBudget:
    """The same number of rollouts for every prompt of every step: the base algorithm.

    Args:
        num_rollouts: G.
    """

    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts

    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray:
        return np.full(len(prompt_ids), self.num_rollouts)

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """A fixed budget learns nothing."""

    def weights(self, counts_P: np.ndarray) -> np.ndarray:
        return np.ones(len(counts_P))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "fixed budget")

    def metrics(self) -> dict[str, float]:
        return {}


def equal_prompt_weights(counts_P: np.ndarray, most: int) -> np.ndarray:
    """Return the factors that make every prompt count the same, at a scale that does not move with G.

        f_q = mean(G) / G_q * [G_q / (G_q - 1)] / [G_max / (G_max - 1)]

    A loss that averages over rows gives a prompt with twice the rollouts twice the weight: the first factor takes
    that back. A baseline that includes the rollout itself shrinks the expected gradient by (G - 1) / G: the second
    takes that back, relative to the engine's own G_max.

    Args:
        counts_P: (P,) rollouts per prompt. One rollout alone has A = 0, and factor 1.
        most: G_max.
    """
    if not len(counts_P):
        return np.ones(0)
    unshrunk_P = counts_P / np.maximum(counts_P - 1, 1) / (most / max(most - 1, 1))
    return np.where(counts_P > 1, counts_P.mean() / counts_P * unshrunk_P, 1.0)


def known_results(group: Group) -> np.ndarray:
    """Return the results of a group (`Group.results_G`) that are not NaN."""
    return group.results_G[~np.isnan(group.results_G)]


class OutcomeRange:
    """The lowest and highest outcome ever seen: a success is what lies above the middle.

    Differs from peers that assume rewards of 0 and 1: shaped totals have other values.
    """

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        self.low, self.high = low, high

    def update(self, groups: Sequence[Group]) -> None:
        values = np.concatenate([known_results(group) for group in groups])
        if len(values):
            self.low = float(values.min()) if self.low is None else min(self.low, float(values.min()))
            self.high = float(values.max()) if self.high is None else max(self.high, float(values.max()))

    def is_success(self, values: np.ndarray) -> np.ndarray:
        """bool. While all outcomes ever seen are equal, the positive ones are successes."""
        if self.low is None or self.high is None or self.low == self.high:
            return values > 0
        return values > (self.low + self.high) / 2

    def state(self) -> list[float | None]:
        return [self.low, self.high]


def check_keys(state: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Read strictly: a state with other keys than ours was written by something else."""
    if set(state) != set(expected):
        raise StateError(
            f"state of the {what}: found the keys {sorted(state)}, expected {sorted(expected)}. It was saved "
            "by another configuration or version: resume with the settings of the saved run."
        )


def check_unchanged(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with settings other than the saved ones; name each that differs."""
    changed = [key for key in sorted({*saved, *current}) if saved.get(key) != current.get(key)]
    if changed:
        listed = ", ".join(f"{key} (saved {saved.get(key)!r}, now {current.get(key)!r})" for key in changed)
        raise StateError(
            f"the configuration changed since this state was saved: {listed}. A resumed run must go on as it "
            "began: restore these settings, or start a new run."
        )
