"""GRESO: skip prompts that have had zero variance on their last visits."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fastrl.advantages import is_zero_variance
from fastrl.budgets.base import OutcomeRange, check_keys, known_results
from fastrl.types import Group, Selection, prompt_entropy

_STEP = 0.01
_BOUNDS = (0.05, 0.95)
_TARGET = {"easy": 0.25 / 3, "hard": 0.25 * 2 / 3}
"""Shares of zero-variance groups that are aimed at: 25 %, a third of them solved, two thirds hopeless."""
_LEAST_VISITS = 0.01


class GRESO:
    """Sample num_rollouts for a prompt, or skip it with probability

        p_skip = 1 - max(p^c, 0.01)

    c is the number of visits in a row, up to the last, on which its group had zero variance of one kind (easy: all
    right; hard: all wrong). p is 0.5 for each kind at first, and after every step moves by 0.01: down while more than
    the target share of the step's groups are of that kind, else up, within [0.05, 0.95].

    The authors add dynamic sampling with a smaller extra batch (`refill: signal`), 8 rollouts, and compare with it.

    Differs from the paper: which kind a group is, is told by the middle of the outcomes seen so far, not by 0 and 1;
    and where all prompts of a step would be skipped, the one nearest to being sampled is.

    Args:
        num_rollouts: Of every prompt that is sampled.
        seed: Of the coins, with the step and the prompt's id.

    References:
        "Act Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts", arXiv
        2506.02177.
    """

    options: ClassVar[tuple[str, ...]] = ("seed",)

    def __init__(
        self,
        *,
        num_rollouts: int,
        seed: int = 0,
    ) -> None:
        self.num_rollouts = num_rollouts
        self.seed = seed
        self.range = OutcomeRange()
        self.base = dict.fromkeys(_TARGET, 0.5)
        self.streaks: dict[str, tuple[str, int]] = {}  # kind and length; prompts without one are not in it

    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray:
        # Below 0: sampled. A prompt that occurs twice tosses once.
        margin_P = np.array(
            [self._coin(prompt_id, step) - self.visit_chance(prompt_id) for prompt_id in prompt_ids]
        )
        sampled_P = margin_P < 0
        if len(prompt_ids) and not sampled_P.any():
            lowest = min(zip(margin_P.tolist(), prompt_ids, strict=True))[1]
            sampled_P = np.array([prompt_id == lowest for prompt_id in prompt_ids])
        return np.where(sampled_P, self.num_rollouts, 0)

    def visit_chance(self, prompt_id: str) -> float:
        """Return 1 - p_skip."""
        kind, length = self.streaks.get(prompt_id, ("easy", 0))
        return max(self.base[kind] ** length, _LEAST_VISITS)

    def _coin(self, prompt_id: str, step: int) -> float:
        return float(np.random.default_rng([self.seed, step, prompt_entropy(prompt_id)]).random())

    def weights(self, counts_P: np.ndarray) -> np.ndarray:
        return np.ones(len(counts_P))

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.range.update(groups)
        kinds = [self._kind(group) for group in groups]
        by_id = sorted((group.prompt_id, kind or "") for group, kind in zip(groups, kinds, strict=True))
        for prompt_id, kind in by_id:
            before, length = self.streaks.pop(prompt_id, (kind, 0))
            if kind:
                self.streaks[prompt_id] = kind, length + 1 if before == kind else 1
        for name, target in _TARGET.items():
            share = kinds.count(name) / max(len(groups), 1)
            moved = self.base[name] + (-_STEP if share > target else _STEP)
            self.base[name] = float(np.clip(moved, *_BOUNDS))

    def _kind(self, group: Group) -> str | None:
        """easy, hard, or None for a group with signal or without any outcome."""
        values = known_results(group)
        if not len(values) or not is_zero_variance(values):
            return None
        return "easy" if self.range.is_success(values).all() else "hard"

    def state_dict(self) -> dict[str, Any]:
        return {
            "range": self.range.state(),
            "base": dict(self.base),
            "streaks": {key: list(values) for key, values in self.streaks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "GRESO budget")
        base = {name: float(state["base"][name]) for name in _TARGET}
        streaks = {str(key): (str(kind), int(length)) for key, (kind, length) in state["streaks"].items()}
        self.range, self.base, self.streaks = OutcomeRange(*state["range"]), base, streaks

    def metrics(self) -> dict[str, float]:
        return {f"budget/greso_p_{name}": self.base[name] for name in _TARGET}
