"""Rows between ranks: equal work everywhere, images where they must be, each row moved once and only if it must."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastrl.batching import DUMMY, fillers, moves, owners, plan_round, round_up_counts, rows_per_update


@given(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 6))
def test_counts_are_raised_to_a_multiple_fewest_first(maximum, counts, num_ranks):
    counts_P = np.minimum(counts, maximum)
    if len(counts_P) * maximum % num_ranks:
        return  # the engine refuses such a batch
    raised = round_up_counts(counts_P, num_ranks, maximum)
    assert raised.sum() % num_ranks == 0
    assert 0 <= (raised - counts_P).sum() < num_ranks
    assert (raised >= counts_P).all()
    assert raised.max() <= maximum
    grown = raised > counts_P
    if grown.any():
        assert counts_P[grown].min() == counts_P.min()
        assert raised[grown].max() <= raised[~grown].min() + 1 if (~grown).any() else True


def test_counts_that_fit_stay_as_they_are():
    assert round_up_counts(np.array([3, 5]), 4, 8).tolist() == [3, 5]
    assert round_up_counts(np.array([3, 4, 4]), 2, 8).tolist() == [4, 4, 4]


@given(num_rows=st.integers(0, 300), num_updates=st.integers(1, 8), multiple=st.integers(1, 8))
def test_the_fewest_rows_per_update_that_take_all_in_that_many_updates(num_rows, num_updates, multiple):
    rows = rows_per_update(num_rows, num_updates, multiple=multiple)
    assert rows % multiple == 0
    assert rows * num_updates >= num_rows
    assert rows == multiple or (rows - multiple) * num_updates < num_rows


def random_round(rng, num_ranks):
    num_windows, num_steps, size = (int(rng.integers(1, 4)) for _ in range(3))
    num_rows = num_ranks * num_windows * num_steps * size
    share_kept, share_images = rng.choice([0.0, 0.2, 0.6, 1.0]), rng.choice([0.0, 0.1, 0.5, 1.0])
    tokens_N = rng.integers(1, 30, num_rows)
    return {
        "keep_N": rng.random(num_rows) < share_kept,
        "tokens_N": tokens_N,
        "length_N": tokens_N + rng.integers(1, 20, num_rows),
        "live_N": np.ones(num_rows, bool),
        "image_N": rng.random(num_rows) < share_images,
        "num_windows": num_windows,
        "num_steps": num_steps,
        "size": size,
        "num_ranks": num_ranks,
    }


@pytest.mark.parametrize("shrink", [False, True], ids=["repack", "shrink"])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_a_thousand_rounds_keep_the_ranks_in_step(num_ranks, shrink):
    for seed in range(70):
        example = random_round(np.random.default_rng([num_ranks, seed]), num_ranks)
        plans = plan_round(**example, shrink=shrink, denominator="kept", rng=np.random.default_rng([seed]))
        check_ranks(plans, example)


def check_ranks(plans, example):
    keep_N, image_N, num_ranks = example["keep_N"], example["image_N"], example["num_ranks"]
    filler_R = fillers(keep_N, example["length_N"], image_N, owners(len(keep_N), num_ranks))
    trained = []
    for plan in plans:
        for step_R in zip(*plan.steps_R, strict=True):
            assert len({None if step is None else len(step) for step in step_R}) == 1, "unequal rows"
            if step_R[0] is None:
                continue
            trained += [row for step in step_R for row in step if row != DUMMY]
            real_R = [
                [filler_R[rank] if row == DUMMY else row for row in step] for rank, step in enumerate(step_R)
            ]
            assert len({bool(image_N[rows].any()) for rows in real_R}) == 1, "an image on some ranks only"
        assert plan.steps_R[0][-1] is not None, "the last micro-step of a window is real"
    assert sorted(trained) == np.flatnonzero(keep_N).tolist(), "each kept row is trained on exactly once"
    check_moves(plans, filler_R, owners(len(keep_N), num_ranks))


def check_moves(plans, filler_R, owner_N):
    moving = moves(plans, filler_R, owner_N)
    for target, filler in enumerate(filler_R):
        needed = {filler if row == DUMMY else row for plan in plans for row in plan.rows(target)}
        arriving = [row for source in moving for row in source[target]]
        assert len(arriving) == len(set(arriving)), "a row is sent twice to the same rank"
        at_home = {row for row in needed if owner_N[row] == target}
        assert at_home | set(arriving) == needed, "a row is missing, or moves without need"
        assert not at_home & set(arriving)


def test_a_dummy_has_an_image_where_a_kept_row_has_one():
    keep_N = np.array([True, False, False, False])
    length_N = np.array([9, 1, 5, 2])
    image_N = np.array([True, False, True, False])
    assert fillers(keep_N, length_N, image_N, owners(4, 2)) == [0, 2]
    assert fillers(keep_N, length_N, np.zeros(4, bool), owners(4, 2)) == [1, 3], "the shortest of its own"
    only_rank_0 = np.array([True, False, False, False])
    assert fillers(keep_N, length_N, only_rank_0, owners(4, 2)) == [0, 0], "a rank without images is sent one"
    assert fillers(np.array([False, True, False, False]), length_N, image_N, owners(4, 2)) == [1, 3], (
        "none has one"
    )
    assert moves([], [0, 0], owners(4, 2)) == [[[], []], [[], []]], "but only if it needs a dummy"


def test_shrink_uses_every_micro_step_with_fewer_rows():
    example = {
        "keep_N": np.arange(16) < 6, "tokens_N": np.ones(16, int), "length_N": np.ones(16, int),
        "live_N": np.ones(16, bool), "num_windows": 1, "num_steps": 4, "size": 4, "num_ranks": 1,
    }  # fmt: skip

    def sizes(shrink):
        (plan,) = plan_round(**example, shrink=shrink, denominator="kept", rng=np.random.default_rng(0))
        return [step and len(step) for step in plan.steps_R[0]]

    assert sizes(False) == [None, None, 3, 3]
    assert sizes(True) == [2, 2, 1, 1]
