"""Does a cheap similarity of rollouts agree with the cosine of their true gradients?"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastrl.advantages import advantage_classes
from fastrl.config import FastRLConfig
from fastrl.types import Group, GroupError

Similarity = Callable[[Group], np.ndarray]
"""From a group with advantages to its (G, G) similarities; 1 = the same."""

PAIRS = ("class", "class_distinct", "group_distinct")
"""Pairs inside classes of equal advantage, which MDAP compares; the same between different texts, each two texts
once (copies agree by definition and inflate a correlation); all pairs of different texts of a group."""

_DECIMALS = 6
"""Gradients are float32: what differs less must tie in ranks."""
_NUM_POINTS = 1000
"""Pairs of each kind that a result keeps for its figure."""


class Pairs(NamedTuple):
    """(N,) pairs of rollouts: position of their group, the two rollouts, their true gradient cosine."""

    group: np.ndarray
    i: np.ndarray
    j: np.ndarray
    cosine: np.ndarray


def find_pairs(
    groups: Sequence[Group], grams: Sequence[np.ndarray], signal: Iterable[int], kind: str
) -> Pairs:
    """Return the pairs of one kind (see `PAIRS`) in the groups at the positions `signal`.

    A rollout whose gradient is zero (an empty response) has no direction: it is in no pair.
    """
    rows: list[tuple[int, int, int, float]] = []
    for p in signal:
        norm_G = np.sqrt(np.diag(grams[p]))
        for members in _pools(groups[p], norm_G > 0, kind):
            rows += [
                (p, i, j, round(float(grams[p][i, j] / (norm_G[i] * norm_G[j])), _DECIMALS))
                for place, i in enumerate(members)
                for j in members[place + 1 :]
            ]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    group, i, j = table[:, :3].astype(int).T
    return Pairs(group, i, j, table[:, 3])


def _pools(group: Group, usable_G: np.ndarray, kind: str) -> list[list[int]]:
    """Sets of rollouts all of whose pairs are of this kind."""
    assert group.advantages_G is not None
    usable_G = usable_G & group.scorable_G
    if kind == "class":
        return advantage_classes(group.advantages_G, usable_G, FastRLConfig.advantage_tol)
    if kind == "class_distinct":
        classes = advantage_classes(group.advantages_G, usable_G, FastRLConfig.advantage_tol)
        return [_distinct(group, members) for members in classes]
    return [_distinct(group, np.flatnonzero(usable_G).tolist())]


def _distinct(group: Group, members: Sequence[int]) -> list[int]:
    return list({tuple(group.tokens_G[i]): i for i in members}.values())


def describe_pairs(pairs: Pairs) -> dict[str, Any]:
    """Return `num`, `mean` of the cosines, and `spread` = mean |cosine - median|: the error of a constant."""
    if not len(pairs.cosine):
        return {"num": 0, "mean": None, "spread": None}
    spread = np.abs(pairs.cosine - np.median(pairs.cosine)).mean()
    return {"num": len(pairs.cosine), "mean": float(pairs.cosine.mean()), "spread": float(spread)}


def agreement(
    name: str,
    similarity: Similarity,
    groups: Sequence[Group],
    pairs: Mapping[str, Pairs],
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Hold a similarity against true cosines.

    Args:
        name: For messages.
        pairs: By kind; correlations are over the pairs of all groups together.
        rng: Which pairs are kept as `points`, where there are many.

    Returns:
        For each kind: `num`; `spearman`, `pearson`, each {value, se}, se by leaving out one group at a time (pairs of
        a group are not independent); `eps` = mean |similarity - cosine|; `points`, up to 1000 of the pairs as
        (similarity, cosine). None where nothing can be computed.
    """
    used = sorted({int(p) for found in pairs.values() for p in found.group})
    matrices = {p: checked_matrix(similarity(groups[p]), groups[p], f"the similarity {name!r}") for p in used}
    result = {}
    for kind, found in pairs.items():
        # Ratios of whole numbers may differ in the last bit and yet be the same: they must tie.
        proxy = np.array([matrices[p][i, j] for p, i, j in zip(*found[:3], strict=True)]).round(12)
        shown = np.sort(rng.choice(len(proxy), min(_NUM_POINTS, len(proxy)), replace=False))
        result[kind] = {
            "num": len(proxy),
            "spearman": _with_se(spearman, proxy, found),
            "pearson": _with_se(pearson, proxy, found),
            "eps": float(np.abs(proxy - found.cosine).mean()) if len(proxy) else None,
            "points": np.stack([proxy[shown], found.cosine[shown]], axis=1).tolist(),
        }
    return result


def _with_se(
    correlation: Callable[[np.ndarray, np.ndarray], float], proxy: np.ndarray, pairs: Pairs
) -> dict[str, float | None]:
    """A correlation and its delete-one-group jackknife standard error, sqrt((P - 1) / P sum (r_-p - mean)^2)."""
    value = correlation(proxy, pairs.cosine)
    members = np.unique(pairs.group)
    left_out = np.array(
        [correlation(proxy[pairs.group != p], pairs.cosine[pairs.group != p]) for p in members]
    )
    se = math.nan
    if len(members) > 1:
        se = math.sqrt((len(members) - 1) * float(left_out.var()))
    return {"value": None if math.isnan(value) else value, "se": None if math.isnan(se) else se}


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation of two (N,) arrays; NaN where one of them is constant."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's correlation of two (N,) arrays: Pearson's of their ranks, equal values at their mean rank."""
    return pearson(ranks(x), ranks(y))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the (N,) ranks from 1 on; equal values share the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def checked_matrix(values: Any, group: Group, what: str) -> np.ndarray:
    """Return a (G, G) float64 matrix over the rollouts of a group.

    Raises:
        GroupError: another shape, or a value that is not finite.
    """
    matrix_GG = np.asarray(values, dtype=np.float64)
    size = group.num_rollouts
    has_shape = matrix_GG.shape == (size, size)
    if has_shape and np.isfinite(matrix_GG).all():
        return matrix_GG
    found = "values that are not finite" if has_shape else f"the shape {matrix_GG.shape}"
    raise GroupError(
        f"prompt {group.prompt_id!r}: {what} has {found}; a finite number for each pair of its {size} rollouts is "
        "needed. Compute it from the same rollouts, in the same order."
    )
