"""Budgets against other ways to compute the same: extrapolation, dealing out, odds. By hand: test_budget_examples."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group
from fastrl.budgets import GRESO, Discovery, PerPrompt
from fastrl.budgets.per_prompt import signal_chances


def group(rewards, prompt_id="q"):
    rewards = np.array(rewards, dtype=float)
    return Group(prompt_id=prompt_id, tokens_G=[[i] for i in range(len(rewards))], rewards_G=rewards)


def observe(budget, groups, seconds=None, **settings_):
    run = FastRL(FastRLConfig(budget="fixed", **{"pruner": "none", **settings_}), num_rollouts=16)
    budget.observe(run.with_advantages(groups), run.select(groups), seconds=seconds)


# --- discovery ----------------------------------------------------------------------------------


def knowing(curve, ceiling=12):
    """A budget that has seen K(0 .. m) = curve."""
    budget = Discovery(num_rollouts=ceiling)
    budget._yield_sum[: len(curve)] = np.array(curve) * 32
    budget._yield_weight[: len(curve)] = 32.0
    return budget


@given(rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), m=st.integers(3, 10))
def test_the_extrapolation_is_a_lower_bound_where_clusters_are_classes(rates, m):
    # Two classes of one cluster: K(m) = 2 (1 - p^m - q^m), whatever the mixture of success rates p.
    exact = [np.mean([2 * (1 - p**i - (1 - p) ** i) for p in rates]) if i else 0.0 for i in range(m + 2)]
    extended = knowing(exact[: m + 1]).expected_yield()
    assert extended[: m + 1] == pytest.approx(exact[: m + 1])
    assert extended[m] - 1e-12 <= extended[m + 1] <= exact[m + 1] + 1e-12


def test_the_extrapolation_is_no_bound_where_classes_hold_many_clusters():
    # Ten clusters of 1/10, five in each class of 1/2: K(m) = 10 [1 - 0.9^m - (0.5^m - 0.4^m)].
    exact = [10 * (1 - 0.9**m - 0.5**m + 0.4**m) for m in range(5)]
    assert exact == pytest.approx([0, 0, 1.0, 2.1, 3.07])
    assert knowing(exact[:4]).expected_yield()[4] == pytest.approx(3.2)


def test_the_extrapolation_by_hand():
    # Increments 0, 1, 0.5: the next is 0.5 * 0.5.
    assert knowing([0, 0, 1, 1.5]).expected_yield()[4:6] == pytest.approx([1.75, 1.75]), "one step only"
    # Groups of two: the next increment is half of the only one.
    assert knowing([0, 0, 0.6]).expected_yield()[3] == pytest.approx(0.9)
    # Increments that grow are no reason to expect more growth.
    assert knowing([0, 0, 0.2, 0.6]).expected_yield()[4] == pytest.approx(1.0)
    assert knowing([0, 0, 0]).expected_yield()[3] == 0.0


def test_seconds_belong_to_the_step_before():
    budget = Discovery(num_rollouts=8)
    seconds = {"generation": 8.0, "update": 4.0, "step": 12.0}
    observe(budget, [group([0, 1] * 4)], seconds)
    assert budget.metrics()["budget/discovery_rollout_cost"] == 1.0, (
        "no step before: the seconds are nobody's"
    )
    # 8 s for the 8 rollouts sampled before, 4 s for the 8 trained on: twice as dear. The 2 of this step are not read.
    observe(budget, [group([0, 1])], seconds)
    assert budget.metrics()["budget/discovery_rollout_cost"] == pytest.approx(2.0)


def test_a_given_cost_makes_the_clock_irrelevant():
    one, two = (Discovery(num_rollouts=8, rollout_cost=0.5) for _ in range(2))
    for step in range(80):
        groups = [group([1] * (1 + (step + p) % 3) + [0] * 2, str(p)) for p in range(4)]
        observe(one, groups, None)
        observe(two, groups, {"generation": 1.0 + step, "update": 0.1, "step": 2.0 + step})
        assert one.plan(["a"], step).tolist() == two.plan(["a"], step).tolist()
    assert one.metrics() == two.metrics()


def test_it_waits_for_32_groups_between_two_moves():
    budget = Discovery(num_rollouts=8, rollout_cost=5.0)
    sizes = []
    for _ in range(20):
        current = int(budget.plan(["a"], 0)[0])
        sizes.append(current)
        observe(budget, [group(np.arange(current) % 2, str(p)) for p in range(8)], pruner="advantage_only")
    moves = np.flatnonzero(np.diff(sizes))
    assert len(moves) > 1
    assert np.diff(moves).min() >= 4
    assert set(np.diff(sizes)) <= {0, -1}


# --- per prompt ---------------------------------------------------------------------------------


def best_allocation(evidence, total, low, high):
    """The most that any allocation of `total` rollouts to prompts with these posteriors achieves, by trying all."""
    chances = [signal_chances(a, b, high) for a, b in evidence]
    allowed = (c for c in product(range(low, high + 1), repeat=len(evidence)) if sum(c) == total)
    return max(sum(chance[n] for chance, n in zip(chances, counts, strict=True)) for counts in allowed)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4), st.integers(2, 6))
def test_no_allocation_of_the_same_total_is_better(evidence, mean):
    budget = PerPrompt(num_rollouts=6, min_rollouts=2, initial_rollouts=mean)
    ids = [str(p) for p in range(len(evidence))]
    budget._evidence = {i: (float(s), float(f), 0) for i, (s, f) in zip(ids, evidence, strict=True)}
    posteriors = [(1.0 + s, 1.0 + f) for s, f in evidence]
    counts = budget.plan(ids, 0)
    assert counts.sum() == mean * len(ids)
    assert counts.min() >= 2, "with a success and a failure of six, none is hopeless"
    reached = sum(signal_chances(a, b, 6)[n] for (a, b), n in zip(posteriors, counts, strict=True))
    assert reached == pytest.approx(best_allocation(posteriors, mean * len(ids), 2, 6))


@given(a=st.floats(1.0, 50.0), b=st.floats(1.0, 50.0))
def test_the_chance_of_signal_is_that_of_the_integral_and_concave_from_two_on(a, b):
    chances = signal_chances(a, b, 12)
    assert (np.diff(chances[2:], 2) <= 1e-12).all()
    p = (np.arange(20000) + 0.5) / 20000
    log_density = (a - 1) * np.log(p) + (b - 1) * np.log(1 - p)
    density = np.exp(log_density - log_density.max())
    for n in (2, 5, 12):
        integral = ((1 - p**n - (1 - p) ** n) * density).sum() / density.sum()
        assert chances[n] == pytest.approx(integral, abs=1e-5)


def test_evidence_fades_by_a_fiftieth_per_step():
    budget = PerPrompt(num_rollouts=8)
    observe(budget, [group([1, 1, 1, 0], "a"), group([0, 1], "b")])
    assert budget._posterior("a") == pytest.approx((4.0, 2.0))
    for _ in range(2):
        observe(budget, [group([0, 1], "b")])
    assert budget._posterior("a") == pytest.approx((1 + 3 * 0.98**2, 1 + 0.98**2))
    observe(budget, [group([1, 0], "a")])
    assert budget._posterior("a") == pytest.approx((2 + 3 * 0.98**3, 2 + 0.98**3))


def test_equal_prompts_share_by_id_not_by_place():
    budget = PerPrompt(num_rollouts=8, min_rollouts=2, initial_rollouts=3)
    for prompt_id in "abc":
        budget._evidence[prompt_id] = (4.0, 4.0, 0)
    budget._evidence["d"] = (0.0, 90.0, 0)  # hopeless: its three go to the others
    assert budget.plan(["a", "b", "c", "d"], 0).tolist() == [4, 4, 4, 0]
    assert budget.plan(["a", "b", "d"], 0).tolist() == [5, 4, 0]
    assert budget.plan(["b", "d", "a"], 0).tolist() == [4, 0, 5]


def test_if_all_are_hopeless_the_most_promising_is_sampled():
    budget = PerPrompt(num_rollouts=8, min_rollouts=2, initial_rollouts=4)
    budget._evidence = {"a": (0.0, 200.0, 0), "b": (0.0, 100.0, 0)}
    assert budget.plan(["a", "b"], 0).tolist() == [0, 8]


# --- GRESO --------------------------------------------------------------------------------------


def test_greso_samples_as_often_as_its_odds_say():
    budget = GRESO(num_rollouts=8, seed=3)
    budget.streaks = {"once": ("easy", 1), "twice": ("hard", 2), "thrice": ("easy", 3)}
    budget.base = {"easy": 0.6, "hard": 0.4}
    ids, num = ["always", "once", "twice", "thrice"], 4000
    shares = np.mean([budget.plan(ids, step) > 0 for step in range(num)], axis=0)
    odds = np.array([1.0, 0.6, 0.4**2, 0.6**3])
    assert (np.abs(shares - odds) <= 4 * np.sqrt(odds * (1 - odds) / num)).all()


def test_greso_tosses_another_coin_for_another_seed_step_or_prompt():
    plans = {}
    for seed in (0, 1):
        budget = GRESO(num_rollouts=8, seed=seed)
        budget.streaks = {f"{p}": ("easy", 1) for p in range(64)}
        plans.update({(seed, step): tuple(budget.plan(list(budget.streaks), step)) for step in (0, 1)})
    assert len(set(plans.values())) == 4
    assert all(len(set(plan)) == 2 for plan in plans.values())


def test_grades_of_any_scale_are_right_above_their_middle():
    # Rewards of -1 and 3: (3, 3) is easy, (-1, -1) is hard.
    budget = GRESO(num_rollouts=8)
    observe(budget, [group([-1, 3], "mixed"), group([3, 3], "easy"), group([-1, -1], "hard")])
    assert budget.streaks == {"easy": ("easy", 1), "hard": ("hard", 1)}
