"""The yield curve of discovery against all subsets, under every pruner, with exact fractions."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group
from fastrl.advantages import is_zero_variance
from fastrl.budgets.discovery import useful_rollouts
from fastrl.pruners import PRUNERS

NAN = float("nan")


def selected(rewards, tokens, pruner, **settings_):
    """One group with its advantages, and what a pruner keeps of it."""
    group = Group(prompt_id="q", tokens_G=[[t, 7] for t in tokens], rewards_G=np.array(rewards, dtype=float))
    run = FastRL(FastRLConfig(budget="fixed", pruner=pruner, **settings_), num_rollouts=16)
    return run.with_advantages([group])[0], run.select([group])[0]


def of_all_subsets(group, selection, m):
    """Mean number of clusters that a subset hits; 0 for a subset that would have had zero variance.

    Restated from what training would do with the subset: neither classes nor binomials occur.
    """
    found = []
    for subset in combinations(range(group.num_rollouts), m):
        if is_zero_variance(group.rewards_G[list(subset)]):
            found.append(0)
        else:
            found.append(len({int(selection.cluster_G[i]) for i in subset} - {-1}))
    return Fraction(sum(found), len(found))


rollouts = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0, 1.0, NAN]), st.integers(0, 2)), min_size=1, max_size=7
)


@pytest.mark.parametrize("pruner", sorted(PRUNERS))
@settings(max_examples=60)
@given(drawn=rollouts)
def test_the_yield_is_that_of_all_subsets(pruner, drawn):
    group, selection = selected([r for r, _ in drawn], [t for _, t in drawn], pruner)
    curve = useful_rollouts(group, selection)
    assert curve.shape == (len(drawn) + 1,)
    for m in range(1, len(drawn) + 1):
        assert curve[m] == pytest.approx(float(of_all_subsets(group, selection, m)), abs=1e-12)


@settings(max_examples=60)
@given(drawn=rollouts, seed=st.integers(0, 99))
def test_the_order_of_the_rollouts_decides_nothing(drawn, seed):
    order = np.random.default_rng(seed).permutation(len(drawn))
    group, selection = selected([r for r, _ in drawn], [t for _, t in drawn], "none")
    other, of_other = selected([drawn[i][0] for i in order], [drawn[i][1] for i in order], "none")
    assert useful_rollouts(group, selection) == pytest.approx(useful_rollouts(other, of_other), abs=1e-12)


@given(drawn=rollouts)
def test_more_rollouts_never_yield_less_and_never_more_than_was_kept(drawn):
    group, selection = selected([r for r, _ in drawn], [t for _, t in drawn], "mdap", tau=0.3)
    curve = useful_rollouts(group, selection)
    assert curve[:2].tolist() == [0.0, 0.0]
    assert (np.diff(curve) >= -1e-12).all()
    assert curve[-1] == pytest.approx(selection.num_kept if group.advantages_G.any() else 0)


@pytest.mark.parametrize(
    ("rewards", "curve"),
    [
        # Three copies of one answer, one of another: 3 of 6 pairs and 3 of 4 triples are mixed, and hit both.
        ([1, 1, 1, 0], [0, 0, 1, 1.5, 2]),
        # 4 of 6 pairs are mixed, and every triple.
        ([1, 1, 0, 0], [0, 0, 4 / 3, 2, 2]),
        # All classes differ: every pair is useful, and a rollout more is one more.
        ([0, 0.5, 1], [0, 0, 2, 3]),
        # An unscorable one is no company: 2 of 6 pairs are mixed, and 3 of 4 triples - not (right, right, nothing).
        ([1, 1, 0, NAN], [0, 0, 2 / 3, 1.5, 2]),
        ([1, 1, 1], [0, 0, 0, 0]),
        ([NAN, NAN], [0, 0, 0]),
    ],
)
def test_examples_by_hand(rewards, curve):
    # One answer per class.
    group, selection = selected(rewards, [0] * len(rewards), "advantage_only", representative="random")
    assert useful_rollouts(group, selection) == pytest.approx(curve)


def test_a_survivor_that_stands_for_several_classes():
    # One survivor for all four: every mixed subset hits it, once. 4 of 6 pairs are mixed, all triples, and all four.
    group, selection = selected([1, 1, 0, 0], [0] * 4, "random", keep_share=0.25)
    assert selection.num_kept == 1
    assert useful_rollouts(group, selection) == pytest.approx([0, 0, 2 / 3, 1, 1])


def test_a_large_group_loses_no_digits():
    rewards = np.arange(256) % 2
    group, selection = selected(rewards, [0] * 256, "advantage_only", representative="random")
    curve = useful_rollouts(group, selection)
    # Two classes of 128: K(2) = 2 * 128 * 128 / C(256, 2).
    assert curve[2] == pytest.approx(2 * 128 * 128 / (256 * 255 / 2), rel=1e-12)
    assert curve[-1] == 2.0
