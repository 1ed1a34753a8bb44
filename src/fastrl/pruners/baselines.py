"""Baselines that look at no response: keep all, one per class of advantage, a random share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.pruners.base import from_clusters, group_rngs, keep_all, share_of
from fastrl.types import UNSCORABLE, Group, Selection


@dataclass(frozen=True, kw_only=True)
class KeepAll:
    """Keep every scorable rollout: the base algorithm."""

    options: ClassVar[tuple[str, ...]] = ()

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]:
        return [keep_all(group, reason="none") for group in groups]


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
            num_kept = share_of(self.keep_share, len(order))
            cluster_G = np.full(group.num_rollouts, UNSCORABLE)
            if num_kept:
                cluster_G[order] = order[np.arange(len(order)) % num_kept]
            selection = from_clusters(cluster_G, 0.0, "random")
            weight_G = selection.weight_G * (len(order) / max(num_kept, 1)) ** self.weighting
            selections.append(
                Selection(keep_G=selection.keep_G, weight_G=weight_G, cluster_G=cluster_G, reason="random")
            )
        return selections
