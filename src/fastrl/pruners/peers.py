"""Peers that select by reward alone: CPPO (largest |A| of the batch) and PODS (largest variance of the rewards)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fastrl.advantages import group_advantages
from fastrl.pruners.base import from_clusters, group_rngs, share_of
from fastrl.types import UNSCORABLE, Group, Selection


@dataclass(frozen=True, kw_only=True)
class TopAdvantage:
    """CPPO: keep the k rollouts of largest |A| of the whole batch, k = floor(N * keep_share).

    The authors prune P = 1 - keep_share of 0.5 to 0.9375, compute old and reference log-probs for survivors only,
    give no weights, and fill the batch up with more prompts (`refill: kept`). Ties, which binary rewards make
    common, are broken at random: any fixed order would favour the same prompts in every step.

    A group may lose all its rollouts: the ranking is over the batch.

    References:
        "CPPO: Accelerating the Training of Group Relative Policy Optimization-Based Reasoning Models", arXiv
        2503.22342.
    """

    keep_share: float = 0.5
    options: ClassVar[tuple[str, ...]] = ("keep_share",)

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        if not groups:
            return []
        scorable_N = np.concatenate([group.scorable_G for group in groups])
        size_N = np.abs(np.concatenate([group.advantages_G for group in groups]))
        candidates = rng.permutation(np.flatnonzero(scorable_N))
        by_size = candidates[np.argsort(-size_N[candidates], kind="stable")]
        num_kept = int(self.keep_share * len(scorable_N) + 1e-9)  # 0.29 * 100 is 28.999...
        keep_N = np.zeros(len(scorable_N), dtype=bool)
        keep_N[by_size[: max(1, num_kept)]] = True
        ends = np.cumsum([group.num_rollouts for group in groups])
        return [
            _closest_in_advantage(group, keep_G, "top_advantage")
            for group, keep_G in zip(groups, np.split(keep_N, ends[:-1]), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class MaxVariance:
    """PODS: keep the k = round(keep_share * n) rollouts of a group whose rewards vary most.

    Such a subset is the i highest and the k - i lowest rewards for some i (their Lemma 3.1); with 0/1 rewards,
    half and half as far as there are enough of each. k is at least 2. Ties are broken at random.

    The paper normalises advantages over the kept subset, so this selection brings its own:

        A_i = (r_i - mean_S(r)) / std_S(r),  S = the kept rollouts

    References:
        "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning", arXiv 2504.13818.
    """

    keep_share: float = 0.5
    options: ClassVar[tuple[str, ...]] = ("keep_share",)

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        chances = group_rngs(groups, rng)
        return [self._select(group, chance) for group, chance in zip(groups, chances, strict=True)]

    def _select(self, group: Group, rng: np.random.Generator) -> Selection:
        assert group.advantages_G is not None
        candidates = rng.permutation(np.flatnonzero(group.scorable_G))
        ascending = candidates[np.argsort(group.rewards_G[candidates], kind="stable")]
        kept = ascending[self._best(group.rewards_G[ascending])]
        keep_G = np.zeros(group.num_rollouts, dtype=bool)
        keep_G[kept] = True
        selection = _closest_in_advantage(group, keep_G, "max_variance")
        if not group.advantages_G.any():  # no signal, however shaped rewards may vary
            return selection
        advantages_G = np.zeros(group.num_rollouts)
        advantages_G[kept] = group_advantages(group.rewards_G[kept])
        return replace(selection, advantages_G=advantages_G)

    def _best(self, rewards: np.ndarray) -> np.ndarray:
        """Positions in ascending rewards: the i highest and k - i lowest with the largest variance."""
        num = len(rewards)
        num_kept = share_of(self.keep_share, num, at_least=2)
        subsets = [np.r_[0 : num_kept - i, num - i : num] for i in range(num_kept + 1)]
        variances = np.array([rewards[subset].var() if len(subset) else 0.0 for subset in subsets])
        # Of equal variances, the most balanced: rounding must not decide between 2 + 2 and 1 + 3.
        is_best = variances >= variances.max() * (1 - 1e-12)
        imbalance = np.abs(2 * np.arange(num_kept + 1) - num_kept)
        return subsets[int(np.argmin(np.where(is_best, imbalance, num_kept + 1)))]


def _closest_in_advantage(group: Group, keep_G: np.ndarray, reason: str) -> Selection:
    """Let the kept rollout of closest advantage stand for each dropped one. Nobody does where none is kept."""
    assert group.advantages_G is not None
    cluster_G = np.full(group.num_rollouts, UNSCORABLE)
    kept = np.flatnonzero(keep_G)
    if len(kept):
        gap = np.abs(group.advantages_G[:, None] - group.advantages_G[kept])
        cluster_G = np.where(group.scorable_G, kept[gap.argmin(axis=1)], UNSCORABLE)
        cluster_G[kept] = kept
    return from_clusters(cluster_G, 0.0, reason)
