"""What every budget promises. A new line in `BUDGETS` is covered without a new test."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group, StateError
from fastrl.budgets import BUDGETS

every_budget = pytest.mark.parametrize("name", sorted(BUDGETS))
IDS = ["a", "b", "c", "d"]
LOW, HIGH = 2, 8
SKIPPING = {"per_prompt", "greso"}
"""Budgets that plan 0 for prompts which they skip."""
SECONDS = {"generation": 3.0, "update": 2.0, "step": 6.0}


def new_budget(name):
    kind = BUDGETS[name]
    given = {**FastRLConfig().to_dict(), "total_steps": 40, "steps_per_epoch": 3}
    return kind(num_rollouts=HIGH, **{option: given[option] for option in kind.options})


def sampled(ids, counts, rewards_of):
    """The groups of a step: the rewards and a few distinct answers come from `rewards_of(prompt, rollout)`."""
    groups = []
    for p, (prompt_id, count) in enumerate(zip(ids, counts, strict=True)):
        if not count:  # skipped
            continue
        drawn = [rewards_of(p, i) for i in range(count)]
        groups.append(
            Group(
                prompt_id=prompt_id,
                tokens_G=[[i % 3, int(2 * r) if r == r else 9] for i, r in enumerate(drawn)],
                rewards_G=np.array(drawn, dtype=float),
            )
        )
    return groups


def end_step(budget, groups, seconds=None):
    """Observe what `select` is given: groups with advantages."""
    run = FastRL(FastRLConfig(budget="fixed", tau=0.3), num_rollouts=HIGH)
    budget.observe(run.with_advantages(groups), run.select(groups), seconds=seconds)


histories = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.5, float("nan")]), min_size=4, max_size=4),
    min_size=1,
    max_size=14,
)


@every_budget
@settings(max_examples=60)
@given(history=histories)
def test_its_counts_are_whole_numbers_within_the_bounds(name, history):
    budget = new_budget(name)
    for step, row in enumerate(history):
        counts = budget.plan(IDS, step)
        assert counts.shape == (len(IDS),)
        assert np.issubdtype(counts.dtype, np.integer)
        assert counts.max() <= HIGH
        sampled_ = counts[counts > 0] if name in SKIPPING else counts
        assert len(sampled_)
        assert sampled_.min() >= LOW
        end_step(budget, sampled(IDS, counts, lambda p, i, row=row: row[(p + i) % 4]))


@every_budget
def test_the_first_step_samples_what_the_engine_would(name):
    counts = new_budget(name).plan(IDS, 0)
    assert counts.sum() == HIGH * len(IDS)


@every_budget
def test_it_plans_for_any_number_of_prompts(name):
    budget = new_budget(name)
    for size in (0, 1, 7):
        assert len(budget.plan([f"new {i}" for i in range(size)], 0)) == size


@every_budget
@settings(max_examples=40)
@given(history=histories, repeats=st.integers(1, 3))
def test_planning_is_not_an_event(name, history, repeats):
    budget, twin = new_budget(name), new_budget(name)
    for step, row in enumerate(history):
        plans = [budget.plan(IDS, step).tolist() for _ in range(repeats)]
        counts = twin.plan(IDS, step)
        assert plans == [counts.tolist()] * repeats
        groups = sampled(IDS, counts, lambda p, i, row=row: row[(p + i) % 4])
        end_step(budget, groups)
        end_step(twin, groups)
    assert budget.state_dict() == twin.state_dict()


@every_budget
def test_a_plan_is_the_callers_to_change(name):
    budget = new_budget(name)
    before = budget.plan(IDS, 0).tolist()
    budget.plan(IDS, 0)[:] = -1
    assert budget.plan(IDS, 0).tolist() == before


@every_budget
@settings(max_examples=40)
@given(history=histories, data=st.data())
def test_a_save_and_load_at_any_step_is_invisible(name, history, data):
    at = data.draw(st.integers(0, len(history)))
    whole, resumed = new_budget(name), new_budget(name)
    for step, row in enumerate([*history, history[0]]):
        if step == at:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = new_budget(name)
            resumed.load_state_dict(state)
        counts = whole.plan(IDS, step)
        assert resumed.plan(IDS, step).tolist() == counts.tolist()
        groups = sampled(IDS, counts, lambda p, i, row=row: row[(p + i) % 4])
        for budget in (whole, resumed):
            end_step(budget, groups, SECONDS if step % 2 else None)
    assert resumed.metrics() == pytest.approx(whole.metrics(), nan_ok=True)


@every_budget
def test_the_order_of_the_groups_of_a_step_decides_nothing(name):
    budget, reverse = new_budget(name), new_budget(name)
    for step in range(9):
        counts = budget.plan(IDS, step)
        groups = sampled(IDS, counts, lambda p, i, step=step: float((p + i + step) % 3 == 0))
        run = FastRL(FastRLConfig(budget="fixed", tau=0.3), num_rollouts=HIGH)
        groups = run.with_advantages(groups)
        selections = run.select(groups)
        budget.observe(groups, selections)
        reverse.observe(groups[::-1], selections[::-1])
        assert reverse.plan(IDS, step + 1).tolist() == budget.plan(IDS, step + 1).tolist()


@every_budget
@settings(max_examples=30)
@given(history=histories, seed=st.integers(0, 99))
def test_nor_does_it_change_a_digit_of_the_state(name, history, seed):
    budget, shuffled = new_budget(name), new_budget(name)
    rng = np.random.default_rng(seed)
    for step, row in enumerate(history):
        groups = sampled(IDS, budget.plan(IDS, step), lambda p, i, row=row: row[(p + i) % 4])
        end_step(budget, groups, SECONDS)
        end_step(shuffled, [groups[p] for p in rng.permutation(len(groups))], SECONDS)
    assert json.dumps(shuffled.state_dict(), sort_keys=True) == json.dumps(
        budget.state_dict(), sort_keys=True
    )


@every_budget
@settings(max_examples=30)
@given(history=histories, seed=st.integers(0, 99))
def test_the_order_of_the_prompts_decides_nothing(name, history, seed):
    budget = new_budget(name)
    for step, row in enumerate(history):
        groups = sampled(IDS, budget.plan(IDS, step), lambda p, i, row=row: row[(p + i) % 4])
        end_step(budget, groups)
    ids = [*IDS, "new", "newer"]
    order = np.random.default_rng(seed).permutation(len(ids))
    counts = budget.plan(ids, len(history))
    assert budget.plan([ids[p] for p in order], len(history)).tolist() == counts[order].tolist()


@every_budget
def test_a_prompt_may_occur_twice_in_a_step(name):
    budget, ids = new_budget(name), ["a", "a", "b", "a"]
    for step in range(8):
        counts = budget.plan(ids, step)
        assert len(counts) == 4
        assert counts.max() <= HIGH
        assert counts.max() >= LOW
        end_step(budget, sampled(ids, counts, lambda p, i: float((p + i) % 3 == 0)))


@every_budget
def test_equal_groups_weigh_what_they_weigh_in_the_engine(name):
    budget = new_budget(name)
    assert budget.weights(np.full(5, HIGH)).tolist() == [1.0] * 5
    assert budget.weights(np.zeros(0, dtype=int)).shape == (0,)
    weights = budget.weights(np.array([2, 8, 4, 2]))
    assert (weights > 0).all()
    assert weights[0] == weights[3], "a weight is a matter of counts alone"


# ARS is the documented exception: a clock that shrinks G in the second half (tests/property/test_ars.py).
# GRESO tosses coins: its next test. per_prompt's evidence saturates, and fades for what it skips: it is stationary
# up to visits, so in its mean.
@pytest.mark.parametrize("name", sorted(set(BUDGETS) - {"ars", "greso", "per_prompt"}))
def test_a_stationary_policy_gets_a_stationary_plan(name):
    budget = new_budget(name)
    plans = []
    for step in range(160):  # discovery looks at 32 groups between two moves
        counts = budget.plan(IDS, step)
        plans.append(counts.tolist())
        # Prompts of different difficulty: none, a quarter, half and all of the rollouts are right.
        end_step(budget, sampled(IDS, counts, lambda p, i: float(i % 4 < (0, 1, 2, 4)[p])))
    assert plans[80:] == [plans[80]] * 80


@every_budget
@pytest.mark.parametrize("rewards", [0.0, 1.0, float("nan")], ids=["all wrong", "all right", "unscorable"])
def test_steps_without_signal_are_survived(name, rewards):
    budget = new_budget(name)
    for step in range(7):
        counts = budget.plan(IDS, step)
        end_step(budget, sampled(IDS, counts, lambda p, i: rewards))
    counts = budget.plan(IDS, 7)
    assert counts.max() <= HIGH
    assert counts.max() >= LOW
    assert name in SKIPPING or counts.min() >= LOW


@every_budget
def test_its_state_is_read_strictly(name):
    state = new_budget(name).state_dict()
    with pytest.raises(StateError, match=r"found the keys \[.*'from_the_future'"):
        new_budget(name).load_state_dict({**state, "from_the_future": 1})
    for key in state:
        lost = {k: v for k, v in state.items() if k != key}
        with pytest.raises(StateError, match=f"expected .*{key!r}"):
            new_budget(name).load_state_dict(lost)


@every_budget
def test_a_state_that_cannot_be_read_changes_nothing(name):
    written, budget = new_budget(name), new_budget(name)
    for step in range(4):
        groups = sampled(IDS, written.plan(IDS, step), lambda p, i: float((p + i) % 3 == 0))
        end_step(written, groups, SECONDS)
    before = json.dumps(budget.state_dict())
    for key in written.state_dict():
        with pytest.raises((StateError, ValueError, TypeError, AttributeError)):
            budget.load_state_dict({**written.state_dict(), key: "unreadable"})
        assert json.dumps(budget.state_dict()) == before


@every_budget
def test_its_metric_keys_do_not_depend_on_data(name):
    budget = new_budget(name)
    keys = list(budget.metrics())
    for step in range(7):
        end_step(budget, sampled(IDS, budget.plan(IDS, step), lambda p, i: float(i % 2)))
        assert list(budget.metrics()) == keys
        assert all(isinstance(value, float) for value in budget.metrics().values())
        assert all(key.startswith("budget/") for key in keys)


@every_budget
def test_its_name_is_a_choice_of_the_configuration(name):
    run = FastRL(FastRLConfig(budget=name), num_rollouts=HIGH, total_steps=40, steps_per_epoch=3)
    assert type(run.budget) is BUDGETS[name]
    assert run.plan(IDS).sum() == HIGH * len(IDS)


def test_skipping_budgets_settle_on_a_stationary_policy():
    for name in SKIPPING:
        budget = new_budget(name)
        counts = []
        for step in range(400):
            plan = budget.plan(IDS, step)
            counts.append(plan)
            end_step(budget, sampled(IDS, plan, lambda p, i: float(i % 4 < (0, 1, 2, 4)[p])))
        early, late = np.mean(counts[100:250], axis=0), np.mean(counts[250:], axis=0)
        # Prompts 1 and 2 have signal and are never skipped; 0 and 3 are visited now and then, equally often.
        assert (np.array(counts)[100:, 1:3] > 0).all()
        assert np.abs(early - late).max() < 1.0
        assert (late[[0, 3]] < late[1:3].min() / 2).all()
        assert (np.array(counts)[100:, [0, 3]] > 0).any(axis=0).all(), "a skipped prompt must come back"


@every_budget
@given(first=histories, second=histories)
@settings(max_examples=25)
def test_a_plan_knows_nothing_of_the_outcomes_of_its_own_round(name, first, second):
    # Two worlds with one past and different futures plan the same.
    one, two = new_budget(name), new_budget(name)
    for step, row in enumerate(first):
        counts = one.plan(IDS, step)
        groups = sampled(IDS, counts, lambda p, i, row=row: row[(p + i) % 4])
        end_step(one, groups)
        end_step(two, groups)
    step = len(first)
    counts = one.plan(IDS, step)
    end_step(one, sampled(IDS, counts, lambda p, i: second[0][(p + i) % 4]))
    assert two.plan(IDS, step).tolist() == counts.tolist()
