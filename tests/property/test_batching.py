"""Alignment, balance and micro-batches: every row exactly once, every rank in step, nothing moved in vain."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRLConfig, Group, Selection, select
from fastrl.batching import (
    DUMMY,
    Sharing,
    align_top_up,
    balance,
    denominators,
    fewest_packed,
    micro_batches,
    plan_round,
    split_windows,
)

NAN = float("nan")


# --- alignment ----------------------------------------------------------------------------------


@st.composite
def aligned_steps(draw):
    """A step of groups with a selection for each, as any pruner and policy may leave them."""
    groups, selections = [], []
    for p in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 8))
        value = st.sampled_from([0.0, 0.5, 1.0, 1.5, NAN])
        rewards = np.array(draw(st.lists(value, min_size=size, max_size=size)))
        steps = st.integers(-3, 3).map(lambda k: k / 2)  # few values, so that |A| ties are common
        advantages = np.array(draw(st.lists(steps, min_size=size, max_size=size)))
        scorable = ~np.isnan(rewards)
        advantages[~scorable] = 0.0
        groups.append(
            Group(
                prompt_id=f"q{p}",
                tokens_G=[[i] for i in range(size)],
                rewards_G=rewards,
                advantages_G=advantages,
            )
        )
        wanted = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        dropped = draw(st.integers(0, 4)) == 0 or not scorable.any()
        keep = scorable & wanted & (not dropped)
        if not dropped and not keep.any():
            keep[np.flatnonzero(scorable)[0]] = True
        cluster = np.full(size, -1)
        if not dropped:
            cluster[scorable] = np.flatnonzero(keep)[0]
            cluster[keep] = np.flatnonzero(keep)
        selections.append(
            Selection(keep_G=keep, weight_G=np.where(keep, 2.0, 0.0), cluster_G=cluster, reason="test")
        )
    return groups, selections


def restated_top_up(groups, selections, multiple):
    """(prompt, rollout) in the order in which step 5 of the paper adds them back."""
    kept = sum(int(s.keep_G.sum()) for s in selections)
    waiting = [
        [i for i in range(g.num_rollouts) if not s.keep_G[i] and s.cluster_G[i] >= 0]
        for g, s in zip(groups, selections, strict=True)
    ]
    added = []
    while kept and (kept + len(added)) % multiple and any(waiting):
        for p, candidates in enumerate(waiting):
            if candidates and (kept + len(added)) % multiple:
                best = max(candidates, key=lambda i: (abs(groups[p].advantages_G[i]), -i))
                candidates.remove(best)
                added.append((p, best))
    return added


@settings(max_examples=250)
@given(aligned_steps(), st.integers(1, 8))
def test_top_up_adds_back_what_the_paper_says(step, multiple):
    groups, selections = step
    expected = restated_top_up(groups, selections, multiple)
    before = [(s.keep_G.copy(), s.weight_G.copy()) for s in selections]
    aligned, num_added = align_top_up(groups, selections, multiple)
    assert num_added == len(expected)
    for p, (old, new) in enumerate(zip(selections, aligned, strict=True)):
        assert old.keep_G.tolist() == before[p][0].tolist()
        assert old.weight_G.tolist() == before[p][1].tolist()
        added = [i for q, i in expected if q == p]
        assert np.flatnonzero(new.keep_G & ~old.keep_G).tolist() == sorted(added)
        assert (new.keep_G | ~old.keep_G).all()
        assert new.weight_G[old.keep_G].tolist() == old.weight_G[old.keep_G].tolist()
        assert new.weight_G[added].tolist() == [1.0] * len(added)
        assert not new.keep_G[~groups[p].scorable_G].any()
        assert new.cluster_G.tolist() == old.cluster_G.tolist()
        assert new.reason == old.reason


@settings(max_examples=200)
@given(aligned_steps(), st.integers(1, 8))
def test_top_up_reaches_the_multiple_or_uses_up_all_candidates(step, multiple):
    groups, selections = step
    aligned, num_added = align_top_up(groups, selections, multiple)
    total = sum(s.num_kept for s in aligned)
    assert total - sum(s.num_kept for s in selections) == num_added < multiple
    candidates = sum(int((~s.keep_G & (s.cluster_G >= 0)).sum()) for s in aligned)
    assert total % multiple == 0 or candidates == 0


def test_top_up_goes_round_the_prompts_and_takes_the_highest_magnitude():
    def pruned(prompt_id, advantages):
        size = len(advantages)
        keep = np.arange(size) == 0
        group = Group(
            prompt_id=prompt_id,
            tokens_G=[[0]] * size,
            rewards_G=np.zeros(size),
            advantages_G=np.array(advantages),
        )
        return group, Selection(
            keep_G=keep, weight_G=keep * 1.0, cluster_G=np.zeros(size, int), reason="test"
        )

    pairs = [pruned("a", [0.0, 1.0, -2.0, 2.0]), pruned("b", [0.0, 0.5]), pruned("c", [0.0])]
    groups, selections = [list(column) for column in zip(*pairs, strict=True)]
    aligned, num_added = align_top_up(groups, selections, 7)
    assert num_added == 4
    assert [s.keep_G.tolist() for s in aligned] == [[True] * 4, [True, True], [True]]
    aligned, num_added = align_top_up(groups, selections, 6)
    assert num_added == 3  # a: -2 (before the equal +2), b: 0.5, a: +2
    assert [s.keep_G.tolist() for s in aligned] == [[True, False, True, True], [True, True], [True]]
    aligned, num_added = align_top_up(groups, selections, 8)
    assert num_added == 4  # nothing is left: the eighth row is a dummy's


@pytest.mark.parametrize("multiple", range(1, 9))
def test_top_up_adds_nothing_where_nothing_is_kept(multiple):
    groups = [Group(prompt_id="q", tokens_G=[[1], [2]], rewards_G=np.ones(2))]
    selections = select(groups, FastRLConfig(zero_variance="drop"))
    aligned, num_added = align_top_up(groups, selections, multiple)
    assert num_added == 0
    assert not aligned[0].keep_G.any()


def test_top_up_never_revives_a_dropped_group():
    groups = [
        Group(prompt_id="flat", tokens_G=[[1], [2]], rewards_G=np.ones(2), advantages_G=np.zeros(2)),
        Group(
            prompt_id="mixed",
            tokens_G=[[1], [1], [2]],
            rewards_G=np.array([1.0, 1.0, 0.0]),
            advantages_G=np.array([0.5, 0.5, -1.0]),
        ),
    ]
    selections = select(groups, FastRLConfig(zero_variance="drop"))
    aligned, num_added = align_top_up(groups, selections, 8)
    assert [s.keep_G.tolist() for s in aligned] == [[False, False], [True, True, True]]
    assert num_added == 1


# --- windows, ranks, micro-steps ----------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 3))
def test_windows_deal_every_row_once_and_evenly(num_rows, num_windows, seed):
    rows = np.arange(num_rows) * 3
    windows = split_windows(rows, num_windows, np.random.default_rng(seed))
    assert sorted(np.concatenate(windows).tolist()) == rows.tolist()
    sizes = [len(window) for window in windows]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=200)
@given(st.data(), st.integers(1, 8), st.integers(1, 10))
def test_balance_moves_only_surplus_rows(data, num_ranks, per_rank):
    owner_N = np.arange(num_ranks * per_rank) // per_rank
    chosen = data.draw(st.sets(st.integers(0, len(owner_N) - 1)))
    window = np.array(sorted(chosen), dtype=int)
    shares = balance(window, owner_N, num_ranks)
    quota = max(1, -(-len(window) // num_ranks))
    assert [len(share) for share in shares] == [quota] * num_ranks
    assert sorted(i for share in shares for i in share if i != DUMMY) == window.tolist()
    for rank, share in enumerate(shares):
        own = [i for i in share if i != DUMMY and owner_N[i] == rank]
        assert share[: len(own)] == own
        # A rank that has a quota of its own rows receives none; one that has less gives none away.
        assert len(own) == min(quota, int((owner_N[window] == rank).sum()))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 4),
)
def test_micro_batches_use_the_fewest_steps_sorted_by_length(lengths, size, spare, num_dummies):
    length_N = np.array(lengths)
    share = [*range(len(lengths)), *[DUMMY] * num_dummies]
    num_used = -(-len(share) // size)
    steps = micro_batches(share, length_N, size=size, num_steps=num_used + spare)
    assert steps[:spare] == [None] * spare
    used = steps[spare:]
    assert len(used) == num_used
    assert all(1 <= len(step) <= size for step in used)
    assert max(map(len, used)) - min(map(len, used)) <= 1
    rows = [i for step in used for i in step]
    assert sorted(rows) == sorted(share)
    assert rows == sorted(rows, key=lambda i: (i == DUMMY, -length_N[i], i))


@given(
    st.lists(st.tuples(st.integers(2, 40), st.lists(st.integers(0, 12), max_size=8)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_prompts_stay_together_within_the_memory_of_the_unpruned_batch(groups, size, num_ranks):
    """Prompts of some length with any number of kept answers, dealt to ranks as they come."""
    rows = [(g, prompt, prompt + answer) for g, (prompt, answers) in enumerate(groups) for answer in answers]
    if not rows:
        return
    group_N, prompt_N, length_N = (np.array(column) for column in zip(*rows, strict=True))
    sharing = Sharing(group_N=group_N, prompt_N=prompt_N)
    quota = -(-len(rows) // num_ranks)
    shares = [[*range(r * quota, min(len(rows), (r + 1) * quota))] for r in range(num_ranks)]
    shares = [share + [DUMMY] * (quota - len(share)) for share in shares]
    budget = size * int(length_N.max())
    num_used = fewest_packed(shares, length_N, sharing, size=size, budget=budget)
    most = -(-quota // size)
    assert 1 <= num_used <= most
    for share in shares:
        steps = micro_batches(share, length_N, size=size, num_steps=most, sharing=sharing, num_used=num_used)
        used = [step for step in steps if step is not None]
        assert len(used) == num_used
        assert sorted(row for step in used for row in step) == sorted(share)
        assert max(map(len, used)) - min(map(len, used)) <= 1
        if num_used < most:
            assert all(sharing.tokens(step, length_N) <= budget for step in used)
        order = [group_N[row] for step in used for row in step if row != DUMMY]
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes == max(0, len(set(order)) - 1)  # each prompt's rows stand side by side


def test_tokens_of_rows_that_share_a_prompt():
    sharing = Sharing(group_N=np.array([0, 0, 1]), prompt_N=np.array([10, 10, 4]))
    length_N = np.array([13, 15, 9])
    assert sharing.tokens([0, 1], length_N) == 9 + (1 + 3) + (1 + 5)
    assert sharing.tokens([0, 1, 2], length_N) == 9 + 4 + 6 + 3 + (1 + 5)
    assert sharing.tokens([2, DUMMY], length_N) == 3 + 6 + 11


def random_round(rng, num_ranks):
    """A round of an engine: N rows of which any share is kept, from none over one to all of one rank's."""
    num_windows, num_steps, size = (int(rng.integers(1, 4)) for _ in range(3))
    num_rows = num_ranks * num_windows * num_steps * size
    style = rng.integers(0, 5)
    if style == 0:
        keep_N = np.arange(num_rows) < num_rows // num_ranks  # the first rank's rows only
    elif style == 1:
        keep_N = np.arange(num_rows) == rng.integers(num_rows)  # one row in the world
    else:
        keep_N = rng.random(num_rows) < (0.0, rng.random(), 1.0)[style - 2]
    tokens_N = rng.integers(0, 30, num_rows)
    return {
        "keep_N": keep_N,
        "tokens_N": tokens_N,
        "length_N": tokens_N + rng.integers(1, 20, num_rows),
        "live_N": rng.random(num_rows) < 0.7,
        "num_windows": num_windows,
        "num_steps": num_steps,
        "size": size,
        "num_ranks": num_ranks,
    }


