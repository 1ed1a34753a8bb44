"""ARS against a restatement of Eq. 10-14 in exact fractions, and its history against interruptions."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastrl import FastRL, FastRLConfig, Group, Selection
from fastrl.budgets import ARS


def step_of(kept_P, num_rollouts):
    """Groups and selections of a step in which prompt p retains kept_P[p] of its rollouts."""
    groups, selections = [], []
    for p, kept in enumerate(kept_P):
        keep_G = np.arange(num_rollouts) < kept
        groups.append(
            Group(prompt_id=str(p), tokens_G=[[0]] * num_rollouts, rewards_G=np.arange(num_rollouts) % 2)
        )
        selections.append(
            Selection(
                keep_G=keep_G,
                weight_G=keep_G.astype(float),
                cluster_G=np.where(keep_G, np.arange(num_rollouts), 0 if kept else -1),
                reason="test",
            )
        )
    return groups, selections


def restated(history, *, first, total_steps, steps_per_epoch):
    """The paper's G after each step of a history of retained counts: exact values before rounding."""
    values, reference = [], None
    current = Fraction(first)
    for t in range(1, len(history) + 1):
        if t % steps_per_epoch == 0:
            epoch = history[t - steps_per_epoch : t]
            mean = sum(Fraction(sum(kept), len(kept)) for kept in epoch) / len(epoch)
            largest = Fraction(sum(max(kept) for kept in epoch), len(epoch))
            if reference is None:
                reference = (mean + largest) / 2
            alpha = Fraction(min(t, total_steps), total_steps)
            current = first - max(0, reference - (alpha * mean + (1 - alpha) * largest))
        values.append(current)
    return values


def rounded(exact, *, first, floor=2):
    """The whole numbers that `exact` may round to: both neighbours of a tie, which floats cannot tell."""
    below = exact.numerator // exact.denominator
    nearest = (
        {below, below + 1} if abs(exact - below - Fraction(1, 2)) < Fraction(1, 10**9) else {round(exact)}
    )
    return {min(first, max(n, floor)) for n in nearest}


