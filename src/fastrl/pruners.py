"""Which rollouts of a step to train on.

A pruner is a pure callable `(groups, *, rng) -> [Selection, ...]`, one selection per group. Every
group carries advantages over the full group, and `rng` is the only source of chance. A pruner
keeps at least one rollout of every group that has a scorable one, and never an unscorable one.
To add one: a class here, a line in `PRUNERS`; the contract tests then cover it.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.similarity import jaccard_distances
from fastrl.types import UNSCORABLE, Group, Selection

_TIE = 1e-12
"""Distances are ratios of small integers, tau a decimal: this far below tau counts as equal to it."""


class Pruner(Protocol):
    """What the registry holds. `options` names the fields of `FastRLConfig` that the class takes."""

    options: ClassVar[tuple[str, ...]]

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]: ...


@dataclass(frozen=True, kw_only=True)
class KeepAll:
    """Keep every scorable rollout: the base algorithm."""

    options: ClassVar[tuple[str, ...]] = ()

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        return [keep_all(group, reason="none") for group in groups]


@dataclass(frozen=True, kw_only=True)
class MDAP:
    """Maximizing Differential Advantage Pruning (paper, Eq. 4-9).

    Partition each group into classes S_k of equal advantage and walk through each class: keep o_i
    unless some already kept o_j of the class has

        theta_ij = 1 - |N(o_i) & N(o_j)| / |N(o_i) | N(o_j)| < tau.                    (Eq. 7, 8)

    Survivors keep their own advantage. tau = 0 keeps all; tau = 1 keeps rollouts that share no
    n-gram with a kept one, in practice one per class. A zero-variance group is one class of A = 0.

    Differs from the paper: every pruned rollout also gets a cluster, that of its nearest kept
    leader, so that `representative` and `weighting` can be chosen. Their defaults are the paper's.

    Args:
        tau: Similarity threshold in [0, 1].
        ngram: Tokens per n-gram (the paper leaves n open; its released script uses 1).
        compare: "kept": with all kept rollouts of the class (Eq. 8); "seed": with the class's first
            rollout only, as the released script does.
        advantage_tol: Width of a class of equal advantage.
        representative: "first": the leader stands for its cluster (paper); "random": a member drawn
            uniformly does.
        weighting: A survivor's weight is (size of its cluster) ** weighting: 0 = paper, 1 = unbiased
            when the representative is random.

    References:
        "Learn from the Gap: Differential-Aware Advantage Pruning with Adaptive Rollout Sampling for
        GRPO", arXiv 2609.36932.
    """

    tau: float = 0.8
    ngram: int = 1
    compare: str = "kept"
    advantage_tol: float = 1e-4
    representative: str = "first"
    weighting: float = 0.0
    options: ClassVar[tuple[str, ...]] = (
        "tau", "ngram", "compare", "advantage_tol", "representative", "weighting",
    )  # fmt: skip

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        chances = group_rngs(groups, rng) if self.representative == "random" else itertools.repeat(rng)
        return [self._select(group, chance) for group, chance in zip(groups, chances, strict=False)]

    def _select(self, group: Group, rng: np.random.Generator) -> Selection:
        assert group.advantages_G is not None
        cluster_G = np.full(group.num_rollouts, UNSCORABLE)
        classes = advantage_classes(group.advantages_G, group.scorable_G, self.advantage_tol)
        distance_GG = jaccard_distances(group.tokens_G, self.ngram).tolist()
        for members in classes:
            clusters: dict[int, list[int]] = {leader: [] for leader in self._leaders(distance_GG, members)}
            for i in members:
                leader = i if i in clusters else min(clusters, key=distance_GG[i].__getitem__)
                clusters[leader].append(i)
            for leader, cluster in clusters.items():
                cluster_G[cluster] = leader if self.representative == "first" else rng.choice(cluster)
        return from_clusters(cluster_G, self.weighting, "mdap")

    def _leaders(self, distance_GG: list[list[float]], members: list[int]) -> list[int]:
        """The greedy walk of Eq. 8: which rollouts of a class are kept."""
        kept: list[int] = []
        for i in members:
            rivals = kept if self.compare == "kept" else kept[:1]
            if not any(distance_GG[i][j] < self.tau - _TIE for j in rivals):
                kept.append(i)
        return kept


@dataclass(frozen=True, kw_only=True)
class AdvantageOnly:
    """Keep one random rollout of each class of equal advantage (the paper's ablation, Table 5)."""

    advantage_tol: float = 1e-4
    weighting: float = 0.0
    options: ClassVar[tuple[str, ...]] = ("advantage_tol", "weighting")

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        selections = []
        for group, chance in zip(groups, group_rngs(groups, rng), strict=True):
            assert group.advantages_G is not None
            cluster_G = np.full(group.num_rollouts, UNSCORABLE)
            for members in advantage_classes(group.advantages_G, group.scorable_G, self.advantage_tol):
                cluster_G[members] = chance.choice(members)
            selections.append(from_clusters(cluster_G, self.weighting, "advantage_only"))
        return selections


@dataclass(frozen=True, kw_only=True)
class RandomPruner:
    """Keep a random share of each group's scorable rollouts, at least one (the paper's Table 5).

    With n scorable and k kept, a survivor weighs (n / k) ** weighting; 1 = unbiased. A dropped
    rollout has no rollout that resembles it: clusters deal the dropped ones out evenly.

    Args:
        keep_share: Share that is kept, in (0, 1]; k = round(share * n).
        weighting: 0 = as published, 1 = unbiased.
    """

    keep_share: float = 0.5
    weighting: float = 0.0
    options: ClassVar[tuple[str, ...]] = ("keep_share", "weighting")

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        selections = []
        for group, chance in zip(groups, group_rngs(groups, rng), strict=True):
            order = chance.permutation(np.flatnonzero(group.scorable_G))
            num_kept = min(len(order), max(1, round(self.keep_share * len(order))))
            cluster_G = np.full(group.num_rollouts, UNSCORABLE)
            if num_kept:
                cluster_G[order] = order[np.arange(len(order)) % num_kept]
            selection = from_clusters(cluster_G, 0.0, "random")
            weight_G = selection.weight_G * (len(order) / max(num_kept, 1)) ** self.weighting
            selections.append(
                Selection(keep_G=selection.keep_G, weight_G=weight_G, cluster_G=cluster_G, reason="random")
            )
        return selections


PRUNERS: dict[str, type[Pruner]] = {
    "none": KeepAll,
    "mdap": MDAP,
    "advantage_only": AdvantageOnly,
    "random": RandomPruner,
}


def group_rngs(groups: Sequence[Group], rng: np.random.Generator) -> Iterator[np.random.Generator]:
    """Yield a generator for each group that depends on `rng` and the prompt id, not on other prompts."""
    entropy = int(rng.integers(2**63))
    seen: Counter[str] = Counter()
    for group in groups:
        digest = hashlib.blake2b(group.prompt_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        yield np.random.default_rng([entropy, int.from_bytes(digest, "little"), seen[group.prompt_id]])
        seen[group.prompt_id] += 1


def keep_all(group: Group, *, reason: str) -> Selection:
    """Keep all scorable rollouts of a group, each standing for itself."""
    return from_clusters(np.where(group.scorable_G, np.arange(group.num_rollouts), UNSCORABLE), 0.0, reason)


def keep_none(group: Group, *, reason: str) -> Selection:
    """Drop a whole group."""
    return from_clusters(np.full(group.num_rollouts, UNSCORABLE), 0.0, reason)


def from_clusters(cluster_G: np.ndarray, weighting: float, reason: str) -> Selection:
    """Keep each cluster's representative with weight (cluster size) ** weighting.

    Args:
        cluster_G: (G,) index of the representative of each rollout's cluster, or `UNSCORABLE`.
    """
    size_G = np.bincount(cluster_G[cluster_G != UNSCORABLE], minlength=len(cluster_G))
    keep_G = size_G > 0
    weight_G = np.where(keep_G, np.maximum(size_G, 1).astype(np.float64) ** weighting, 0.0)
    return Selection(keep_G=keep_G, weight_G=weight_G, cluster_G=cluster_G, reason=reason)
