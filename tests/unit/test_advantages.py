"""Advantages over full groups: hand-worked values, rounding noise, unscorable rollouts, classes."""

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastrl.advantages import advantage_classes, group_advantages, is_zero_variance

NAN = float("nan")


def test_hand_worked_advantages():
    # Mean 1/4, variance (9/16 + 3/16) / 3 = 1/4.
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0])).tolist() == [1.5, -0.5, -0.5, -0.5]
    # Mean 1, deviations -1 0 1, standard deviation 1.
    assert group_advantages(np.array([0.5, 1.5, 1.0])) == pytest.approx([-1.0, 1.0, 0.0])
    assert group_advantages(np.array([1.0, 0.0])) == pytest.approx([sqrt(0.5), -sqrt(0.5)])


def test_without_scaling_the_advantage_is_the_centred_reward():
    assert group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), scale=False).tolist() == [
        0.75,
        -0.25,
        -0.25,
        -0.25,
    ]


reward = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0, 1.5, NAN]),
    st.floats(-1e6, 1e6, allow_nan=False),
    st.floats(0.35, 0.3500001),
)


@given(st.lists(reward, min_size=1, max_size=16))
def test_advantages_are_finite_centred_and_bounded_by_the_group_size(rewards):
    advantages = group_advantages(np.array(rewards))
    assert np.isfinite(advantages).all()
    assert np.abs(advantages).max() <= sqrt(max(len(rewards) - 1, 0)) * (1 + 1e-9)
    assert abs(advantages.sum()) <= 1e-6
    assert (advantages[np.isnan(rewards)] == 0).all()


@given(st.lists(reward, min_size=2, max_size=16))
def test_advantages_have_unit_spread_or_are_all_exactly_zero(rewards):
    rewards = np.array(rewards)
    advantages = group_advantages(rewards)[~np.isnan(rewards)]
    if is_zero_variance(rewards):
        assert (advantages == 0.0).all()
    else:
        # Below 1 only where the floor under the standard deviation is at work.
        spread = advantages.std(ddof=1)
        assert spread == pytest.approx(1.0, rel=1e-6) or rewards[~np.isnan(rewards)].std(ddof=1) < 1e-6


@given(st.lists(reward, min_size=1, max_size=12), st.integers(0, 12))
def test_an_unscorable_rollout_changes_no_siblings_advantage(rewards, at):
    rewards = np.array(rewards)
    with_nan = np.insert(rewards, min(at, len(rewards)), NAN)
    alone = group_advantages(rewards)
    beside = np.delete(group_advantages(with_nan), min(at, len(rewards)))
    assert beside.tolist() == alone.tolist()


@pytest.mark.parametrize("value", [0.35, 0.4, 0.1, 1.5, 100.3, -7.7])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_rewards_equal_up_to_float32_noise_give_exactly_zero(value, size):
    # One ulp up and down, as sums of weighted rewards in another order leave them.
    exact = np.float32(value)
    noise = np.array([exact, np.nextafter(exact, np.float32(200)), np.nextafter(exact, np.float32(-200))])
    rewards = np.resize(noise, size)
    assert rewards.std() > 0  # the test that is not enough
    assert is_zero_variance(rewards)
    assert group_advantages(rewards).tolist() == [0.0] * size


def test_the_smallest_real_difference_is_still_a_signal():
    assert not is_zero_variance(np.array([0.5, 0.5 + 1e-5]))
    assert group_advantages(np.array([0.5, 0.5 + 1e-5])) == pytest.approx([-sqrt(0.5), sqrt(0.5)])


@pytest.mark.parametrize("rewards", [[1.0], [NAN], [NAN, NAN], [1.0, NAN], [0.0, 0.0, NAN], [1.0] * 8])
def test_groups_with_nothing_to_compare_have_zero_variance_and_zero_advantages(rewards):
    assert is_zero_variance(np.array(rewards))
    assert group_advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)


def test_advantages_leave_their_input_alone():
    rewards = np.array([1, 0, 0], dtype=np.int64)
    group_advantages(rewards)
    assert rewards.tolist() == [1, 0, 0]


def classes(advantages, tol=1e-4, scorable=None):
    advantages = np.array(advantages)
    return advantage_classes(
        advantages, np.ones(len(advantages), bool) if scorable is None else np.array(scorable), tol
    )


def test_classes_are_in_order_of_first_appearance():
    assert classes([1.0, -1.0, 1.0, 0.0, -1.0]) == [[0, 2], [1, 4], [3]]


def test_a_difference_of_exactly_the_tolerance_separates():
    assert classes([0.0, 0.25], tol=0.25) == [[0], [1]]
    assert classes([0.0, 0.1875], tol=0.25) == [[0, 1]]


def test_small_steps_do_not_chain_into_one_class():
    assert classes([0.0, 0.75, 1.5, 2.25], tol=1.0) == [[0, 1], [2, 3]]


def test_unscorable_rollouts_belong_to_no_class():
    assert classes([0.0, 0.0, 0.0], scorable=[True, False, True]) == [[0, 2]]
    assert classes([0.0, 0.0], scorable=[False, False]) == []


@given(st.lists(st.floats(-3, 3), max_size=16), st.sampled_from([1e-4, 0.1, 1.0]))
def test_classes_partition_the_group_and_are_narrow(advantages, tol):
    found = classes(advantages, tol=tol)
    assert sorted(i for members in found for i in members) == list(range(len(advantages)))
    for members in found:
        assert members == sorted(members)
        assert all(abs(advantages[i] - advantages[members[0]]) < tol for i in members)
    firsts = [members[0] for members in found]
    assert firsts == sorted(firsts)
