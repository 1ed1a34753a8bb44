"""Maximizing Differential Advantage Pruning: the published method, and its unbiased version."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.pruners.base import group_rngs
from fastrl.similarity import SIMILARITIES
from fastrl.types import UNSCORABLE, Group, Selection

_TIE = 1e-12
"""Distances are ratios of small integers, tau a decimal: this far below tau counts as equal to it."""


@dataclass(frozen=True, kw_only=True)
class MDAP:
    """Maximizing Differential Advantage Pruning (paper, Eq. 4-9).

    Partition each group into classes S_k of equal advantage and walk through each class: keep o_i
    unless some already kept o_j of the class has

        theta_ij = 1 - |N(o_i) & N(o_j)| / |N(o_i) | N(o_j)| < tau.                    (Eq. 7, 8)

    Survivors keep their own advantage. tau = 0 keeps all; tau = 1 keeps rollouts that share no
    n-gram with a kept one, in practice one per class. A zero-variance group is one class of A = 0.

    Differs from the paper: every pruned rollout also gets a cluster, that of its nearest kept
    leader, so that `representative`, `per_cluster` and `weighting` can be chosen; and theta can be 1 minus
    another similarity. Their defaults are the paper's.

    Unbiased: with random representatives and weighting 1, each member i of a cluster C of which m are kept is
    kept with probability m / |C| and then weighs |C| / m, so its expected weight is 1, for any clustering and
    whatever the advantages inside it: the expected weighted sum is the full sum.

    Args:
        tau: Similarity threshold in [0, 1].
        similarity: Key of `SIMILARITIES`; jaccard is the paper's.
        ngram: Tokens per n-gram (the paper leaves n open; its released script uses 1).
        compare: "kept": with all kept rollouts of the class (Eq. 8); "seed": with the class's first
            rollout only, as the released script does.
        advantage_tol: Width of a class of equal advantage.
        representative: "first": the leader stands for its cluster (paper); "random": a member drawn
            uniformly does.
        per_cluster: m, the most rollouts that stand for one cluster.
        weighting: A survivor's weight is (size of its cluster) ** weighting / (rollouts that stand for it):
            0 = paper, 1 = unbiased when the representative is random.

    References:
        "Learn from the Gap: Differential-Aware Advantage Pruning with Adaptive Rollout Sampling for
        GRPO", arXiv 2609.36932.
    """

    tau: float = 0.8
    similarity: str = "jaccard"
    ngram: int = 1
    compare: str = "kept"
    advantage_tol: float = 1e-4
    representative: str = "first"
    per_cluster: int = 1
    weighting: float = 0.0
    options: ClassVar[tuple[str, ...]] = (
        "tau", "similarity", "ngram", "compare", "advantage_tol", "representative", "per_cluster", "weighting",
    )  # fmt: skip

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        chances = group_rngs(groups, rng) if self.representative == "random" else itertools.repeat(rng)
        return [self._select(group, chance) for group, chance in zip(groups, chances, strict=False)]

    def _select(self, group: Group, rng: np.random.Generator) -> Selection:
        assert group.advantages_G is not None
        cluster_G = np.full(group.num_rollouts, UNSCORABLE)
        weight_G = np.zeros(group.num_rollouts)
        classes = advantage_classes(group.advantages_G, group.scorable_G, self.advantage_tol)
        distance_GG = (1.0 - SIMILARITIES[self.similarity](group, self.ngram)).tolist()
        for members in classes:
            clusters = {leader: [leader] for leader in self._leaders(distance_GG, members)}
            for i in members:
                if i not in clusters:
                    clusters[min(clusters, key=distance_GG[i].__getitem__)].append(i)
            for cluster in clusters.values():
                kept = self._representatives(cluster, rng)
                weight_G[kept] = len(cluster) ** self.weighting / len(kept)
                others = [i for i in cluster if i not in kept]
                cluster_G[kept] = kept
                cluster_G[others] = [kept[k % len(kept)] for k in range(len(others))]
        return Selection(keep_G=weight_G > 0, weight_G=weight_G, cluster_G=cluster_G, reason="mdap")

    def _representatives(self, cluster: list[int], rng: np.random.Generator) -> list[int]:
        """Which rollouts stand for a cluster, whose first member is its leader."""
        if self.representative == "first":
            return cluster[: self.per_cluster]
        if self.per_cluster == 1:
            return [int(rng.choice(cluster))]
        return rng.permutation(cluster)[: self.per_cluster].tolist()

    def _leaders(self, distance_GG: list[list[float]], members: list[int]) -> list[int]:
        """The greedy walk of Eq. 8: which rollouts of a class are kept."""
        kept: list[int] = []
        for i in members:
            rivals = kept if self.compare == "kept" else kept[:1]
            if not any(distance_GG[i][j] < self.tau - _TIE for j in rivals):
                kept.append(i)
        return kept
