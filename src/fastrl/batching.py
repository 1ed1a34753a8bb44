"""From selections to micro-batches: alignment, windows, ranks, denominators. Index arithmetic only.

Rows are the rollouts of a step over all ranks, numbered group by group in sampling order; rank r
generated the r-th contiguous slice of them. Every function gives the same answer on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastrl.types import UNSCORABLE, Group, Selection

DUMMY = -1
"""Row number of a row that only fills up: weight 0, no loss."""


def align_top_up(
    groups: Sequence[Group], selections: Sequence[Selection], multiple: int
) -> tuple[list[Selection], int]:
    """Add pruned rollouts back until the number of kept ones is a multiple (paper, step 5).

    Round-robin over the prompts, each gives its pruned rollout of highest |A| (ties: sampling
    order), with weight 1. Unscorable rollouts and dropped groups give none. Where nothing is kept,
    nothing is added.

    Args:
        multiple: d, the data-parallel size times what the engine needs.

    Returns:
        The aligned selections and the number of rollouts added. If the candidates run out first,
        the rest is for dummy rows.
    """
    num_kept = sum(selection.num_kept for selection in selections)
    missing = -num_kept % multiple
    if not missing:
        return list(selections), 0
    queues = [_pruned_by_advantage(g, s) for g, s in zip(groups, selections, strict=True)]
    chosen: list[tuple[int, int]] = []
    for turn in range(max((len(queue) for queue in queues), default=0)):
        chosen += [(p, queue[turn]) for p, queue in enumerate(queues) if turn < len(queue)]
    aligned = list(selections)
    for p, i in chosen[:missing]:
        keep_G, weight_G = aligned[p].keep_G.copy(), aligned[p].weight_G.copy()
        keep_G[i], weight_G[i] = True, 1.0
        aligned[p] = replace(aligned[p], keep_G=keep_G, weight_G=weight_G)
    return aligned, min(missing, len(chosen))


def _pruned_by_advantage(group: Group, selection: Selection) -> list[int]:
    assert group.advantages_G is not None
    pruned = np.flatnonzero(~selection.keep_G & (selection.cluster_G != UNSCORABLE))
    return pruned[np.argsort(-np.abs(group.advantages_G[pruned]), kind="stable")].tolist()


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """What the loss of one optimizer window divides by: numbers of rows and of loss tokens, over all ranks."""

    rows: float
    tokens: float


def denominators(
    kind: str, *, tokens_N: np.ndarray, live_N: np.ndarray, window: np.ndarray, num_windows: int
) -> Denominators:
    """Return the denominators of one optimizer window.

    Args:
        kind: "full": all rows that were sampled, so that dropping rows of advantage 0 changes
            nothing; "live": the rows of groups with signal (all rows where no group has any);
            "kept": the rows that are trained on. The first two are spread evenly over the windows.
        tokens_N: (N,) loss tokens of each row.
        live_N: (N,) bool, rows of groups with signal.
        window: Row numbers that are trained on in this window.
    """
    if kind == "kept":
        rows, tokens = float(len(window)), float(tokens_N[window].sum())
    else:
        # A step without any signal still has its KL or entropy terms: they are averaged over all rows.
        counted_N = live_N if kind == "live" and live_N.any() else np.ones_like(live_N)
        rows, tokens = counted_N.sum() / num_windows, tokens_N[counted_N].sum() / num_windows
    # A window that trains on nothing divides its zero loss by one.
    return Denominators(rows=float(rows) or 1.0, tokens=float(tokens) or 1.0)


def split_windows(rows: np.ndarray, num_windows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal the kept rows at random to the optimizer windows of a round; sizes differ by at most one."""
    shuffled = rng.permutation(rows)
    return [np.sort(shuffled[w::num_windows]) for w in range(num_windows)]


def balance(window: np.ndarray, owner_N: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Give every rank the same number of rows; only the surplus moves.

    Args:
        window: Row numbers to share out.
        owner_N: (N,) rank that generated each row.

    Returns:
        One list per rank of ceil(len(window) / num_ranks) row numbers (at least one), own rows
        first, filled up with `DUMMY`.
    """
    quota = max(1, -(-len(window) // num_ranks))
    shares = [[int(i) for i in window if owner_N[i] == rank] for rank in range(num_ranks)]
    surplus = [i for share in shares for i in share[quota:]]
    shares = [share[:quota] for share in shares]
    for share in shares:
        while len(share) < quota:
            share.append(surplus.pop(0) if surplus else DUMMY)
    return shares


def micro_batches(
    share: Sequence[int], length_N: np.ndarray, *, size: int, num_steps: int
) -> list[list[int] | None]:
    """Plan the micro-steps of one optimizer window on one rank.

    Rows are sorted by length, longest first, so that each micro-batch can be trimmed to its own
    longest row and all ranks work on long rows at the same time. The fewest micro-batches of at
    most `size` rows are used, as even as possible; the surplus micro-steps are None and come first,
    because engines synchronise and step on the last one.

    Args:
        share: Row numbers of this rank, `DUMMY` allowed; the same count on every rank.
        length_N: (N,) tokens of each row, prompt included.
        size: Most rows in one micro-batch.
        num_steps: Micro-steps of the window; num_steps * size rows must suffice.
    """
    num_used = -(-len(share) // size)
    assert 1 <= num_used <= num_steps, "a window holds more rows than the engine's batch"
    by_length = sorted(share, key=lambda i: (-length_N[i] if i != DUMMY else 0, i))
    used = [chunk.tolist() for chunk in np.array_split(np.array(by_length), num_used)]
    return [None] * (num_steps - num_used) + used


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """One optimizer window: its micro-steps on every rank, and what its loss divides by.

    Args:
        steps_R: Per rank, a list of micro-steps: row numbers, or None for a skipped one. All ranks
            have the same micro-steps with the same number of rows in each.
        denominators: Over all ranks.
    """

    steps_R: list[list[list[int] | None]]
    denominators: Denominators

    @property
    def num_micro_batches(self) -> int:
        return sum(step is not None for step in self.steps_R[0])


def plan_round(
    keep_N: np.ndarray,
    *,
    tokens_N: np.ndarray,
    length_N: np.ndarray,
    live_N: np.ndarray,
    num_windows: int,
    num_steps: int,
    size: int,
    denominator: str,
    num_ranks: int,
    rng: np.random.Generator,
) -> list[WindowPlan]:
    """Plan a whole round: windows, ranks, micro-batches and denominators.

    Args:
        keep_N: (N,) bool, rows to train on; N is a multiple of num_ranks.
        tokens_N, length_N, live_N, denominator: see `denominators` and `micro_batches`.
        num_windows: Optimizer windows of the round.
        num_steps: Micro-steps per window and rank.
        size: Most rows of a micro-batch on one rank.
    """
    assert len(keep_N) % num_ranks == 0, "every rank generates the same number of rows"
    owner_N = np.arange(len(keep_N)) // max(1, len(keep_N) // num_ranks)
    plans = []
    for window in split_windows(np.flatnonzero(keep_N), num_windows, rng):
        steps_R = [
            micro_batches(share, length_N, size=size, num_steps=num_steps)
            for share in balance(window, owner_N, num_ranks)
        ]
        divide_by = denominators(
            denominator, tokens_N=tokens_N, live_N=live_N, window=window, num_windows=num_windows
        )
        plans.append(WindowPlan(steps_R=steps_R, denominators=divide_by))
    return plans
