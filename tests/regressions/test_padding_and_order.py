"""Ranks that wait for each other need the same number of steps and of metrics, whatever was filtered. Rows that
only fill up were trained on, counted and averaged; rows that were sorted for speed lost touch with their rewards.

This is the index arithmetic for any number of ranks; real processes are in the tests of several processes.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group, Selection, select, summarize
from fastrl.batching import DUMMY, align_top_up, denominators, fillers, owners, plan_round

NAN = float("nan")
RUN = {"num_rollouts": 8, "total_steps": 12, "steps_per_epoch": 2}
PRUNERS = ["none", "mdap", "advantage_only", "random"]


# Equal work on all ranks (verl PR 5228)


@st.composite
def rounds(draw):
    """A round of R ranks in which each rank keeps any number of its rows: all, none, one in the world."""
    num_ranks = draw(st.integers(1, 8))
    num_windows, num_steps, size = (draw(st.integers(1, 3)) for _ in range(3))
    per_rank = num_windows * num_steps * size
    kept_R = draw(st.lists(st.integers(0, per_rank), min_size=num_ranks, max_size=num_ranks))
    keep_N = np.concatenate([np.arange(per_rank) < kept for kept in kept_R])
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tokens_N = rng.integers(1, 30, len(keep_N))
    return {
        "keep_N": keep_N,
        "tokens_N": tokens_N,
        "length_N": tokens_N + rng.integers(1, 9, len(keep_N)),
        "live_N": rng.random(len(keep_N)) < 0.7,
        "image_N": rng.random(len(keep_N)) < draw(st.sampled_from([0.0, 0.3, 1.0])),
        "num_windows": num_windows,
        "num_steps": num_steps,
        "size": size,
        "shrink": draw(st.booleans()),
        "denominator": draw(st.sampled_from(["kept", "live", "full"])),
        "num_ranks": num_ranks,
    }


def check_equal_work(plans, a_round):
    """Raise unless no rank would ever wait for another, and each kept row is trained on once."""
    trained = []
    for plan in plans:
        shapes_R = [[step and len(step) for step in steps] for steps in plan.steps_R]
        assert all(shapes == shapes_R[0] for shapes in shapes_R), "ranks with other numbers of steps or rows"
        assert len(shapes_R[0]) == a_round["num_steps"]
        assert shapes_R[0][-1], "the engine synchronises on the last micro-step: it must be a real one"
        assert max(filter(None, shapes_R[0])) <= a_round["size"] + 1, (
            "the batch size, and a dummy with an image"
        )
        assert plan.num_micro_batches > 0, "an accumulation over nothing divides by zero"
        assert plan.denominators.rows > 0
        assert plan.denominators.tokens > 0
        trained += [row for rank in range(a_round["num_ranks"]) for row in plan.rows(rank) if row != DUMMY]
    assert sorted(trained) == np.flatnonzero(a_round["keep_N"]).tolist()


@settings(max_examples=200)
@given(rounds())
def test_verl_5228_ranks_do_equal_work_whatever_is_kept(a_round):
    check_equal_work(plan_round(**a_round, rng=np.random.default_rng(0)), a_round)


@settings(max_examples=60)
@given(rounds())
def test_verl_5228_the_check_sees_a_rank_that_filters_alone(a_round):
    """As in the report: every rank splits what it kept itself, and the counts differ."""
    keep_N, num_ranks = a_round["keep_N"], a_round["num_ranks"]
    kept_R = keep_N.reshape(num_ranks, -1).sum(1)
    assume(kept_R.min() < kept_R.max())
    plans = plan_round(**a_round, rng=np.random.default_rng(0))
    owner_N = owners(len(keep_N), num_ranks)
    for plan in plans:
        rows = sorted({row for rank in range(num_ranks) for row in plan.rows(rank)} - {DUMMY})
        for rank in range(num_ranks):
            plan.steps_R[rank][:] = [None] * a_round["num_steps"]
            plan.steps_R[rank][-1] = [row for row in rows if owner_N[row] == rank]
    with pytest.raises(AssertionError):
        check_equal_work(plans, a_round)


# Fewer rows than a micro-batch (verl#2505)


@pytest.mark.parametrize("denominator", ["kept", "live", "full"])
def test_verl_2505_any_two_ranks_give_the_gradient_of_one(denominator):
    """From no row on either rank to two micro-batches on both, one parameter per row."""
    size, weight_N, tokens_N = 4, np.arange(1.0, 17.0), np.arange(2, 18)
    for kept_R in itertools.product(range(2 * size + 1), repeat=2):
        keep_N = np.concatenate([np.arange(2 * size) < kept for kept in kept_R])
        found = []
        for num_ranks, num_steps in ((1, 4), (2, 2)):
            (plan,) = plan_round(
                keep_N, tokens_N=tokens_N, length_N=tokens_N, live_N=np.ones(16, bool), num_windows=1, size=size,
                num_steps=num_steps, denominator=denominator, num_ranks=num_ranks, rng=np.random.default_rng(0),
            )  # fmt: skip
            assert 1 <= plan.num_micro_batches <= num_steps, "an accumulation over nothing is 0 / 0"
            found += [
                gradient([plan], num_ranks, weight_N, tokens_N, per_token) for per_token in (False, True)
            ]
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found[:2], found[2:])
        assert (found[0] != 0).tolist() == keep_N.tolist()


# The same metrics on all ranks (trl#7310)


@st.composite
def any_step(draw, min_groups=1):
    groups = []
    for p in range(draw(st.integers(min_groups, 4))):
        rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=1, max_size=8))
        lengths = [draw(st.integers(0, 4)) for _ in rewards]
        tokens_G = [[p % 2, *range(length)] if length else [] for length in lengths]
        groups.append(Group(prompt_id=f"q{p}", tokens_G=tokens_G, rewards_G=np.array(rewards)))
    return groups


@given(
    any_step(), any_step(), st.sampled_from(PRUNERS), st.sampled_from(["fixed", "ars"]), st.sampled_from(
        ["keep_one", "drop", "keep_all"]
    )
)  # fmt: skip
def test_trl_7310_metric_names_depend_on_the_settings_alone(one, other, pruner, budget, zero_variance):
    """A rank that logs a name the others do not have waits for them for ever."""
    config = FastRLConfig(pruner=pruner, budget=budget, zero_variance=zero_variance)
    names = []
    for groups in (one, other):
        run = FastRL(config, **RUN)
        for _ in range(2):  # over the end of an epoch, where budgets change
            run.observe(groups, run.select(groups))
            names.append(list(run.metrics()))
            assert all(isinstance(value, float) for value in run.metrics().values())
    assert all(found == names[0] for found in names), "the same names in the same order"


# Rows that only fill up (Agent-R1 PR 88, verl PR 5969, verl-omni PR 602)


def a_step(seed):
    """Groups with mixed, equal and missing rewards; three words, so that rollouts resemble each other."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            prompt_id=f"q{p}",
            tokens_G=[rng.integers(0, 3, rng.integers(1, 5)).tolist() for _ in range(8)],
            rewards_G=rng.choice([0.0, 1.0, NAN], 8, p=[0.45, 0.45, 0.1]) if p else np.ones(8),
        )
        for p in range(4)
    ]


