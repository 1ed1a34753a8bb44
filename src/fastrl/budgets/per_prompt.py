"""Rollouts dealt out to prompts: the same total in every step, most where a group is likely to teach something."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fastrl.budgets.base import OutcomeRange, check_keys, equal_prompt_weights, known_results
from fastrl.types import Group, Selection

_FADE = 0.98
"""Of evidence per step since it was seen: the policy changes, and a skipped prompt comes back in time."""
_LEAST_CHANCE = 0.25
"""A prompt is skipped if even the most rollouts would give a group with signal less often than this."""


class PerPrompt:
    """Deal P * initial_rollouts rollouts out by the chance that each prompt's group has signal.

    The success rate of a prompt has a Beta posterior, from Beta(1, 1) and its discounted successes s and failures f.
    n rollouts give a group with signal with probability

        U(n) = E[1 - p^n - (1 - p)^n],   E[p^n] = prod_{i<n} (a + i) / (a + b + i),  a = 1 + s, b = 1 + f

    which is concave from n = 2 on, so giving the next rollout where U grows most is optimal. Hopeless and solved
    prompts (U(ceiling) < 1/4) are skipped; as their evidence fades, they are visited again. What the skipped leave
    goes to the others, up to the ceiling. Unseen prompts get initial_rollouts at least, as far as the total allows.

    Differs from Knapsack RL (arXiv 2509.25849): a posterior in place of the last epoch's rate, and no factor
    p (1 - p)^2.

    Args:
        num_rollouts: Ceiling of a prompt.
        min_rollouts: Floor of a prompt that is not skipped.
        initial_rollouts: Mean over the prompts of a step; None = the ceiling.
    """

    options: ClassVar[tuple[str, ...]] = ("min_rollouts", "initial_rollouts")

    def __init__(
        self,
        *,
        num_rollouts: int,
        min_rollouts: int = 2,
        initial_rollouts: int | None = None,
    ) -> None:
        self.num_rollouts = num_rollouts
        self.min_rollouts = min_rollouts
        self.mean_rollouts = initial_rollouts or num_rollouts
        self.range = OutcomeRange()
        self.steps_seen = 0
        # Per prompt: discounted successes, failures, and the step after which they stood so.
        self._evidence: dict[str, tuple[float, float, int]] = {}
        self._skipped_share = 0.0

    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray:
        counts_P = np.zeros(len(prompt_ids), dtype=np.int64)
        if not len(prompt_ids):
            return counts_P
        posteriors = [self._posterior(prompt_id) for prompt_id in prompt_ids]
        gains_PN = np.diff([signal_chances(a, b, self.num_rollouts) for a, b in posteriors], axis=1)
        chance_P = gains_PN.sum(axis=1)
        # Ties by id and place, so that the order of the prompts decides nothing.
        order = sorted(range(len(prompt_ids)), key=lambda p: (prompt_ids[p], p))
        sampled = [p for p in order if chance_P[p] >= _LEAST_CHANCE]
        if not sampled:
            sampled = [max(order, key=lambda p: chance_P[p])]
        counts_P[sampled] = self.min_rollouts
        left = len(prompt_ids) * self.mean_rollouts - int(counts_P.sum())
        unseen = [p for p in sampled if prompt_ids[p] not in self._evidence]
        for _ in range(self.mean_rollouts - self.min_rollouts):
            for p in unseen[: max(left, 0)]:
                counts_P[p] += 1
                left -= 1
        self._deal(counts_P, gains_PN, sampled, left)
        return counts_P

    def _deal(self, counts_P: np.ndarray, gains_PN: np.ndarray, sampled: Sequence[int], left: int) -> None:
        """Give `left` rollouts, one by one, to whom the next gains most; among equals, to the first of `sampled`."""
        waiting = [
            (-gains_PN[p, counts_P[p]], rank, p)
            for rank, p in enumerate(sampled)
            if counts_P[p] < self.num_rollouts
        ]
        heapq.heapify(waiting)
        while left > 0 and waiting:
            _, rank, p = waiting[0]
            counts_P[p] += 1
            left -= 1
            if counts_P[p] < self.num_rollouts:
                heapq.heapreplace(waiting, (-gains_PN[p, counts_P[p]], rank, p))
            else:
                heapq.heappop(waiting)

    def weights(self, counts_P: np.ndarray) -> np.ndarray:
        return equal_prompt_weights(counts_P, self.num_rollouts)

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.range.update(groups)
        self.steps_seen += 1
        found: dict[str, list[float]] = {}
        for group in sorted(groups, key=lambda group: group.prompt_id):
            is_right = self.range.is_success(known_results(group))
            counts = found.setdefault(group.prompt_id, [0.0, 0.0])
            counts[0] += float(is_right.sum())
            counts[1] += float((~is_right).sum())
        for prompt_id, (right, wrong) in found.items():
            a, b = self._posterior(prompt_id)
            self._evidence[prompt_id] = a - 1.0 + right, b - 1.0 + wrong, self.steps_seen
        posteriors = [self._posterior(prompt_id) for prompt_id in sorted(found)]
        chances = [signal_chances(a, b, self.num_rollouts)[-1] for a, b in posteriors]
        self._skipped_share = float(np.mean(np.array(chances) < _LEAST_CHANCE)) if chances else 0.0

    def _posterior(self, prompt_id: str) -> tuple[float, float]:
        """a and b of the Beta posterior now."""
        right, wrong, since = self._evidence.get(prompt_id, (0.0, 0.0, self.steps_seen))
        fade = _FADE ** (self.steps_seen - since)
        return 1.0 + fade * right, 1.0 + fade * wrong

    def state_dict(self) -> dict[str, Any]:
        return {
            "range": self.range.state(),
            "steps_seen": self.steps_seen,
            "evidence": {key: list(values) for key, values in self._evidence.items()},
            "skipped_share": self._skipped_share,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "per-prompt budget")
        evidence = {
            str(key): (float(right), float(wrong), int(since))
            for key, (right, wrong, since) in state["evidence"].items()
        }
        steps_seen, skipped_share = int(state["steps_seen"]), float(state["skipped_share"])
        # All of it could be read: only now does anything change.
        self.range, self.steps_seen = OutcomeRange(*state["range"]), steps_seen
        self._evidence, self._skipped_share = evidence, skipped_share

    def metrics(self) -> dict[str, float]:
        return {
            "budget/per_prompt_seen": float(len(self._evidence)),
            "budget/per_prompt_without_chance": self._skipped_share,
        }


def signal_chances(a: float, b: float, most: int) -> np.ndarray:
    """Return U(n) for n = 0 .. most under Beta(a, b); U(0) = U(1) = 0."""
    i = np.arange(most)
    all_right = np.cumprod((a + i) / (a + b + i))
    all_wrong = np.cumprod((b + i) / (a + b + i))
    return np.concatenate([[0.0], 1.0 - all_right - all_wrong]).clip(min=0.0)
