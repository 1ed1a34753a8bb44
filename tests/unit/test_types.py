"""Groups refuse what would poison a run, and name the prompt and the rollout."""

import dataclasses

import numpy as np
import pytest

from fastrl.types import (
    ConfigError,
    FastRLError,
    Group,
    GroupError,
    NoSignalError,
    Selection,
    StateError,
)


def group(**changes):
    return Group(
        **{"prompt_id": "geo-17", "tokens_G": [[1], [2]], "rewards_G": np.array([0.0, 1.0]), **changes}
    )


def test_a_group_turns_its_numbers_into_float64():
    made = group(rewards_G=[1, 0], advantages_G=np.array([1, -1], dtype=np.float32), outcomes_G=[True, False])
    for values in (made.rewards_G, made.advantages_G, made.outcomes_G):
        assert values.dtype == np.float64
    assert made.num_rollouts == 2


def test_a_reward_of_none_is_an_unscorable_rollout():
    made = group(rewards_G=[1.0, None])
    assert made.scorable_G.tolist() == [True, False]


def test_one_rollout_and_empty_responses_are_legal():
    assert group(tokens_G=[[]], rewards_G=[0.5]).num_rollouts == 1
    assert group(tokens_G=[[], []]).num_rollouts == 2


def test_a_group_without_rollouts_is_refused():
    with pytest.raises(GroupError, match=r"'geo-17'.*at least one rollout, got none.*Leave out prompts"):
        group(tokens_G=[], rewards_G=[])


@pytest.mark.parametrize("name", ["rewards_G", "advantages_G", "outcomes_G"])
@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0, 1.0], 1.0, [[1.0, 0.0]], []])
def test_one_value_per_rollout_nothing_is_broadcast(name, values):
    with pytest.raises(GroupError) as caught:
        group(**{name: values})
    message = str(caught.value)
    for part in ("'geo-17'", name, str(np.asarray(values).shape), "2 rollouts", "one reward per rollout"):
        assert part in message


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_an_infinite_reward_is_refused_with_its_prompt_rollout_and_value(bad):
    with pytest.raises(GroupError) as caught:
        group(rewards_G=[0.0, bad])
    for part in ("'geo-17'", "rollout 1", str(bad), "finite", "NaN"):
        assert part in str(caught.value)


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_an_infinite_outcome_is_refused_too(bad):
    # inf - 0 <= tolerance * inf would call the group zero-variance and silently drop its signal.
    with pytest.raises(GroupError, match="geo-17"):
        group(outcomes_G=[0.0, bad])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_advantage_is_refused_with_the_remedy(bad):
    with pytest.raises(GroupError, match=r"'geo-17'.*not all finite.*Give 0 for a rollout"):
        group(advantages_G=[0.0, bad])


def test_groups_and_selections_are_frozen_and_keyword_only():
    made = group()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.prompt_id = "other"
    chosen = Selection(keep_G=np.array([True]), weight_G=np.ones(1), cluster_G=np.zeros(1, int), reason="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.reason = "other"
    with pytest.raises(TypeError, match="positional"):
        Group("geo-17", [[1]], np.ones(1))


def test_num_kept_counts_before_any_weight():
    chosen = Selection(
        keep_G=np.array([True, False, True]),
        weight_G=np.array([2.0, 0.0, 1.0]),
        cluster_G=np.array([0, 0, 2]),
        reason="mdap",
    )
    assert chosen.num_kept == 2
    assert isinstance(chosen.num_kept, int)


@pytest.mark.parametrize("kind", [ConfigError, GroupError, NoSignalError, StateError])
def test_every_user_error_is_a_fastrl_error_and_a_value_error(kind):
    assert issubclass(kind, FastRLError)
    assert issubclass(kind, ValueError)