def plan_for(num_ranks, keep_N, tokens_N, denominator="kept", num_windows=1, size=4):
    """A round of at least as many rows as the ranks can share evenly; what is added was never sampled."""
    filled = -len(keep_N) % num_ranks
    keep_N = np.append(keep_N, np.zeros(filled, bool))
    tokens_N = np.append(tokens_N, np.ones(filled, int))
    return plan_round(
        keep_N, tokens_N=tokens_N, length_N=tokens_N, live_N=keep_N, num_windows=num_windows, size=size,
        num_steps=len(keep_N), denominator=denominator, num_ranks=num_ranks, rng=np.random.default_rng(5),
    )  # fmt: skip


def gradient(plans, num_ranks, weight_N, tokens_N, per_token):
    """What an engine computes from the plan, with one parameter per row: so any row that counts is seen."""
    total = np.zeros(len(weight_N))
    for plan in plans:
        divide_by = plan.denominators.tokens if per_token else plan.denominators.rows
        for rank in range(num_ranks):
            for row in plan.rows(rank):
                if row != DUMMY:
                    total[row] += weight_N[row] * (tokens_N[row] if per_token else 1.0) / divide_by
    return total


def columns(groups, selections):
    advantages = [group.advantages_G for group in FastRL(**RUN).with_advantages(groups)]
    keep_N = np.concatenate([selection.keep_G for selection in selections])
    weight_N = np.concatenate([s.weight_G * a for s, a in zip(selections, advantages, strict=True)])
    tokens_N = np.array([len(tokens) for group in groups for tokens in group.tokens_G])
    return keep_N, weight_N, tokens_N


