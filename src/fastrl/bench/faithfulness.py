"""How close is a pruned gradient to the full one? Cosine, error and bias in the geometry of a Gram matrix."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastrl.config import FastRLConfig
from fastrl.method import select
from fastrl.types import Group, Selection


class Score(NamedTuple):
    """Cosine with the full gradient sum and relative error against it: the shape of the weights without _G."""

    cosine: np.ndarray
    error: np.ndarray


def score_selection(gram_GG: np.ndarray, advantages_G: np.ndarray, weights_G: np.ndarray) -> Score:
    """Compare a weighted gradient sum with the full one in the geometry of a Gram matrix.

        full = sum_i A_i g_i,  pruned = sum_i w_i A_i g_i,  <a, b> = a^T K b,  K_ij = A_i A_j <g_i, g_j>
        cosine = <pruned, full> / (|pruned| |full|),  error = |pruned - full| / |full|

    The error is that of the sum. A loss that divides by what is kept rescales it; the cosine stays.

    Args:
        gram_GG: (G, G) inner products of rollout gradients.
        advantages_G: (G,) advantages over the full group.
        weights_G: (..., G) weights, 0 = dropped; many selections at once are scored one by one.

    Returns:
        Arrays of shape (...). A pruned sum of zero has cosine 0 and error 1; a full one of zero gives NaN.
    """
    kernel_GG = gram_GG * np.outer(advantages_G, advantages_G)
    weights_G = np.asarray(weights_G, dtype=np.float64)
    pruned, lost = _norm(kernel_GG, weights_G), _norm(kernel_GG, weights_G - 1)
    full = float(_norm(kernel_GG, np.ones(len(kernel_GG)))) or math.nan
    dot = weights_G @ kernel_GG.sum(axis=1)
    cosine = np.where(pruned > 0, dot / np.where(pruned > 0, pruned, 1.0), 0.0) / full
    return Score(np.clip(cosine, -1.0, 1.0), lost / full)


def _norm(kernel_GG: np.ndarray, weights_G: np.ndarray) -> np.ndarray:
    square = ((weights_G @ kernel_GG) * weights_G).sum(axis=-1)
    return np.sqrt(np.maximum(square, 0.0))  # a Gram matrix that was rounded may give a tiny negative square


def faithfulness(
    groups: Sequence[Group],
    grams: Sequence[np.ndarray],
    signal: Sequence[int],
    config: FastRLConfig,
    *,
    num_draws: int,
    seed: int,
) -> dict[str, Any]:
    """Score one configuration over draws of its chance; means over groups, standard errors between groups.

    Each selection is held against a random twin of the same group: as many rollouts, drawn uniformly, with the
    same total weight. The gain over the twin compares pruners that keep different shares.

    Args:
        groups: With advantages. All are selected from; those at the positions `signal` are scored.
        num_draws: At least 2. Draws within a group are averaged before groups are compared.

    Returns:
        `config`; `kept_frac` (of rollouts in groups with signal); `cosine`, `error` and the twin's
        `random_cosine`, `random_error`; `cosine_gain`, `error_gain` (positive = better than the twin), each
        {mean, se}; `bias` = |E pruned - full| / |full|, root mean square over groups with the variance of the mean
        over draws taken off: 0 for an unbiased pruner, the error itself for one without chance. None without signal.
    """
    weights = [np.zeros((num_draws, group.num_rollouts)) for group in groups]
    twins = [np.zeros_like(weight_DG) for weight_DG in weights]
    num_kept = np.zeros((num_draws, len(groups)))
    for draw in range(num_draws):
        rng = np.random.default_rng([seed, draw, 0])
        chance = np.random.default_rng([seed, draw, 1])
        for p, selection in enumerate(select(groups, config, rng=rng)):
            weights[p][draw] = _weights(groups[p], selection)
            twins[p][draw] = _random_twin(selection.weight_G, groups[p].scorable_G, chance)
            num_kept[draw, p] = selection.num_kept
    own = [_scores(groups[p], grams[p], weights[p]) for p in signal]
    twin = [_scores(groups[p], grams[p], twins[p]) for p in signal]
    num_rollouts = sum(groups[p].num_rollouts for p in signal)
    gains = [{"cosine": o["cosine"] - t["cosine"], "error": t["error"] - o["error"]}
             for o, t in zip(own, twin, strict=True)]  # fmt: skip
    return {
        "config": config.to_dict(),
        "kept_frac": float(num_kept[:, signal].sum() / num_draws / num_rollouts) if signal else None,
        **{name: _mean_se(score[name] for score in own) for name in ("cosine", "error")},
        **{f"random_{name}": _mean_se(score[name] for score in twin) for name in ("cosine", "error")},
        **{f"{name}_gain": _mean_se(gain[name] for gain in gains) for name in ("cosine", "error")},
        "bias": math.sqrt(max(0.0, float(np.mean([s["bias_square"] for s in own])))) if own else None,
    }


def _weights(group: Group, selection: Selection) -> np.ndarray:
    """Weights on the group's own advantages; those of PODS, which has its own, are expressed in them."""
    advantages_G = group.advantages_G
    assert advantages_G is not None
    push_G = selection.push_G(group)
    is_zero_G = advantages_G == 0
    return np.where(is_zero_G, selection.weight_G, push_G / np.where(is_zero_G, 1.0, advantages_G))


def _random_twin(weight_G: np.ndarray, scorable_G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    twin_G = np.zeros_like(weight_G)
    num = int((weight_G > 0).sum())
    if num:
        twin_G[rng.choice(np.flatnonzero(scorable_G), num, replace=False)] = weight_G.sum() / num
    return twin_G


def _scores(group: Group, gram_GG: np.ndarray, weights_DG: np.ndarray) -> dict[str, float]:
    assert group.advantages_G is not None
    each = score_selection(gram_GG, group.advantages_G, weights_DG)
    mean_square = float(score_selection(gram_GG, group.advantages_G, weights_DG.mean(axis=0)).error ** 2)
    # E |mean over draws - full|^2 = bias^2 + variance / draws, and variance / draws is the second term.
    noise = (float((each.error**2).mean()) - mean_square) / (len(weights_DG) - 1)
    return {
        "cosine": float(each.cosine.mean()),
        "error": float(each.error.mean()),
        "bias_square": mean_square - noise,
    }


def _mean_se(values: Iterable[float]) -> dict[str, float | None]:
    found = np.array(list(values), dtype=np.float64)
    return {
        "mean": float(found.mean()) if len(found) else None,
        "se": float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else None,
    }
