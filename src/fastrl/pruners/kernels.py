"""Experimental pruners on the kernel K_ij = A_i A_j sim_ij: greedy log-determinant, and ridge-leverage sampling.

With sim_ij the cosine of two rollouts' scores, K is the Gram matrix of their policy gradients: a large |A| and a
direction of its own both make a rollout count. The norms of the scores are those of the sketches where the engine
gives some, else unknown and taken as 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastrl.pruners.base import from_clusters, group_rngs, share_of
from fastrl.similarity import SIMILARITIES
from fastrl.types import UNSCORABLE, Group, Selection

_LEAST_WEIGHT = 0.1
"""A kept rollout is paid for, so its matching weight is never quite zero."""
_LEAST_RIDGE = 1e-6
_LEAST_PROBABILITY = 0.1
"""Floor under inclusion probabilities, as a share of the mean one: no weight is above 10 / keep_share."""


@dataclass(frozen=True, kw_only=True)
class LogDet:
    """Greedy maximization of log det(I + K_S / ridge), of each sign of A on its own, ridge = tau * tr(K) / n.

    Each turn takes the rollout of largest variance left given those taken, K_ii - K_iS (K_SS + ridge I)^-1 K_Si: greedy
    on a monotone submodular function. Opposite signs do not explain each other away: K is set to 0 between them, and
    where both exist both are kept (the contrast). Deterministic, and biased by up to the matching error.

    Args:
        keep_share: k = round(keep_share * n) are kept, at least 2 where both signs exist.
        tau: Ridge, relative to the mean of K's diagonal: how much noise hides a duplicate.
        match_weights: Weigh survivors so that their sum matches the full one as K sees it (see `matching_weights`).

    References:
        Kulesza and Taskar, "Determinantal Point Processes for Machine Learning"; Killamsetty et al., "GRAD-MATCH", ICML
        2021. Inside GRPO groups: our own combination.
    """

    keep_share: float = 0.5
    tau: float = 0.8
    similarity: str = "jaccard"
    ngram: int = 1
    match_weights: bool = False
    options: ClassVar[tuple[str, ...]] = ("keep_share", "tau", "similarity", "ngram", "match_weights")

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        return [self._select(group) for group in groups]

    def _select(self, group: Group) -> Selection:
        assert group.advantages_G is not None
        similarity_GG = SIMILARITIES[self.similarity](group, self.ngram)
        kernel_GG = kernel(group, similarity_GG, self.similarity)
        kept = self._greedy(kernel_GG, group.advantages_G, group.scorable_G)
        selection = from_clusters(nearest_of_same_sign(group, similarity_GG, kept), 0.0, "logdet")
        if self.match_weights and np.trace(kernel_GG) > 0:
            selection.weight_G[kept] = matching_weights(kernel_GG, kept, self.tau)
        return selection

    def _greedy(self, kernel_GG: np.ndarray, advantages_G: np.ndarray, scorable_G: np.ndarray) -> list[int]:
        """Which rollouts to keep, in the order in which they are taken."""
        positive_G = advantages_G >= 0
        kernel_GG = np.where(positive_G[:, None] == positive_G, kernel_GG, 0.0)
        ridge = max(self.tau, _LEAST_RIDGE) * (np.trace(kernel_GG) / max(scorable_G.sum(), 1) or 1.0)
        missing = {bool(sign) for sign in positive_G[scorable_G & (advantages_G != 0)]}
        num_kept = share_of(self.keep_share, int(scorable_G.sum()), at_least=max(1, len(missing)))
        left_GG, open_G = kernel_GG.copy(), scorable_G.copy()
        kept: list[int] = []
        while len(kept) < num_kept:
            allowed_G = open_G
            if missing and len(missing) == num_kept - len(kept):
                allowed_G = open_G & np.isin(positive_G, list(missing))
            i = int(np.argmax(np.where(allowed_G, left_GG.diagonal(), -np.inf)))
            kept.append(i)
            open_G[i] = False
            missing.discard(bool(positive_G[i]))
            left_GG = left_GG - np.outer(left_GG[:, i], left_GG[i]) / (left_GG[i, i] + ridge)
        return kept


@dataclass(frozen=True, kw_only=True)
class LeverageSampling:
    """Keep rollout i with a probability that grows with its ridge leverage; weigh it by 1 / probability.

        l_i = [K (K + ridge I)^-1]_ii, ridge = tau * tr(K) / n;    pi_i = min(1, max(floor, c l_i)), sum of pi = k

    The leverage is high for a large |A| in a direction of its own and about 1 / |C| inside a set C of duplicates. The
    draw is systematic: exactly k = round(keep_share * n) rollouts, in random order. With weighting 1 this is the
    Horvitz-Thompson estimator, unbiased since no probability is 0; weights are pi ** -weighting.

    References:
        Alaoui and Mahoney, "Fast Randomized Kernel Ridge Regression with Statistical Guarantees", NeurIPS 2015. Inside
        GRPO groups: our own.
    """

    keep_share: float = 0.5
    tau: float = 0.8
    similarity: str = "jaccard"
    ngram: int = 1
    weighting: float = 0.0
    options: ClassVar[tuple[str, ...]] = ("keep_share", "tau", "similarity", "ngram", "weighting")

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        chances = group_rngs(groups, rng)
        return [self._select(group, chance) for group, chance in zip(groups, chances, strict=True)]

    def _select(self, group: Group, rng: np.random.Generator) -> Selection:
        assert group.advantages_G is not None
        candidates = np.flatnonzero(group.scorable_G)
        similarity_GG = SIMILARITIES[self.similarity](group, self.ngram)
        if not len(candidates):
            return from_clusters(np.full(group.num_rollouts, UNSCORABLE), 0.0, "leverage")
        within = np.ix_(candidates, candidates)
        kernel_GG = kernel(group, similarity_GG, self.similarity)[within]
        probabilities = self._probabilities(kernel_GG)
        drawn = systematic(probabilities, rng)
        cluster_G = nearest_of_same_sign(group, similarity_GG, candidates[drawn].tolist())
        selection = from_clusters(cluster_G, 0.0, "leverage")
        selection.weight_G[candidates[drawn]] = probabilities[drawn] ** -self.weighting
        return selection

    def _probabilities(self, kernel_GG: np.ndarray) -> np.ndarray:
        """Inclusion probabilities pi; their sum is k."""
        num = len(kernel_GG)
        num_kept = share_of(self.keep_share, num)
        ridge = max(self.tau, _LEAST_RIDGE) * np.trace(kernel_GG) / num
        if ridge == 0:  # no advantage at all: nothing to prefer
            return np.full(num, num_kept / num)
        leverage_G = np.linalg.solve(kernel_GG + ridge * np.eye(num), kernel_GG).diagonal()
        floor = _LEAST_PROBABILITY * num_kept / num
        low, high = 0.0, num / max(float(leverage_G[leverage_G > 0].min()), 1e-12)
        for _ in range(100):  # the sum grows with c: bisect
            scale = (low + high) / 2
            pi_G = np.clip(scale * leverage_G, floor, 1.0)
            low, high = (scale, high) if pi_G.sum() < num_kept else (low, scale)
        if (pi_G < 1).any():  # fewer live rollouts than k: those of advantage 0 share the rest
            pi_G[pi_G < 1] += (num_kept - pi_G.sum()) / (pi_G < 1).sum()
        return pi_G


def kernel(group: Group, similarity_GG: np.ndarray, similarity: str) -> np.ndarray:
    """Return K_ij = A_i A_j a_i a_j sim_ij; a = norms of the sketches relative to their mean square, or 1.

    Up to a factor, which no user of K depends on: the largest A a is brought to [0.5, 1), so that tiny advantages do
    not vanish when they are squared. The factor is a power of two: nothing is rounded.
    """
    assert group.advantages_G is not None
    norm_G = np.ones(group.num_rollouts)
    if similarity == "gradient":
        norm_G = np.linalg.norm(np.asarray(group.sketch_G, dtype=np.float64), axis=1)
        norm_G = norm_G / (np.sqrt(np.mean(norm_G**2)) or 1.0)
    scaled_G = group.advantages_G * norm_G
    scaled_G = np.ldexp(scaled_G, -np.frexp(np.abs(scaled_G).max(initial=0.0))[1])
    return similarity_GG * np.outer(scaled_G, scaled_G)


def matching_weights(kernel_GG: np.ndarray, kept: Sequence[int], tau: float) -> np.ndarray:
    """Return the weights w >= 0.1 of the kept rollouts whose sum is nearest to the full one.

        min_w |sum_i g_i - sum_S w_j g_j|^2 + ridge |w - 1|^2,   <g_i, g_j> = K_ij, ridge = tau * tr(K) / n

    Where the kernel knows nothing of the others, the ridge leaves weights of 1. Solved by coordinate descent, which
    converges for a convex quadratic with bounds.
    """
    ridge = max(tau, _LEAST_RIDGE) * np.trace(kernel_GG) / len(kernel_GG)
    normal_SS = kernel_GG[np.ix_(kept, kept)] + ridge * np.eye(len(kept))
    target_S = kernel_GG[kept].sum(axis=1) + ridge
    weights_S = np.ones(len(kept))
    for _ in range(200):
        before = weights_S.copy()
        for j in range(len(kept)):
            rest = target_S[j] - normal_SS[j] @ weights_S + normal_SS[j, j] * weights_S[j]
            weights_S[j] = max(_LEAST_WEIGHT, rest / normal_SS[j, j])
        if np.abs(weights_S - before).max() < 1e-10:
            break
    return weights_S


def systematic(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw positions with given inclusion probabilities: as many as they sum to, which is a whole number.

    Points u, u + 1, ... on the cumulative sum, in random order: each is hit with exactly its probability.
    """
    order = rng.permutation(len(probabilities))
    ends = np.cumsum(probabilities[order])
    ends *= round(ends[-1]) / ends[-1]
    points = rng.random() + np.arange(round(ends[-1]))
    return np.sort(order[np.minimum(np.searchsorted(ends, points, side="right"), len(order) - 1)])


def nearest_of_same_sign(group: Group, similarity_GG: np.ndarray, kept: Sequence[int]) -> np.ndarray:
    """Return clusters: the most similar kept rollout stands for each, of the same sign of A where there is one."""
    assert group.advantages_G is not None
    cluster_G = np.full(group.num_rollouts, UNSCORABLE)
    if len(kept):
        signs_G = np.sign(group.advantages_G)
        kept_array = np.asarray(kept)
        preference = similarity_GG[:, kept_array] + 4.0 * (signs_G[:, None] == signs_G[kept_array])
        cluster_G = np.where(group.scorable_G, kept_array[preference.argmax(axis=1)], UNSCORABLE)
        cluster_G[kept_array] = kept_array
    return cluster_G
