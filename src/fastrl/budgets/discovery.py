"""A global G_t that follows what sampling yields: rarefaction of past clusters against the cost of a rollout.

For a group of G rollouts with clusters C of sizes n_C, classes k of equal advantage of sizes n_k, n_Ck the size of
their overlap, and u unscorable rollouts, a random subset of m of them would have held

    K(m) = sum_C P(C is hit) - sum_k P(C is hit and all that is scorable lies in k)
         = sum_C [1 - C(G - n_C, m) / C(G, m)] - sum_k [C(n_k + u, m) - C(n_k + u - n_Ck, m)] / C(G, m)

distinct useful rollouts. Differs from plain rarefaction in the second term: a subset of one class has zero variance and
teaches nothing, and an unscorable rollout gives it nothing to compare with. MDAP's clusters lie inside one class, so
one k is left of the sum; those of other pruners may span several. Comparing at the same m takes out that a smaller G
finds less.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.budgets.base import check_keys, equal_prompt_weights
from fastrl.budgets.costs import StageCosts
from fastrl.types import Group, Selection

_DISCOUNT = 0.9
"""Of old evidence per step: yields change within a few tens of steps of training."""
_LEAST_GAIN = 0.05
"""Hysteresis: G moves only if the yield per cost is this much better there."""
_LEAST_GROUPS = 32
"""Groups between two moves: the yield of a few groups is noise."""
_SAME_ADVANTAGE = 1e-6
_FRESH = 0.5
"""K(m) counts as known while it rests on this share of the evidence for small m: what a larger G found long ago, under
another policy, must not be compared with what a smaller one finds now."""


class Discovery:
    """Sample where the yield per cost is highest: one G for all prompts, at most one step per update.

        G = argmax_m K(m) / (c_rest + c_gen m + c_upd K(m))

    so that the next rollout's yield falls below its cost at the going rate. K is averaged over groups (those without
    signal count 0) and over past steps with a discount. Beyond the present G, K is extended by one increment
    D(m) = K(m+1) - K(m), taken to be D(m-1) min(1, D(m-1) / D(m-2)). Where every cluster is a whole class this is a
    lower bound: increments of a mixture of Bernoulli draws form a moment sequence, which is log-convex. Where a class
    holds many clusters it is a guess, for the second term of K has the other sign: with ten clusters of 1/10 in two
    classes, K(4) = 3.07 is taken for 3.2. The next groups correct a step up that was not worth it.

    A group of two says nothing about a third rollout (K(3) = 1.5 K(2) for two classes, whatever the success rate), so
    at `min_rollouts: 2` and no fixed costs G stays there; a floor of 3 or 4 lets it grow back.

    On a stationary policy G is stationary. Decisions use past steps only, so no stopping bias arises.

    Args:
        num_rollouts: Ceiling.
        min_rollouts: Floor.
        initial_rollouts: G of the first step; None = the ceiling.
        rollout_cost: c_gen / c_upd, with c_rest = 0. None = measured from the engine's seconds (then G depends on
            the clock), or 1 where the engine gives none.
    """

    options: ClassVar[tuple[str, ...]] = ("min_rollouts", "initial_rollouts", "rollout_cost")

    def __init__(
        self,
        *,
        num_rollouts: int,
        min_rollouts: int = 2,
        initial_rollouts: int | None = None,
        rollout_cost: float | None = None,
    ) -> None:
        self.num_rollouts = num_rollouts
        self.min_rollouts = min_rollouts
        self.rollout_cost = rollout_cost
        self.current = initial_rollouts or num_rollouts
        self.groups_since_move = 0
        # Discounted sums and weights of K(m), m = 0 .. ceiling.
        self._yield_sum = np.zeros(num_rollouts + 1)
        self._yield_weight = np.zeros(num_rollouts + 1)
        self._costs = StageCosts(_DISCOUNT)

    def plan(self, prompt_ids: Sequence[str], step: int) -> np.ndarray:
        return np.full(len(prompt_ids), self.current)

    def weights(self, counts_P: np.ndarray) -> np.ndarray:
        return equal_prompt_weights(counts_P, self.num_rollouts)

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._yield_sum *= _DISCOUNT
        self._yield_weight *= _DISCOUNT
        curves_PM = np.zeros((len(groups), self.num_rollouts + 1))
        for p, (group, selection) in enumerate(zip(groups, selections, strict=True)):
            if selection.reason == "surplus":  # dropped for want of room: its yield is unknown
                continue
            curve = useful_rollouts(group, selection)[: self.num_rollouts + 1]
            curves_PM[p, : len(curve)] = curve
            self._yield_weight[: len(curve)] += 1.0
        # Sorted: the order of the groups must not even change the rounding.
        self._yield_sum += np.sort(curves_PM, axis=0).sum(axis=0)
        self._costs.observe(groups, selections, seconds)
        self.groups_since_move += len(groups)
        if self.groups_since_move >= _LEAST_GROUPS:
            self._move()

    def _move(self) -> None:
        curve = self.expected_yield()
        price, rest = self._prices()
        places = np.arange(self.min_rollouts, min(self.current + 1, self.num_rollouts) + 1)
        rates = curve[places] / (rest + price * places + curve[places])
        here = int(np.flatnonzero(places == self.current)[0])
        best = int(np.argmax(rates))
        towards = here + int(np.sign(best - here))
        if rates[towards] > rates[here] * (1 + _LEAST_GAIN):
            self.current = int(places[towards])
            self.groups_since_move = 0

    def expected_yield(self) -> np.ndarray:
        """(ceiling + 2,) K(m) of past groups, m = 0, 1, ...; extended by one beyond the largest m that is known."""
        curve = np.zeros(self.num_rollouts + 2)
        is_fresh = self._yield_weight > _FRESH * self._yield_weight.max()
        seen = int(np.flatnonzero(is_fresh).max(initial=0))
        curve[: seen + 1] = self._yield_sum[: seen + 1] / np.maximum(self._yield_weight[: seen + 1], 1e-300)
        steps = np.maximum(np.diff(curve[: seen + 1]), 0.0)
        growth = 0.0
        if len(steps) >= 3 and steps[-2] > 0:  # from K(0) = K(1) = 0: the first increment says nothing
            growth = steps[-1] * min(1.0, steps[-1] / steps[-2])
        elif len(steps):
            growth = steps[-1] / 2  # one increment alone: for two classes the next is half of it, whatever p
        curve[seen + 1 :] = curve[seen] + growth
        return curve

    def _prices(self) -> tuple[float, float]:
        """c_gen and c_rest per prompt, as multiples of c_upd."""
        if self.rollout_cost is not None:
            return self.rollout_cost, 0.0
        return self._costs.prices()

    def state_dict(self) -> dict[str, Any]:
        return {
            "current": self.current,
            "groups_since_move": self.groups_since_move,
            "yield_sum": self._yield_sum.tolist(),
            "yield_weight": self._yield_weight.tolist(),
            "costs": self._costs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), "discovery budget")
        costs = StageCosts(_DISCOUNT)
        costs.load_state_dict(state["costs"])
        current, groups_since_move = int(state["current"]), int(state["groups_since_move"])
        yield_sum = np.array(state["yield_sum"], dtype=np.float64)
        yield_weight = np.array(state["yield_weight"], dtype=np.float64)
        # All of it could be read: only now does anything change.
        self.current, self.groups_since_move, self._costs = current, groups_since_move, costs
        self._yield_sum, self._yield_weight = yield_sum, yield_weight

    def metrics(self) -> dict[str, float]:
        curve, (price, _) = self.expected_yield(), self._prices()
        return {
            "budget/discovery_current": float(self.current),
            "budget/discovery_yield": float(curve[self.current]),
            "budget/discovery_next_yield": float(curve[self.current + 1] - curve[self.current]),
            "budget/discovery_rollout_cost": float(price),
        }


def useful_rollouts(group: Group, selection: Selection) -> np.ndarray:
    """Return K(m) for m = 0 .. G of one group; zeros where it has no signal or nothing is kept.

    An unscorable rollout takes a place in a subset, is in no cluster, and gives nothing to compare with.
    """
    num = group.num_rollouts
    curve = np.zeros(num + 1)
    advantages_G = group.advantages_G
    if advantages_G is None or not advantages_G.any():
        return curve
    inside = _chances_inside(num)
    classes = advantage_classes(advantages_G, group.scorable_G, _SAME_ADVANTAGE)
    class_G = np.full(num, -1)
    for k, members in enumerate(classes):
        class_G[members] = k
    # Sets without variance: a class, with all that cannot be scored.
    silent_K = np.bincount(class_G[class_G >= 0]) + int((class_G < 0).sum())
    for i in np.flatnonzero(selection.keep_G):
        overlap_K = np.bincount(class_G[selection.cluster_G == i], minlength=len(classes))
        useless_KM = inside[silent_K] - inside[silent_K - overlap_K]
        curve += 1.0 - inside[num - overlap_K.sum()] - useless_KM.sum(axis=0)
    curve[:2] = 0.0  # but for rounding: one rollout alone has no baseline
    return curve


def _chances_inside(num: int) -> np.ndarray:
    """(G + 1, G + 1): C(k, m) / C(G, m), the chance that all m of a random subset lie among k given rollouts."""
    k, i = np.arange(num + 1)[:, None], np.arange(num)
    factors = np.maximum(k - i, 0) / (num - i)
    return np.hstack([np.ones((num + 1, 1)), np.cumprod(factors, axis=1)])
