"""`FastRL` around a run: signal, order, empty steps, metrics, saved state."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import ConfigError, FastRL, FastRLConfig, Group, NoSignalError, StateError, select, summarize

NAN = float("nan")


def group(prompt_id, rewards, tokens=None, **more):
    if tokens is None:
        tokens = [[10 * i, 10 * i + 1] for i in range(len(rewards))]  # nothing in common
    return Group(prompt_id=prompt_id, tokens_G=tokens, rewards_G=np.array(rewards, dtype=float), **more)


def new_run(config=None, **changes):
    return FastRL(config, **{"num_rollouts": 8, "total_steps": 20, "steps_per_epoch": 2, **changes})


@pytest.fixture(autouse=True)
def _short_stretches_count(request, monkeypatch):
    """Steps of these tests have few groups; the rule on their number has a test of its own."""
    if "64 groups" not in (request.function.__doc__ or ""):
        monkeypatch.setattr("fastrl.method._MIN_EMPTY_GROUPS", 1)


def plain(selections):
    return [(s.keep_G.tolist(), s.weight_G.tolist(), s.cluster_G.tolist(), s.reason) for s in selections]


# --- selection ----------------------------------------------------------------------------------


def test_a_hand_worked_group():
    # Class of the right answers: 0, 2, 3; 2 repeats 0, 3 shares one token in three. Class of the wrong ones: 1, 4.
    tokens = [[1, 2], [1, 2], [2, 1], [2, 9], [7]]
    (chosen,) = select([group("q", [1, 0, 1, 1, 0], tokens)], FastRLConfig(tau=0.6))
    assert chosen.keep_G.tolist() == [True, True, False, True, True]
    assert chosen.cluster_G.tolist() == [0, 1, 0, 3, 4]
    assert chosen.weight_G.tolist() == [1, 1, 0, 1, 1]
    assert chosen.reason == "mdap"


@pytest.mark.parametrize("pruner", ["none", "mdap", "advantage_only"])
def test_every_mixed_binary_group_up_to_eight_stays_whole_and_keeps_both_signs(pruner):
    # NeMo-RL PR 3469: a row-wise filter turned [1, 0, 0, 0] into rows of one sign.
    for size in range(1, 9):
        for rewards in itertools.product([0.0, 1.0], repeat=size):
            one = group("q", rewards, [[1]] * size)
            (chosen,) = select([one], FastRLConfig(pruner=pruner))
            assert chosen.keep_G.shape == chosen.weight_G.shape == chosen.cluster_G.shape == (size,)
            kept_rewards = set(one.rewards_G[chosen.keep_G].tolist())
            assert kept_rewards == set(rewards)


def test_survivors_keep_the_advantage_of_the_full_group():
    run = new_run()
    one = group("q", [1, 0, 0, 0], [[1]] * 4)
    (ready,) = run.with_advantages([one])
    (chosen,) = run.select([one])
    assert chosen.num_kept == 2
    assert ready.advantages_G.tolist() == [1.5, -0.5, -0.5, -0.5]
    assert one.advantages_G is None


def test_an_engines_own_advantages_decide_the_classes():
    one = group("q", [1, 0, 0, 1], [[1]] * 4, advantages_G=np.array([1.0, -1.0, -0.5, 1.0]))
    (chosen,) = select([one])
    assert chosen.keep_G.tolist() == [True, True, True, False]
    (ready,) = new_run().with_advantages([one])
    assert ready.advantages_G.tolist() == [1.0, -1.0, -0.5, 1.0]


def test_an_unscorable_rollout_has_advantage_zero_whatever_the_engine_says():
    one = group("q", [1, 0, NAN], advantages_G=np.array([1.0, -1.0, 3.0]))
    (ready,) = new_run().with_advantages([one])
    assert ready.advantages_G.tolist() == [1.0, -1.0, 0.0]


def test_a_nan_leaves_the_siblings_advantages_as_without_it():
    without, beside = new_run().with_advantages([group("a", [1, 0, 1]), group("b", [1, NAN, 0, 1])])
    assert np.delete(beside.advantages_G, 1).tolist() == without.advantages_G.tolist()
    assert beside.advantages_G[1] == 0.0


# --- zero variance and outcomes -----------------------------------------------------------------


ALL_WRONG_BUT_SHAPED = {"rewards": [0.1, 0.2, 0.3, 0.4], "outcomes_G": np.zeros(4)}


def test_an_all_wrong_group_has_no_signal_however_its_reward_was_shaped():
    # NeMo-RL#2431: length-shaped rewards kept all-wrong groups alive, and the policy died in 40 steps.
    one = group("q", **ALL_WRONG_BUT_SHAPED)
    (ready,) = new_run().with_advantages([one])
    assert ready.advantages_G.tolist() == [0.0] * 4
    (dropped,) = select([one], FastRLConfig(zero_variance="drop"))
    assert not dropped.keep_G.any()
    assert dropped.reason == "zero_variance"
    assert summarize([one], [dropped])["frac_zero_variance"] == 1.0


def test_an_all_wrong_group_loses_the_engines_advantages_too():
    one = group("q", **ALL_WRONG_BUT_SHAPED, advantages_G=np.array([-1.0, 0.0, 0.5, 0.5]))
    (ready,) = new_run().with_advantages([one])
    assert ready.advantages_G.tolist() == [0.0] * 4


def test_without_outcomes_the_total_reward_decides():
    one = group("q", ALL_WRONG_BUT_SHAPED["rewards"])
    (chosen,) = select([one], FastRLConfig(zero_variance="drop"))
    assert chosen.keep_G.all()


def test_varying_outcomes_keep_a_group_alive():
    one = group("q", [0.0, 1.0, 0.5], outcomes_G=np.array([0.0, 1.0, 0.0]))
    (chosen,) = select([one], FastRLConfig(zero_variance="drop"))
    assert chosen.keep_G.all()


@pytest.mark.parametrize(
    ("policy", "kept", "reason"),
    [("keep_one", [True, False, False], "mdap"), ("keep_all", [True] * 3, "zero_variance"),
     ("drop", [False] * 3, "zero_variance")],
)  # fmt: skip
def test_the_three_policies_for_a_zero_variance_group(policy, kept, reason):
    (chosen,) = select([group("q", [1, 1, 1], [[5]] * 3)], FastRLConfig(zero_variance=policy))
    assert chosen.keep_G.tolist() == kept
    assert chosen.reason == reason
    assert chosen.weight_G.tolist() == [float(k) for k in kept]


@pytest.mark.parametrize("policy", ["keep_one", "keep_all", "drop"])
def test_unscorable_rollouts_are_never_kept_under_any_policy(policy):
    groups = [group("a", [1, NAN, 1]), group("b", [NAN, NAN]), group("c", [0, NAN, 1])]
    for one, chosen in zip(groups, select(groups, FastRLConfig(zero_variance=policy)), strict=True):
        assert not chosen.keep_G[~one.scorable_G].any()
        assert (chosen.cluster_G[~one.scorable_G] == -1).all()


def test_a_wholly_unscorable_group_says_so():
    assert select([group("q", [NAN, NAN])])[0].reason == "unscorable"


# --- order --------------------------------------------------------------------------------------

RANDOM = FastRLConfig(representative="random", weighting=1.0, align="dummy", tau=1.0)


@st.composite
def steps_with_twins(draw):
    """Groups of ragged size under few ids, so that one prompt often occurs twice in a step."""
    groups = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 5))
        rewards = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=size, max_size=size))
        tokens = draw(st.lists(st.lists(st.integers(0, 2), max_size=2), min_size=size, max_size=size))
        groups.append(group(draw(st.sampled_from("ab")), rewards, tokens))
    return groups


@settings(max_examples=200)
@given(
    steps_with_twins(),
    st.randoms(use_true_random=False),
    st.sampled_from(["mdap", "advantage_only", "random"]),
)
def test_the_order_of_groups_decides_nothing(groups, chance, pruner):
    config = FastRLConfig(pruner=pruner, representative="random", tau=1.0)
    order = list(range(len(groups)))
    chance.shuffle(order)
    here = plain(select(groups, config))
    there = plain(select([groups[p] for p in order], config))
    # Groups that are equal in everything may swap their draws; all others keep theirs.
    key = [(g.prompt_id, g.tokens_G, g.rewards_G.tolist()) for g in groups]
    expected = sorted((key[p], here[p]) for p in order)
    assert sorted((key[p], there[at]) for at, p in enumerate(order)) == expected


def both_orders_agree(one, two, pruner):
    for seed in range(40):
        config = FastRLConfig(pruner=pruner, representative="random", seed=seed)
        first = plain(select([one, two], config))
        second = plain(select([two, one], config))[::-1]
        assert first == second, f"seed {seed}"


@pytest.mark.parametrize("pruner", ["mdap", "advantage_only", "random"])
def test_twins_that_differ_in_who_is_unscorable_are_not_ordered_by_arrival(pruner):
    # NaN compares with nothing, so a sort by rewards leaves these two as they came.
    tokens = [[5]] * 5
    both_orders_agree(group("q", [NAN, 1, 1, 1, 1], tokens), group("q", [0, 0, NAN, 0, 0], tokens), pruner)


@pytest.mark.parametrize("pruner", ["mdap", "advantage_only"])
def test_twins_that_differ_in_outcomes_only_are_not_ordered_by_arrival(pruner):
    tokens, rewards = [[5]] * 4, [0.0, 0.0, 1.0, 1.0]
    flat = group("q", rewards, tokens, outcomes_G=np.zeros(4))
    both_orders_agree(group("q", rewards, tokens), flat, pruner)


@pytest.mark.parametrize("pruner", ["mdap", "advantage_only"])
def test_twins_that_differ_in_the_engines_advantages_only_are_not_ordered_by_arrival(pruner):
    tokens, rewards = [[5]] * 4, [0.0, 0.0, 1.0, 1.0]
    one = group("q", rewards, tokens, advantages_G=np.array([-1.0, -1.0, 1.0, 1.0]))
    two = group("q", rewards, tokens, advantages_G=np.array([-1.0, 1.0, 1.0, 1.0]))
    both_orders_agree(one, two, pruner)


@pytest.mark.parametrize("pruner", ["mdap", "advantage_only", "random"])
def test_a_decision_depends_on_its_own_group_not_on_the_others_of_the_step(pruner):
    # Promise R2: (config, seed, step, group content). A rank that holds fewer groups decides the same for its own.
    one = group("b", [1.0] * 6, [[5]] * 6)
    companion = group("a", [0.0] * 6, [[5]] * 6)
    for seed in range(20):
        config = FastRLConfig(pruner=pruner, representative="random", seed=seed)
        alone = plain(select([one], config))[0]
        assert plain(select([companion, one], config))[1] == alone, f"seed {seed}"


def test_select_is_pure_and_changes_with_the_step_and_the_seed():
    groups = [group(f"q{p}", [1, 1, 1, 1, 0, 0, 0, 0], [[p]] * 8) for p in range(6)]
    run, twin, other = (
        new_run(RANDOM),
        new_run(RANDOM),
        new_run(FastRLConfig(**{**RANDOM.to_dict(), "seed": 1})),
    )
    first = plain(run.select(groups))
    assert plain(run.select(groups)) == first == plain(twin.select(groups))
    assert plain(other.select(groups)) != first
    run.observe(groups, run.select(groups))
    assert plain(run.select(groups)) != first


# --- the run ------------------------------------------------------------------------------------


def test_plan_and_observe_follow_the_budget():
    run = new_run(FastRLConfig(budget="fixed"))
    assert run.plan(["a", "b"]).tolist() == [8, 8]
    capped = new_run(FastRLConfig(max_rollouts=4))
    assert capped.plan(["a"]).tolist() == [4]


@pytest.mark.parametrize(
    ("config", "run", "parts"),
    [
        (FastRLConfig(), {"num_rollouts": 1}, ["1 rollouts", "min_rollouts: 2", "baseline", "sample more"]),
        (FastRLConfig(min_rollouts=4), {"num_rollouts": 3}, ["3 rollouts", "min_rollouts: 4"]),
        (
            FastRLConfig(max_rollouts=16),
            {},
            ["max_rollouts: 16", "8 rollouts", "memory", "lower max_rollouts"],
        ),
        (FastRLConfig(), {"total_steps": None}, ["ars", "total_steps", "None", "budget: fixed"]),
        (FastRLConfig(), {"steps_per_epoch": 0}, ["ars", "steps_per_epoch", "0", "budget: fixed"]),
    ],
)
def test_a_run_that_cannot_work_is_refused_at_the_start(config, run, parts):
    with pytest.raises(ConfigError) as caught:
        new_run(config, **run)
    for part in parts:
        assert part in str(caught.value)


def test_a_fixed_budget_needs_no_length_of_the_run():
    run = FastRL(FastRLConfig(budget="fixed"), num_rollouts=4)
    assert run.plan(["a"]).tolist() == [4]


def test_a_method_that_drops_nothing_divides_as_the_engine_does():
    assert new_run(FastRLConfig(pruner="none", budget="fixed")).denominator == "full"
    assert new_run(FastRLConfig()).denominator == "kept"
    assert new_run(FastRLConfig(denominator="live")).denominator == "live"


def end_step(run, groups):
    run.observe(groups, run.select(groups))


def test_a_step_without_signal_completes():
    run = new_run(FastRLConfig(zero_variance="drop"))
    end_step(run, [group("a", [1, 1]), group("b", [NAN, NAN]), group("c", [0.5])])
    assert run.step == 1
    assert run.metrics()["empty_steps"] == 1.0
    assert all(not np.isinf(value) for value in run.metrics().values())


def test_endless_steps_without_signal_stop_with_a_histogram_of_causes():
    # prime-rl PR 3015: every group died, the run span for ever and looked alive.
    run = new_run(FastRLConfig(max_empty_steps=3))
    step = [group("a", [1, 1]), group("b", [0, 0]), group("c", [0, 0]), group("d", [NAN, NAN])]
    end_step(run, step)
    end_step(run, step)
    with pytest.raises(NoSignalError) as caught:
        end_step(run, step)
    message = str(caught.value)
    for part in (
        "3 steps in a row",
        "max_empty_steps: 3",
        "6 all at 0",
        "3 all at 1",
        "3 unscorable",
        "reward",
    ):
        assert part in message


def test_one_group_with_signal_starts_the_count_again():
    run = new_run(FastRLConfig(max_empty_steps=2))
    for _ in range(4):
        end_step(run, [group("a", [1, 1])])
        assert run.metrics()["empty_steps"] == 1.0
        end_step(run, [group("a", [1, 1]), group("b", [1, 0])])
        assert run.metrics()["empty_steps"] == 0.0


def test_a_stretch_of_few_groups_is_no_reason_to_stop():
    """With one prompt per step, ten zero-variance steps are common: 64 groups are needed too."""
    run = new_run(FastRLConfig(max_empty_steps=10, budget="fixed"))
    groups = [group("q", [1, 1])]
    for _ in range(63):
        run.observe(groups, run.select(groups))
    with pytest.raises(NoSignalError, match="64 steps in a row"):
        run.observe(groups, run.select(groups))


def test_the_identity_never_stops():
    run = new_run(FastRLConfig(pruner="none", budget="fixed", max_empty_steps=1))
    groups = [group(str(i), [1, 1]) for i in range(100)]
    run.observe(groups, run.select(groups))
    assert run.empty_steps == 1


@pytest.mark.parametrize("change", [{"max_empty_steps": 99}, {"trace": True}], ids=lambda c: next(iter(c)))
def test_a_resume_may_change_what_decides_nothing(change):
    source = new_run()
    end_step(source, STEPS[0])
    resumed = new_run(FastRLConfig(**change))
    resumed.load_state_dict(source.state_dict())
    assert resumed.step == source.step


def test_the_histogram_is_of_the_last_stretch_only():
    run = new_run(FastRLConfig(max_empty_steps=2))
    end_step(run, [group("a", [1, 1])])
    end_step(run, [group("a", [1, 0])])
    end_step(run, [group("a", [0, 0])])
    with pytest.raises(NoSignalError, match=r"these steps: 2 all at 0\."):
        end_step(run, [group("a", [0, 0])])


def test_shaped_rewards_of_wrong_answers_are_no_signal_for_the_count():
    run = new_run(FastRLConfig(max_empty_steps=2))
    end_step(run, [group("q", **ALL_WRONG_BUT_SHAPED)])
    with pytest.raises(NoSignalError, match="2 all at 0"):
        end_step(run, [group("q", **ALL_WRONG_BUT_SHAPED)])


@pytest.mark.parametrize("rewards", [[0.5, 0.5], [0.5, NAN]], ids=["equal rewards", "one scorable rollout"])
def test_varying_outcomes_without_any_advantage_are_no_signal_either(rewards):
    # Every advantage is 0, so nothing is learnt: promise R10 holds whatever the outcome column says.
    run = new_run(FastRLConfig(max_empty_steps=1))
    one = group("q", rewards, outcomes_G=np.array([0.0, 1.0]))
    assert run.with_advantages([one])[0].advantages_G.tolist() == [0.0, 0.0]
    with pytest.raises(NoSignalError):
        end_step(run, [one])


# --- metrics ------------------------------------------------------------------------------------


def test_metrics_of_a_hand_worked_step():
    groups = [
        group("a", [1, 0, 0, 0], [[1, 2, 3], [4], [4], [4]]),  # keeps 0 and 1
        group("b", [1, 1], [[7, 8], [7, 8]]),  # zero variance, keeps 0
        group("c", [NAN, 0.0], [[9], []]),  # one scorable rollout, kept
    ]
    metrics = summarize(groups, select(groups))
    expected = {
        "num_rollouts/mean": 8 / 3, "num_rollouts/min": 2, "num_rollouts/max": 4,
        "kept/mean": 4 / 3, "kept/min": 1, "kept/max": 2, "kept/frac": 4 / 8,
        "kept/tokens_frac": (3 + 1 + 2 + 0) / (6 + 4 + 1),
        "frac_zero_variance": 2 / 3, "frac_unscorable": 1 / 8,
        "weight/max": 1, "weight/effective_size": 4,
        "advantage/abs_mean_all": 3 / 8, "advantage/abs_mean_kept": 2 / 4,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_weights_reduce_the_effective_size():
    groups = [group("a", [1, 1, 1, 1], [[5], [5], [5], [6]])]
    metrics = summarize(groups, select(groups, RANDOM))
    assert metrics["weight/max"] == 3.0
    assert metrics["weight/effective_size"] == pytest.approx((3 + 1) ** 2 / (9 + 1))


def test_the_similarity_metric_is_over_pairs_of_equal_advantage():
    run = new_run()
    end_step(run, [group("a", [1, 1, 0], [[1, 2], [2, 3], [1, 2]])])
    assert run.metrics()["similarity/mean_within_class"] == pytest.approx(1 / 3)


STEPS = [
    [group("a", [1, 0, 0, 1])],
    [group("a", [1, 1]), group("b", [0, 0])],
    [group("a", [NAN, NAN])],
    [group("a", [1.0], [[]])],
    [group("a", [0, 1], [[], []], outcomes_G=np.array([0.0, 1.0]))],
    [group("a", [0, 1], advantages_G=np.array([-1.0, 1.0])), group("a", [0, NAN, 0, 1, 0])],
]


@pytest.mark.parametrize("config", [FastRLConfig(), RANDOM, FastRLConfig(pruner="none", budget="fixed")])
def test_metric_keys_do_not_depend_on_data(config):
    # trl#7310: a metric that only one rank logged was a deadlock.
    keys = set()
    for groups in STEPS:
        run = new_run(config)
        end_step(run, groups)
        keys.add(tuple(run.metrics()))
        assert all(isinstance(value, float) for value in run.metrics().values())
    assert len(keys) == 1


def test_the_metrics_of_a_run_that_stops_for_lack_of_signal_are_complete():
    run, reference = new_run(FastRLConfig(max_empty_steps=1)), new_run()
    end_step(reference, STEPS[0])
    with pytest.raises(NoSignalError):
        end_step(run, [group("a", [1, 1])])
    assert run.metrics().keys() == reference.metrics().keys()
    assert run.metrics()["empty_steps"] == 1.0


# --- saved state --------------------------------------------------------------------------------


def test_state_survives_json_and_continues_the_run():
    run, resumed = new_run(RANDOM), new_run(RANDOM)
    for groups in STEPS[:3]:
        end_step(run, groups)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert resumed.step == run.step == 3
    for groups in STEPS * 2:
        assert resumed.plan(["a", "b"]).tolist() == run.plan(["a", "b"]).tolist()
        assert plain(resumed.select(groups)) == plain(run.select(groups))
        end_step(run, groups)
        end_step(resumed, groups)
        assert resumed.metrics() == pytest.approx(run.metrics(), nan_ok=True)
    assert resumed.state_dict() == run.state_dict()


def test_the_count_of_empty_steps_and_its_causes_survive_a_resume():
    run, resumed = (new_run(FastRLConfig(max_empty_steps=2)) for _ in range(2))
    end_step(run, [group("a", [1, 1])])
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    with pytest.raises(NoSignalError, match=r"2 steps in a row.*1 all at 1, 1 all at 0"):
        end_step(resumed, [group("a", [0, 0])])


def test_a_changed_configuration_lists_every_changed_key_with_both_values():
    state = new_run(FastRLConfig(tau=0.5, seed=3)).state_dict()
    with pytest.raises(StateError) as caught:
        new_run(FastRLConfig()).load_state_dict(state)
    message = str(caught.value)
    for part in ("tau (saved 0.5, now 0.8)", "seed (saved 3, now 0)", "restore these settings"):
        assert part in message
    assert "ngram" not in message


def test_a_state_of_another_version_names_both():
    state = {**new_run().state_dict(), "version": 99}
    with pytest.raises(StateError, match=r"version 99.*reads version 1"):
        new_run().load_state_dict(state)
    with pytest.raises(StateError, match="version None"):
        new_run().load_state_dict({})


@pytest.mark.parametrize("change", ["lost", "extra"])
def test_a_state_with_other_fields_is_refused(change):
    state = new_run().state_dict()
    if change == "lost":
        del state["empty_steps"]
    else:
        state["epoch"] = 3
    with pytest.raises(StateError, match=r"expected \['budget', 'config'"):
        new_run().load_state_dict(state)


def test_a_refused_state_leaves_the_run_as_it_was():
    run, source = new_run(), new_run()
    for groups in STEPS[:3]:
        end_step(source, groups)
    state = source.state_dict()
    del state["budget"]["current"]
    before = json.dumps(run.state_dict())
    with pytest.raises(StateError):
        run.load_state_dict(state)
    assert json.dumps(run.state_dict()) == before


@pytest.mark.parametrize(
    "change", [{"num_rollouts": 4}, {"total_steps": 40}, {"steps_per_epoch": 3}], ids=lambda c: next(iter(c))
)
def test_a_resume_into_a_run_of_another_shape_is_refused(change):
    # With the G of a run of 8 rollouts, a run of 4 would plan above the engine's own number.
    source = new_run()
    end_step(source, STEPS[0])
    with pytest.raises(StateError, match=next(iter(change))):
        new_run(**change).load_state_dict(source.state_dict())
