"""How many prompts a step samples: DAPO's dynamic sampling and CPPO's completion allocation, by hand."""

import numpy as np
import pytest

from fastrl import ConfigError, FastRL, FastRLConfig, Group
from fastrl.refill import drop_surplus, num_prompts_at_first, num_prompts_missing


def group(name, rewards):
    return Group(
        prompt_id=name, tokens_G=[[i] for i in range(len(rewards))], rewards_G=np.array(rewards, float)
    )


def test_cppo_samples_so_many_prompts_that_its_survivors_fill_the_batch():
    assert num_prompts_at_first("kept", 16, 0.5) == 32
    assert num_prompts_at_first("kept", 7, 0.7) == 10  # 7 / 0.7 is 10.000000000000002
    assert num_prompts_at_first("signal", 16, 0.5) == 16


@pytest.mark.parametrize(
    ("with_signal", "without", "expected"),
    [(8, 0, 0), (9, 3, 0), (4, 4, 8), (7, 1, 2), (0, 8, 8), (6, 2, 4)],
    ids=["enough", "more than enough", "half", "one missing", "none yet: a full batch", "a quarter missing"],
)
def test_dapo_samples_what_the_yield_so_far_asks_for(with_signal, without, expected):
    # ceil(1.25 * missing / share), at most a batch of 8: half missing of a yield of 1/2 -> 10 -> 8.
    assert num_prompts_missing("signal", 8, [True] * with_signal + [False] * without) == expected


@pytest.mark.parametrize("kind", ["none", "skipped", "kept"])
def test_others_look_at_no_reward(kind):
    assert num_prompts_missing(kind, 8, [False] * 8) == 0


def test_surplus_groups_and_those_without_signal_are_dropped_in_the_order_of_sampling():
    run = FastRL(FastRLConfig(refill="signal", budget="fixed"), num_rollouts=2)
    groups = [group("a", [1, 0]), group("b", [1, 1]), group("c", [0, 1]), group("d", [1, 0])]
    chosen = run.select(groups, num_prompts=2)
    assert [s.keep_G.any() for s in chosen] == [True, False, True, False]
    assert [s.reason for s in chosen] == ["mdap", "zero_variance", "mdap", "surplus"]


def test_without_any_signal_the_first_batch_stays():
    run = FastRL(FastRLConfig(refill="signal", budget="fixed"), num_rollouts=2)
    groups = run.with_advantages([group(name, [1, 1]) for name in "abc"])
    chosen = drop_surplus(groups, run.select(groups), 2)
    assert [s.keep_G.any() for s in chosen] == [True, True, False]


def test_dynamic_sampling_is_decided_by_outcomes():
    # DAPO on a shaped total keeps groups whose answers are all wrong.
    shaped = Group(prompt_id="a", tokens_G=[[1], [2]], rewards_G=np.array([0.5, 0.4]), outcomes_G=np.zeros(2))
    run = FastRL(FastRLConfig(refill="signal", budget="fixed"), num_rollouts=2)
    assert run.num_prompts_missing([shaped], 1) == 1


def test_completion_allocation_needs_cppos_ranking():
    with pytest.raises(ConfigError, match=r"refill: kept with pruner: mdap.*Set pruner: top_advantage"):
        FastRLConfig(refill="kept")