@pytest.mark.parametrize("per_token", [False, True], ids=["rows", "tokens"])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_agent_r1_88_dummy_rows_bias_nothing(num_ranks, per_token):
    for seed in range(12):
        groups = a_step(seed)
        selections = select(groups, FastRLConfig(align="dummy"))
        keep_N, weight_N, tokens_N = columns(groups, selections)
        alone = gradient(plan_for(1, keep_N, tokens_N), 1, weight_N, tokens_N, per_token)
        plans = plan_for(num_ranks, keep_N, tokens_N)
        dummies = sum(plan.rows(rank).count(DUMMY) for plan in plans for rank in range(num_ranks))
        assert (keep_N.sum() + dummies) % num_ranks == 0
        found = gradient(plans, num_ranks, weight_N, tokens_N, per_token)
        np.testing.assert_array_equal(found, alone)
        assert plans[0].denominators.rows == keep_N.sum(), "a row that fills up is no row of the mean"


def test_agent_r1_88_a_duplicate_in_place_of_a_dummy_is_seen():
    """The check fails for what the reports did: fill up with a copy of a row."""
    groups = a_step(0)
    selections = select(groups, FastRLConfig(align="dummy"))
    keep_N, weight_N, tokens_N = columns(groups, selections)
    alone = gradient(plan_for(1, keep_N, tokens_N), 1, weight_N, tokens_N, False)
    num_ranks = next(r for r in range(2, 9) if keep_N.sum() % r)
    plans = plan_for(num_ranks, keep_N, tokens_N)
    copied = int(np.flatnonzero(keep_N & (weight_N != 0))[0])
    for steps in plans[0].steps_R:
        for step in filter(None, steps):
            step[:] = [copied if row == DUMMY else row for row in step]
    assert not np.array_equal(gradient(plans, num_ranks, weight_N, tokens_N, False), alone)


@pytest.mark.parametrize("multiple", range(1, 9))
@pytest.mark.parametrize("pruner", PRUNERS)
def test_verl_5969_top_up_adds_the_documented_rows_and_counts_them(pruner, multiple):
    for seed in range(12):
        groups = FastRL(**RUN).with_advantages(a_step(seed))
        selections = select(groups, FastRLConfig(pruner=pruner, tau=1.0, keep_share=0.3))
        before = summarize(groups, selections)
        aligned, num_added = align_top_up(groups, selections, multiple)
        assert summarize(groups, selections) == before, "metrics are over what the pruner chose"
        added_P = [new.keep_G & ~old.keep_G for new, old in zip(aligned, selections, strict=True)]
        assert sum(added_G.sum() for added_G in added_P) == num_added < multiple
        for group, old, new, added_G in zip(groups, selections, aligned, added_P, strict=True):
            check_added(group, old, new, added_G)
        counts = [int(added_G.sum()) for added_G in added_P]
        left = [num_left(old, added_G) for old, added_G in zip(selections, added_P, strict=True)]
        total = sum(selection.num_kept for selection in aligned)
        assert total % multiple == 0 or not any(left), "short of the multiple only if nothing is left to add"
        # In turns: a prompt gives a second one only after every other has given one, or has none.
        assert all(n >= max(counts) - 1 for n, remaining in zip(counts, left, strict=True) if remaining)


def check_added(group: Group, old: Selection, new: Selection, added_G: np.ndarray) -> None:
    magnitude_G = np.abs(group.advantages_G)
    waiting_G = ~old.keep_G & group.scorable_G & (old.cluster_G >= 0) & ~added_G
    assert not (added_G & ~group.scorable_G).any()
    assert (new.weight_G[added_G] == 1.0).all()
    assert (new.weight_G[old.keep_G] == old.weight_G[old.keep_G]).all()
    if added_G.any() and waiting_G.any():
        assert magnitude_G[added_G].min() >= magnitude_G[waiting_G].max(), "the highest |A| comes first"


