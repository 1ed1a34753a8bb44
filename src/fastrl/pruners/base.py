"""What all pruners share: the protocol, a generator per group, and selections from clusters."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np

from fastrl.types import UNSCORABLE, Group, Selection, prompt_entropy


class Pruner(Protocol):
    """What the registry holds. `options` names the fields of `FastRLConfig` that the class takes."""

    options: ClassVar[tuple[str, ...]]

    def __call__(self, groups: Sequence[Group], *, rng: np.random.Generator) -> list[Selection]: ...


def group_rngs(groups: Sequence[Group], rng: np.random.Generator) -> Iterator[np.random.Generator]:
    """Yield a generator for each group that depends on `rng` and the prompt id, not on other prompts."""
    entropy = int(rng.integers(2**63))
    seen: Counter[str] = Counter()
    for group in groups:
        yield np.random.default_rng([entropy, prompt_entropy(group.prompt_id), seen[group.prompt_id]])
        seen[group.prompt_id] += 1


def share_of(keep_share: float, num: int, *, at_least: int = 1) -> int:
    """Return k = round(share * n), within [at_least, n]."""
    return min(num, max(at_least, round(keep_share * num)))


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