def check_round(plans, example):
    """The promises of `plan_round` that hold for every selection."""
    num_ranks, size = example["num_ranks"], example["size"]
    keep_N, length_N = example["keep_N"], example["length_N"]
    owner_N = np.repeat(np.arange(num_ranks), len(keep_N) // num_ranks)
    assert len(plans) == example["num_windows"]
    seen, per_window = [], []
    for plan in plans:
        assert len(plan.steps_R) == num_ranks
        shapes = [[None if step is None else len(step) for step in steps] for steps in plan.steps_R]
        assert all(shape == shapes[0] for shape in shapes), "ranks differ in their micro-steps"
        assert len(shapes[0]) == example["num_steps"]
        used = [n for n in shapes[0] if n is not None]
        assert used, "a window without any micro-step"
        assert shapes[0] == [None] * (len(shapes[0]) - len(used)) + used, (
            "a skipped micro-step after a real one"
        )
        assert max(used) <= size
        assert max(used) - min(used) <= 1
        assert plan.num_micro_batches == len(used)

        shares = [[i for step in steps if step is not None for i in step] for steps in plan.steps_R]
        rows = sorted(i for share in shares for i in share if i != DUMMY)
        quota = max(1, -(-len(rows) // num_ranks))
        assert len(used) == -(-quota // size), "more micro-steps than needed"
        assert [len(share) for share in shares] == [quota] * num_ranks
        for share in shares:
            real = [i for i in share if i != DUMMY]
            assert share[: len(real)] == real, "a dummy in front of a row"
            assert (np.diff(length_N[real]) <= 0).all(), "not sorted by length"
        moved = sum(owner_N[i] != rank for rank, share in enumerate(shares) for i in share if i != DUMMY)
        # No plan with at most `quota` rows per rank moves fewer than what a rank has above it.
        assert moved == sum(max(0, int((owner_N[rows] == rank).sum()) - quota) for rank in range(num_ranks))
        seen += rows
        per_window.append(len(rows))
    assert sorted(seen) == np.flatnonzero(keep_N).tolist(), "a kept row is missing, doubled or invented"
    assert max(per_window) - min(per_window) <= 1


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_plan_round_keeps_all_ranks_in_step(num_ranks):
    for seed in range(150):
        example = random_round(np.random.default_rng([num_ranks, seed]), num_ranks)
        kind = ("full", "live", "kept")[seed % 3]
        plans = plan_round(**example, denominator=kind, rng=np.random.default_rng(seed))
        check_round(plans, example)


def test_the_check_of_a_round_sees_ranks_out_of_step_and_lost_rows():
    example = {
        "keep_N": np.ones(4, bool), "length_N": np.array([4, 3, 2, 1]), "num_ranks": 2,
        "num_windows": 1, "num_steps": 2, "size": 2,
    }  # fmt: skip
    more = {"tokens_N": np.ones(4, int), "live_N": np.ones(4, bool)}

    def plans():
        return plan_round(**example, **more, denominator="kept", rng=np.random.default_rng(0))

    check_round(plans(), example)
    out_of_step = plans()
    out_of_step[0].steps_R[1][1].pop()
    with pytest.raises(AssertionError, match="ranks differ"):
        check_round(out_of_step, example)
    lost = plans()
    lost[0].steps_R[0][1][0] = DUMMY
    with pytest.raises(AssertionError):
        check_round(lost, example)
    moved = plans()
    (a,), (b,) = [[steps[1]] for steps in moved[0].steps_R]
    a[0], b[0] = b[0], a[0]
    with pytest.raises(AssertionError):
        check_round(moved, example)


def test_every_rank_makes_the_same_plan_from_its_own_generator():
    example = random_round(np.random.default_rng(11), 4)
    plans = [plan_round(**example, denominator="full", rng=np.random.default_rng(3)) for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_window_trains_on_does_not_depend_on_the_number_of_ranks(seed):
    rng = np.random.default_rng(seed)
    keep_N = rng.random(24) < 0.5
    lengths = rng.integers(1, 9, 24)
    worlds = []
    for num_ranks in (1, 2, 3, 4):
        plans = plan_round(
            keep_N,
            tokens_N=lengths,
            length_N=lengths,
            live_N=keep_N,
            num_windows=2,
            num_steps=12,
            size=2,
            denominator="kept",
            num_ranks=num_ranks,
            rng=np.random.default_rng(seed),
        )
        worlds.append(
            [
                (sorted({i for steps in p.steps_R for s in steps if s for i in s} - {DUMMY}), p.denominators)
                for p in plans
            ]
        )
    assert worlds.count(worlds[0]) == len(worlds)


# --- denominators -------------------------------------------------------------------------------


def test_denominators_of_a_hand_worked_round():
    # Two groups of four; the second has no signal; three rows of the first are kept, in two windows.
    tokens_N = np.array([10, 20, 30, 40, 5, 5, 5, 5])
    live_N = np.array([True] * 4 + [False] * 4)
    shared = {"tokens_N": tokens_N, "live_N": live_N, "window": np.array([0, 2]), "num_windows": 2}
    full, live, kept = (denominators(kind, **shared) for kind in ("full", "live", "kept"))
    assert (full.rows, full.tokens) == (4.0, 60.0)
    assert (live.rows, live.tokens) == (2.0, 50.0)
    assert (kept.rows, kept.tokens) == (2.0, 40.0)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_denominators_of_a_round_add_up_over_its_windows(num_ranks):
    for seed in range(60):
        example = random_round(np.random.default_rng([7, num_ranks, seed]), num_ranks)
        example["tokens_N"] = example["tokens_N"] + 1
        counted = {
            "full": np.ones_like(example["keep_N"]),
            "live": example["live_N"],
            "kept": example["keep_N"],
        }
        for kind, rows_N in counted.items():
            plans = plan_round(**example, denominator=kind, rng=np.random.default_rng(seed))
            if rows_N.sum() < example["num_windows"]:
                continue  # windows without a row: the next tests
            assert sum(p.denominators.rows for p in plans) == pytest.approx(rows_N.sum(), rel=1e-12)
            total = example["tokens_N"][rows_N].sum()
            assert sum(p.denominators.tokens for p in plans) == pytest.approx(total, rel=1e-12)


def test_a_window_without_rows_divides_by_one():
    nothing = denominators(
        "kept",
        tokens_N=np.ones(4, int),
        live_N=np.zeros(4, bool),
        window=np.array([], dtype=int),
        num_windows=2,
    )
    assert (nothing.rows, nothing.tokens) == (1.0, 1.0)


def test_live_means_all_rows_where_no_group_has_signal():
    # What is left then are KL and entropy terms, which dividing by one would blow up.
    arguments = {
        "tokens_N": np.full(4, 5),
        "live_N": np.zeros(4, bool),
        "window": np.array([1]),
        "num_windows": 2,
    }
    live, full = denominators("live", **arguments), denominators("full", **arguments)
    assert (live.rows, live.tokens) == (full.rows, full.tokens) == (2.0, 10.0)


def test_a_share_of_a_row_is_a_denominator_too():
    # Two live rows over four windows are half a row each: their losses then add up to the mean over two rows.
    live_N = np.array([True, True, False, False, False, False, False, False])
    window = denominators(
        "live", tokens_N=np.ones(8, int), live_N=live_N, window=np.array([0]), num_windows=4
    )
    assert window.rows == 0.5
    assert window.tokens == 0.5


def test_top_up_does_not_depend_on_the_order_of_the_groups():
    def group(prompt_id):
        advantages = np.array([1.0, 1.0, -1.0, 0.5])
        tokens = [[1], [1], [2], [3]]
        return Group(prompt_id=prompt_id, tokens_G=tokens, rewards_G=advantages, advantages_G=advantages)

    kept = []
    for ids in ("abc", "cba"):
        groups = [group(prompt_id) for prompt_id in ids]
        aligned, num_added = align_top_up(groups, select(groups, FastRLConfig()), 2)
        assert num_added == 1
        kept.append({g.prompt_id: s.num_kept for g, s in zip(groups, aligned, strict=True)})
    assert kept[0] == kept[1]