@st.composite
def histories(draw):
    first = draw(st.integers(2, 16))
    steps_per_epoch = draw(st.integers(1, 5))
    num_steps = draw(st.integers(1, 20))
    counts = st.lists(st.integers(0, first), min_size=1, max_size=6)
    history = draw(st.lists(counts, min_size=num_steps, max_size=num_steps))
    total_steps = draw(st.integers(max(1, num_steps - 3), num_steps + 10))
    return history, {"first": first, "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}


def budget_of(run):
    return ARS(
        num_rollouts=run["first"], total_steps=run["total_steps"], steps_per_epoch=run["steps_per_epoch"]
    )


@settings(max_examples=200)
@given(histories())
def test_ars_plans_what_the_formulas_say(example):
    history, run = example
    budget = budget_of(run)
    assert budget.plan(["a", "b"], 0).tolist() == [run["first"]] * 2
    for t, (kept_P, exact) in enumerate(zip(history, restated(history, **run), strict=True), start=1):
        budget.observe(*step_of(kept_P, run["first"]))
        counts = budget.plan(["a", "b", "c"], t)
        assert len(set(counts.tolist())) == 1
        assert int(counts[0]) in rounded(exact, first=run["first"])
        assert 2 <= counts[0] <= run["first"]


def test_ars_hand_worked_epochs():
    # Two prompts, two steps an epoch, four epochs; G_1 = 8.
    budget = ARS(num_rollouts=8, total_steps=8, steps_per_epoch=2)
    epochs = [
        # (mean, max) 4.5, 6.5: alpha 1/4, G' = 6, reference 5.5, delta 0
        ([[2, 6], [3, 7]], 8),
        # 3, 4: alpha 1/2, G' = 3.5, delta 2
        ([[2, 4], [2, 4]], 6),
        # 1, 1: G' = 1, delta 4.5, 8 - 4.5 = 3.5 goes to the even 4
        ([[1, 1], [1, 1]], 4),
        # 8, 8 at alpha 1: above the reference, so G returns to G_1 and not beyond
        ([[8, 8], [8, 8]], 8),
    ]
    for steps, after in epochs:
        before = int(budget.plan(["a"], 0)[0])
        budget.observe(*step_of(steps[0], 8))
        assert int(budget.plan(["a"], 0)[0]) == before
        budget.observe(*step_of(steps[1], 8))
        assert int(budget.plan(["a"], 0)[0]) == after
    assert budget.metrics()["budget/ars_reference"] == 5.5


def test_ars_never_goes_below_two_or_below_min_rollouts():
    for floor in (2, 3):
        budget = ARS(num_rollouts=8, min_rollouts=floor, total_steps=2, steps_per_epoch=1)
        budget.observe(*step_of([8, 8], 8))
        budget.observe(*step_of([0, 0], 8))
        assert int(budget.plan(["a"], 2)[0]) == floor


def test_the_reference_is_that_of_the_first_epoch_for_ever():
    budget = ARS(num_rollouts=8, total_steps=100, steps_per_epoch=1)
    for kept in ([4, 6], [1, 1], [8, 8]):
        budget.observe(*step_of(kept, 8))
        assert budget.metrics()["budget/ars_reference"] == 5.5


def test_ars_on_a_stationary_policy_holds_in_the_first_half_and_shrinks_in_the_second():
    # Documented weakness 3: with the same counts for ever, delta = (alpha - 1/2)(max - mean) > 0 after half time.
    total = 40
    budget = ARS(num_rollouts=8, total_steps=total, steps_per_epoch=2)
    planned = []
    for t in range(total):
        planned.append(int(budget.plan(["a"], t)[0]))
        budget.observe(*step_of([2, 2, 2, 8], 8))
    assert planned[: total // 2 + 2] == [8] * (total // 2 + 2)
    assert planned == sorted(planned, reverse=True)
    assert int(budget.plan(["a"], total)[0]) == 6  # 8 - (8 - 3.5) / 2 = 5.75
    assert planned[-1] < 8


def test_ars_on_equal_counts_never_moves():
    budget = ARS(num_rollouts=8, total_steps=10, steps_per_epoch=1)
    for t in range(10):
        budget.observe(*step_of([3, 3], 8))
        assert budget.plan(["a"], t).tolist() == [8]


@given(histories())
def test_an_incomplete_epoch_changes_no_plan(example):
    history, run = example
    budget = budget_of({**run, "steps_per_epoch": len(history) + 1})
    for t, kept_P in enumerate(history):
        budget.observe(*step_of(kept_P, run["first"]))
        assert budget.plan(["a"], t).tolist() == [run["first"]]


@settings(max_examples=60)
@given(histories(), st.data())
def test_a_save_and_load_at_any_step_is_invisible_to_the_next_plans(example, data):
    history, run = example
    at = data.draw(st.integers(0, len(history)))
    whole, resumed = budget_of(run), budget_of(run)
    for t, kept_P in enumerate(history):
        if t == at:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = budget_of(run)
            resumed.load_state_dict(state)
        assert whole.plan(["a"], t).tolist() == resumed.plan(["a"], t).tolist()
        for budget in (whole, resumed):
            budget.observe(*step_of(kept_P, run["first"]))
    assert whole.plan(["a"], len(history)).tolist() == resumed.plan(["a"], len(history)).tolist()


def test_a_saved_state_does_not_change_with_the_run_it_was_saved_from():
    budget = ARS(num_rollouts=8, total_steps=8, steps_per_epoch=4)
    budget.observe(*step_of([2, 6], 8))
    state = budget.state_dict()
    before = json.dumps(state)
    budget.observe(*step_of([1, 1], 8))
    assert json.dumps(state) == before


@pytest.mark.parametrize("missing", ["total_steps", "steps_per_epoch"])
def test_ars_without_the_length_of_the_run_says_what_to_do(missing):
    run = {"total_steps": 8, "steps_per_epoch": 2, missing: None}
    with pytest.raises(ValueError, match=rf"needs {missing} of at least 1, got None.*budget: fixed"):
        ARS(num_rollouts=8, **run)


class InterruptedRun(RuleBasedStateMachine):
    """One run that is never interrupted and one that is saved, killed and loaded at will."""

    def new(self):
        return FastRL(self.config, num_rollouts=6, total_steps=12, steps_per_epoch=3)

    @initialize(tau=st.sampled_from([0.3, 0.8]), representative=st.sampled_from(["first", "random"]))
    def start(self, tau, representative):
        self.config = FastRLConfig(tau=tau, representative=representative, seed=5, max_empty_steps=3)
        self.whole, self.resumed = self.new(), self.new()
        self.saved = None
        self.log = []
        self.num_steps = 0

    @rule(data=st.data())
    def step(self, data):
        counts = self.whole.plan(["a", "b"]).tolist()
        groups = []
        for p, count in enumerate(counts):
            rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=count, max_size=count))
            rewards[0], rewards[1] = 0.0, 1.0  # some signal, so that the run may go on
            response = st.lists(st.integers(0, 3), max_size=3)
            tokens = data.draw(st.lists(response, min_size=count, max_size=count))
            groups.append(Group(prompt_id="ab"[p], tokens_G=tokens, rewards_G=np.array(rewards)))
        self.log.append(groups)
        self.num_steps += 1
        for run in (self.whole, self.resumed):
            run.observe(groups, run.select(groups))

    @rule()
    def save(self):
        self.saved = (json.dumps(self.resumed.state_dict()), self.num_steps)

    @rule()
    @precondition(lambda self: self.saved is not None)
    def kill_and_load(self):
        """Lose everything since the last save; redo the same steps from it."""
        text, at = self.saved
        self.resumed = self.new()
        self.resumed.load_state_dict(json.loads(text))
        for groups in self.log[at:]:
            self.resumed.observe(groups, self.resumed.select(groups))

    @invariant()
    def the_next_decisions_are_the_same(self):
        if not hasattr(self, "whole"):
            return
        assert self.whole.plan(["a", "b"]).tolist() == self.resumed.plan(["a", "b"]).tolist()
        if self.log:
            for one, two in zip(
                self.whole.select(self.log[-1]), self.resumed.select(self.log[-1]), strict=True
            ):
                assert one.keep_G.tolist() == two.keep_G.tolist()
                assert one.cluster_G.tolist() == two.cluster_G.tolist()
        assert self.whole.state_dict() == self.resumed.state_dict()
        assert 2 <= self.whole.plan(["a"])[0] <= 6


TestInterruptedRun = InterruptedRun.TestCase
TestInterruptedRun.settings = settings(max_examples=30, stateful_step_count=25)