def num_left(old: Selection, added_G: np.ndarray) -> int:
    return int((~old.keep_G & (old.cluster_G >= 0) & ~added_G).sum())


def test_verl_omni_602_rows_that_fill_up_are_in_no_denominator():
    """A dummy is made of a real row: its tokens must not be counted a second time."""
    keep_N, tokens_N = np.array([True, True, True, False]), np.array([5, 7, 11, 13])
    for num_ranks in (2, 4):
        (plan,) = plan_for(num_ranks, keep_N, tokens_N)
        assert any(DUMMY in plan.rows(rank) for rank in range(num_ranks))
        assert (plan.denominators.rows, plan.denominators.tokens) == (3.0, 23.0)
        assert plan.denominators == denominators(
            "kept", tokens_N=tokens_N, live_N=keep_N, window=np.array([0, 1, 2]), num_windows=1
        )
    filler_R = fillers(keep_N, tokens_N, np.zeros(4, bool), owners(4, 2))
    assert all(tokens_N[filler] <= tokens_N[keep_N].max() for filler in filler_R), "and it costs the least"


# Rows that were moved (verl#2185)


@given(any_step(min_groups=2), st.sampled_from([*PRUNERS, "unbiased"]), st.booleans(), st.data())
def test_verl_2185_selection_follows_the_prompt_not_its_place(groups, pruner, has_twins, data):
    if has_twins:  # a prompt that stands twice in a batch: its groups are told apart by what is in them
        groups = [replace(group, prompt_id=f"q{p % 2}") for p, group in enumerate(groups)]
    order = data.draw(st.permutations(range(len(groups))))
    unbiased = {"representative": "random", "weighting": 1.0, "align": "dummy"}
    config = FastRLConfig(**(unbiased if pruner == "unbiased" else {"pruner": pruner}))
    moved = [groups[p] for p in order]
    assert fates(groups, select(groups, config)) == fates(moved, select(moved, config))


def fates(groups, selections):
    """What became of each group, in an order that depends on nothing but that."""
    return sorted(
        repr((g.prompt_id, list(g.tokens_G), g.rewards_G, s.keep_G, s.weight_G, s.cluster_G, s.reason))
        for g, s in zip(groups, selections, strict=True)
    )


@given(any_step(), st.data())
def test_verl_2185_advantages_follow_their_rollouts(groups, data):
    group = groups[0]
    order = data.draw(st.permutations(range(group.num_rollouts)))
    moved = Group(
        prompt_id=group.prompt_id,
        tokens_G=[group.tokens_G[i] for i in order],
        rewards_G=group.rewards_G[order],
    )
    straight, found = (FastRL(**RUN).with_advantages([g])[0].advantages_G for g in (group, moved))
    np.testing.assert_allclose(found, straight[order], atol=1e-12)


@given(rounds(), st.data())
def test_verl_2185_sorting_by_length_moves_numbers_not_contents(a_round, data):
    """Rows are permuted before they are planned; what each one is worth follows it through sort and balance."""
    a_round |= {"num_windows": 1, "num_steps": a_round["num_windows"] * a_round["num_steps"]}
    num_rows = len(a_round["keep_N"])
    ids_N = np.array(data.draw(st.permutations(range(num_rows))))
    moved = {key: value[ids_N] if key.endswith("_N") else value for key, value in a_round.items()}
    weight_N = np.where(a_round["keep_N"], 1.0 + np.arange(num_rows), 0.0)
    seen = {}
    for numbers_N, arguments in ((np.arange(num_rows), a_round), (ids_N, moved)):
        (plan,) = plan_round(**arguments, rng=np.random.default_rng(0))
        ranks = range(a_round["num_ranks"])
        rows = [row for rank in ranks for row in plan.rows(rank) if row != DUMMY]
        contents = {int(numbers_N[row]): float(weight_N[numbers_N][row]) for row in rows}
        assert len(contents) == len(rows)
        for rank in ranks:
            real = [row for row in plan.rows(rank) if row != DUMMY]
            assert (np.diff(arguments["length_N"][real]) <= 0).all(), "there was something to sort"
        seen[len(seen)] = (contents, plan.denominators)
    assert seen[0] == seen[1]
