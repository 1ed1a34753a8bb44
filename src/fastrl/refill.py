"""How many more prompts a step samples: in place of skipped ones, for signal (DAPO), or to fill the batch (CPPO).

    none     the engine's own prompts
    skipped  others for those that the budget skips, before anything is sampled
    signal   DAPO's dynamic sampling: sample more until as many groups have signal as the engine's batch has prompts;
             groups without signal and surplus ones are not trained on (arXiv 2503.14476)
    kept     CPPO's completion allocation: 1 / keep_share times the prompts, of whose rollouts the share fills the
             engine's batch (arXiv 2503.22342)

All but none also replace skipped prompts. Whatever is sampled, the number of optimizer steps stays the engine's.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fastrl.pruners import keep_none
from fastrl.types import Group, Selection

REFILLS = ("none", "skipped", "signal", "kept")

_MARGIN = 1.25
"""Samples this much more than the yield so far asks for (GRESO, arXiv 2506.02177): one more round of sampling costs
more than a few surplus groups."""


def num_prompts_at_first(kind: str, num_prompts: int, keep_share: float) -> int:
    """Return how many prompts a step samples before it looks at any reward.

    Args:
        kind: One of `REFILLS`.
        num_prompts: P, prompts of the engine's batch.
        keep_share: Share of all rollouts that will be kept.
    """
    return int(num_prompts / keep_share + 1e-9) if kind == "kept" else num_prompts


def num_prompts_missing(kind: str, num_prompts: int, has_signal_P: Iterable[bool]) -> int:
    """Return how many more prompts to sample, given which of those sampled so far have signal.

    At most P at a time: the engine's own batch.
    """
    if kind != "signal":
        return 0
    found = list(has_signal_P)
    missing = num_prompts - sum(found)
    if missing <= 0:
        return 0
    share = max(sum(found), 1) / max(len(found), 1)
    return min(num_prompts, math.ceil(_MARGIN * missing / share))


def drop_surplus(
    groups: Sequence[Group], selections: Sequence[Selection], num_prompts: int
) -> list[Selection]:
    """Drop groups without signal, and those with signal beyond the first P in the order of sampling.

    Where no group has signal, the first P stay as they are: the engine's own batch.
    """
    has_signal_P = np.array([group.has_signal for group in groups])
    wanted_P = has_signal_P if has_signal_P.any() else np.ones_like(has_signal_P)
    is_surplus_P = np.cumsum(wanted_P) > num_prompts
    chosen = []
    for group, selection, wanted, is_surplus in zip(groups, selections, wanted_P, is_surplus_P, strict=True):
        if not group.scorable_G.any():
            chosen.append(selection)
        elif not wanted:
            chosen.append(keep_none(group, reason="zero_variance"))
        else:
            chosen.append(keep_none(group, reason="surplus") if is_surplus else selection)
    return chosen
