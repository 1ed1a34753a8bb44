"""From selections to micro-batches: alignment, windows, ranks, denominators. Index arithmetic only.

Rows are the rollouts of a step over all ranks, numbered group by group in sampling order; of what was
sampled together, rank r generated the r-th contiguous slice. Every function gives the same answer on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastrl.types import UNSCORABLE, Group, Selection

DUMMY = -1
"""Row number of a row that only fills up: weight 0, no loss."""


def round_up_counts(counts_P: np.ndarray, multiple: int, maximum: int) -> np.ndarray:
    """Raise rollout counts until their sum is a multiple: every rank must generate the same number.

    The prompts with the fewest rollouts get one more each, ties in the order of the prompts.

    Args:
        counts_P: (P,) rollouts per prompt, none above the maximum.
        multiple: Number of ranks; P * maximum is a multiple of it.
        maximum: The engine's own number of rollouts per prompt.
    """
    assert len(counts_P) * maximum % multiple == 0, "full groups fill the ranks evenly"
    counts_P = counts_P.copy()
    for _ in range(-int(counts_P.sum()) % multiple):
        counts_P[np.argmin(counts_P)] += 1
    assert (counts_P <= maximum).all()
    return counts_P


def canonical_order(groups: Sequence[Group]) -> list[int]:
    """Order by prompt id, and equal ids by content: what is left are identical groups, for which order is moot."""
    ids = [group.prompt_id for group in groups]
    if len(set(ids)) == len(ids):
        return sorted(range(len(ids)), key=ids.__getitem__)
    # Bytes, because NaN compares with nothing.
    columns = [(g.rewards_G, g.advantages_G, g.outcomes_G) for g in groups]
    numbers = [[b"" if column is None else column.tobytes() for column in three] for three in columns]
    content = [([list(map(int, t)) for t in g.tokens_G], n) for g, n in zip(groups, numbers, strict=True)]
    return sorted(range(len(ids)), key=lambda p: (ids[p], content[p]))


def align_top_up(
    groups: Sequence[Group], selections: Sequence[Selection], multiple: int
) -> tuple[list[Selection], int]:
    """Add pruned rollouts back until the number of kept ones is a multiple (paper, step 5).

    Round-robin over the prompts in canonical order, each gives its pruned rollout of highest |A| (ties: sampling
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
    queues = {p: _pruned_by_advantage(groups[p], selections[p]) for p in canonical_order(groups)}
    chosen: list[tuple[int, int]] = []
    for turn in range(max((len(queue) for queue in queues.values()), default=0)):
        chosen += [(p, queue[turn]) for p, queue in queues.items() if turn < len(queue)]
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


def rows_per_update(num_rows: int, num_updates: int, *, multiple: int) -> int:
    """Return the rows of each optimizer step, over all ranks, so that num_updates steps take all rows.

    Args:
        multiple: What the rows of a step must be a multiple of; at least one multiple is returned.
    """
    return max(1, -(-num_rows // (num_updates * multiple))) * multiple


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Rows whose prompt is computed once per micro-batch.

    Args:
        group_N: (N,) which prompt each row continues.
        prompt_N: (N,) tokens of that prompt.
    """

    group_N: np.ndarray
    prompt_N: np.ndarray

    def tokens(self, rows: Sequence[int], length_N: np.ndarray) -> int:
        """Tokens of a micro-batch: each prompt but its last token once, that token and an answer per row."""
        real = [row for row in rows if row != DUMMY]
        first = {int(self.group_N[row]): row for row in real}
        answers = sum(int(length_N[row] - self.prompt_N[row]) + 1 for row in real)
        # A dummy has the prompt of some row of its rank and one token.
        dummies = (len(rows) - len(real)) * (int(self.prompt_N.max()) + 1)
        return answers + sum(int(self.prompt_N[row]) - 1 for row in first.values()) + dummies


def micro_batches(
    share: Sequence[int],
    length_N: np.ndarray,
    *,
    size: int,
    num_steps: int,
    shrink: bool = False,
    sharing: Sharing | None = None,
    num_used: int | None = None,
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
        shrink: Use all micro-steps with fewer rows each, for the least memory.
        sharing: Where rows of a prompt should stand together; the prompt with the longest row comes first. None = by
            the length of each row alone.
        num_used: Micro-batches to use, from `fewest_packed`; None = as many as `size` asks for.
    """
    num_used = -(-len(share) // size) if num_used is None else num_used
    assert 1 <= num_used <= num_steps, "a window holds more rows than the engine's batch"
    if shrink:
        num_used = min(num_steps, len(share))
    used = _chunks(share, length_N, num_used, sharing)
    return [None] * (num_steps - num_used) + used


def fewest_packed(
    shares: Sequence[Sequence[int]], length_N: np.ndarray, sharing: Sharing, *, size: int, budget: int
) -> int:
    """Return how many micro-batches all ranks use, so that none holds more tokens than an unpruned one would.

    Never more than `size` rows in each would take: rows that share their prompt leave room for others.

    Args:
        shares: Rows of each rank, as many on each.
        budget: Tokens of an unpruned micro-batch: `size` rows, padded to the longest.
    """
    most = -(-len(shares[0]) // size)
    for num in range(1, most):
        chunks = (chunk for share in shares for chunk in _chunks(share, length_N, num, sharing))
        if all(sharing.tokens(chunk, length_N) <= budget for chunk in chunks):
            return num
    return most


def _chunks(share: Sequence[int], length_N: np.ndarray, num: int, sharing: Sharing | None) -> list[list[int]]:
    """As even as possible, long rows first; with `sharing`, rows of a prompt side by side."""
    ordered = sorted(share, key=lambda i: (-length_N[i] if i != DUMMY else 0, i))
    if sharing is not None:
        keys = [DUMMY if i == DUMMY else int(sharing.group_N[i]) for i in ordered]
        first = {key: place for place, key in reversed(list(enumerate(keys)))} | {DUMMY: len(ordered)}
        places = sorted(range(len(ordered)), key=lambda place: (first[keys[place]], place))
        ordered = [ordered[place] for place in places]
    return [chunk.tolist() for chunk in np.array_split(np.array(ordered), num)]


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

    def rows(self, rank: int) -> list[int]:
        """Row numbers on a rank, dummies included, in the order of its micro-steps."""
        return [row for step in self.steps_R[rank] if step is not None for row in step]


def plan_round(
    keep_N: np.ndarray,
    *,
    tokens_N: np.ndarray,
    length_N: np.ndarray,
    live_N: np.ndarray,
    image_N: np.ndarray | None = None,
    owner_N: np.ndarray | None = None,
    sharing: Sharing | None = None,
    num_windows: int,
    num_steps: int,
    size: int,
    shrink: bool = False,
    denominator: str,
    num_ranks: int,
    rng: np.random.Generator,
) -> list[WindowPlan]:
    """Plan a whole round: windows, ranks, micro-batches and denominators.

    Args:
        keep_N: (N,) bool, rows to train on; N is a multiple of num_ranks.
        owner_N: (N,) rank that generated each row; None = the r-th contiguous slice of all rows.
        tokens_N, length_N, live_N, denominator: see `denominators` and `micro_batches`.
        image_N: (N,) bool, rows whose prompt has an image; None = no row has one.
        sharing: Where rows of a prompt should share a micro-batch, and more of them may then; None = need not.
        num_windows: Optimizer windows of the round.
        num_steps: Micro-steps per window and rank.
        size, shrink: Most rows of a micro-batch on one rank; whether to use all micro-steps.
    """
    owner_N = owners(len(keep_N), num_ranks) if owner_N is None else owner_N
    plans = []
    for window in split_windows(np.flatnonzero(keep_N), num_windows, rng):
        shares = balance(window, owner_N, num_ranks)
        num_used = None
        if sharing is not None and len(length_N):
            budget = size * int(length_N.max())
            num_used = fewest_packed(shares, length_N, sharing, size=size, budget=budget)
        steps_R = [
            micro_batches(
                share,
                length_N,
                size=size,
                num_steps=num_steps,
                shrink=shrink,
                sharing=sharing,
                num_used=num_used,
            )
            for share in shares
        ]
        divide_by = denominators(
            denominator, tokens_N=tokens_N, live_N=live_N, window=window, num_windows=num_windows
        )
        if image_N is not None and (keep_N & image_N).any():
            steps_R = _with_images_everywhere(steps_R, image_N)
        plans.append(WindowPlan(steps_R=steps_R, denominators=divide_by))
    return plans


def owners(num_rows: int, num_ranks: int) -> np.ndarray:
    """(N,) the rank that generated each row: contiguous slices of equal size."""
    assert num_rows % num_ranks == 0, "every rank generates the same number of rows"
    return np.arange(num_rows) // max(1, num_rows // num_ranks)


def _with_images_everywhere(
    steps_R: list[list[list[int] | None]], image_N: np.ndarray
) -> list[list[list[int] | None]]:
    """Where one rank's micro-batch has an image and another's has none, add a dummy to all of them.

    Sharded engines gather the weights of a vision tower as they reach it: ranks without images would
    not take part, and the others would wait for ever. A dummy carries an image (see `fillers`).
    """
    together = []
    for step_R in zip(*steps_R, strict=True):
        if step_R[0] is not None:
            has_image_R = [any(row == DUMMY or image_N[row] for row in step) for step in step_R]
            if any(has_image_R) and not all(has_image_R):
                step_R = tuple([*step, DUMMY] for step in step_R)
        together.append(step_R)
    return [list(steps) for steps in zip(*together, strict=True)]


def fillers(keep_N: np.ndarray, length_N: np.ndarray, image_N: np.ndarray, owner_N: np.ndarray) -> list[int]:
    """Return the row that each rank's dummies are made of: the shortest of its own that will do.

    Where a kept row has an image, all dummies have one; where none has, none does. A rank without
    any such row takes the shortest of another.
    """
    usable_N = image_N if (keep_N & image_N).any() else ~image_N
    if not usable_N.any():  # nothing is kept, and every row has an image
        usable_N = image_N
    chosen = []
    for rank in range(int(owner_N.max()) + 1):
        own_N = usable_N & (owner_N == rank)
        candidates = np.flatnonzero(own_N if own_N.any() else usable_N)
        chosen.append(int(candidates[np.argmin(length_N[candidates])]))
    return chosen


def moves(plans: Sequence[WindowPlan], filler_R: Sequence[int], owner_N: np.ndarray) -> list[list[list[int]]]:
    """Return the rows that change ranks: `[source][target]`, each row once, in ascending order.

    Args:
        plans: All windows of a round.
        filler_R: From `fillers`.
        owner_N: (N,) rank that generated each row.
    """
    num_ranks = len(filler_R)
    moving: list[list[list[int]]] = [[[] for _ in range(num_ranks)] for _ in range(num_ranks)]
    for target in range(num_ranks):
        wanted = {filler_R[target] if row == DUMMY else row for plan in plans for row in plan.rows(target)}
        for row in sorted(wanted):
            if owner_N[row] != target:
                moving[owner_N[row]][target].append(row)
    return moving
