"""Budgets against examples worked by hand: rarefaction, discovery's moves, dealt-out rollouts, GRESO's coins."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group
from fastrl.budgets import GRESO, Discovery, PerPrompt
from fastrl.budgets.base import equal_prompt_weights
from fastrl.budgets.discovery import useful_rollouts
from fastrl.budgets.per_prompt import signal_chances
from fastrl.pruners import keep_none


def group(rewards, tokens=None, prompt_id="q"):
    rewards = np.array(rewards, dtype=float)
    return Group(
        prompt_id=prompt_id, tokens_G=tokens or [[i] for i in range(len(rewards))], rewards_G=rewards
    )


def selected(groups, **settings_):
    run = FastRL(FastRLConfig(budget="fixed", **{"tau": 0.5, **settings_}), num_rollouts=16)
    return run.with_advantages(groups), run.select(groups)


# --- discovery ----------------------------------------------------------------------------------


def enumerated(group_, selection, m):
    """Mean over all m-subsets of the clusters that are hit, 0 where the subset is one class."""
    found = []
    for subset in combinations(range(group_.num_rollouts), m):
        rewards = {group_.rewards_G[i] for i in subset if group_.scorable_G[i]}
        clusters = {selection.cluster_G[i] for i in subset if selection.cluster_G[i] >= 0}
        is_pure = len(rewards) < 2 and len(subset) == sum(group_.scorable_G[i] for i in subset)
        found.append(0 if is_pure else len(clusters))
    return np.mean(found)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2)), min_size=2, max_size=7),
)
def test_the_yield_is_that_of_all_subsets(drawn):
    groups, selections = selected([group([r for r, _ in drawn], [[t] for _, t in drawn])])
    curve = useful_rollouts(groups[0], selections[0])
    if not np.any(groups[0].advantages_G):
        assert not curve.any()
        return
    for m in range(1, len(drawn) + 1):
        assert curve[m] == pytest.approx(enumerated(groups[0], selections[0], m))


def test_the_yield_of_three_right_copies_and_a_wrong_one():
    # m = 2: of 6 pairs 3 are mixed and hit both clusters. m = 3: 3 of 4 triples are mixed.
    groups, selections = selected([group([1, 1, 1, 0], [[1], [1], [1], [2]])])
    assert useful_rollouts(groups[0], selections[0]) == pytest.approx([0, 0, 1.0, 1.5, 2.0])


def test_surplus_groups_say_nothing_about_the_yield():
    groups, selections = selected([group([1, 0, 0, 0], prompt_id="a"), group([1, 0, 0, 0], prompt_id="b")])
    alone, beside = Discovery(num_rollouts=4), Discovery(num_rollouts=4)
    alone.observe(groups[:1], selections[:1])
    beside.observe(groups, [selections[0], keep_none(groups[1], reason="surplus")])
    assert beside.expected_yield().tolist() == alone.expected_yield().tolist()


def run_discovery(budget, chance_right, steps, *, distinct=1, seed=0):
    """Observe `steps` steps of 16 prompts whose rollouts are right with a chance, in `distinct` wordings."""
    rng, counts = np.random.default_rng(seed), []
    for step in range(steps):
        planned = budget.plan(["q"] * 16, step)
        counts.append(int(planned[0]))
        groups = []
        for p, count in enumerate(planned):
            rewards = (rng.random(count) < chance_right).astype(float)
            groups.append(group(rewards, [[int(w)] for w in rng.integers(distinct, size=count)], f"q{p}"))
        budget.observe(*selected(groups))
    return counts


def test_discovery_shrinks_to_few_rollouts_where_more_say_the_same():
    # p = 1/2 and one wording: K(m) = 2 (1 - 2^(1 - m)); K(m) / (m + K(m)) is highest at m = 2: 1/3, then 3/9.
    budget = Discovery(num_rollouts=8, rollout_cost=1.0)
    assert run_discovery(budget, 0.5, 40)[-1] <= 4


def test_discovery_grows_back_up_to_the_ceiling_when_rollouts_differ_again():
    budget = Discovery(num_rollouts=8, min_rollouts=3, initial_rollouts=3, rollout_cost=5.0)
    grown = run_discovery(budget, 0.15, 60, distinct=50)
    assert grown[0] == 3
    assert grown[-1] >= 7
    assert max(abs(np.diff(grown))) == 1, "one step at a time"
    assert run_discovery(budget, 0.5, 60)[-1] <= 5


def test_discovery_minds_the_price_of_a_rollout():
    cheap, dear = (Discovery(num_rollouts=8, rollout_cost=cost) for cost in (0.02, 5.0))
    assert run_discovery(cheap, 0.2, 60)[-1] > run_discovery(dear, 0.2, 60)[-1]


def test_discovery_measures_the_price_from_the_steps_it_belongs_to():
    budget = Discovery(num_rollouts=8)
    rng = np.random.default_rng(0)
    before = None
    for _ in range(30):
        sizes = rng.integers(2, 9, size=4)
        groups = [group((np.arange(n) % 2).astype(float), prompt_id=str(p)) for p, n in enumerate(sizes)]
        groups, selections = selected(groups)
        kept = sum(s.num_kept for s in selections)
        seconds = None
        if before is not None:  # 1 s + 0.3 s per rollout sampled; 0.5 s + 0.1 s per rollout trained on
            generation, update = 1.0 + 0.3 * before[0], 0.5 + 0.1 * before[1]
            seconds = {"generation": generation, "update": update, "step": generation + update + 2.0}
        budget.observe(groups, selections, seconds=seconds)
        before = sizes.sum(), kept
    price, rest = budget._costs.prices()
    assert price == pytest.approx(3.0, rel=1e-6)
    assert rest == pytest.approx((1.0 + 0.5 + 2.0) / 4 / 0.1, rel=1e-6)


# --- weights of uneven groups -------------------------------------------------------------------


def test_every_prompt_counts_the_same_at_the_scale_of_full_groups():
    # Sum of a prompt's weights times the shrinkage (G - 1) / G of its baseline: the same for all prompts.
    counts = np.array([2, 4, 8, 6])
    total = equal_prompt_weights(counts, 8) * counts * (counts - 1) / counts
    assert total == pytest.approx(np.full(4, 5.0 * 7 / 8))
    assert equal_prompt_weights(np.array([8, 8]), 8).tolist() == [1.0, 1.0]


# --- per prompt ---------------------------------------------------------------------------------


def test_the_chance_of_signal_under_a_posterior():
    # Uniform p: E[p^n] = 1 / (n + 1), so U(n) = 1 - 2 / (n + 1).
    assert signal_chances(1.0, 1.0, 4) == pytest.approx([0, 0, 1 / 3, 1 / 2, 3 / 5])


def test_rollouts_go_where_signal_is_likely_and_the_total_stays():
    budget = PerPrompt(num_rollouts=8, min_rollouts=2, initial_rollouts=4)
    ids = ["even", "solved", "hopeless", "rare"]
    right = {"even": 4, "solved": 8, "hopeless": 0, "rare": 1}
    for _ in range(6):
        groups = [group([1] * right[i] + [0] * (8 - right[i]), prompt_id=i) for i in ids]
        budget.observe(*selected(groups))
    counts = dict(zip(ids, budget.plan(ids, 6).tolist(), strict=True))
    assert counts["solved"] == counts["hopeless"] == 0
    assert counts["even"] >= 2
    assert counts["rare"] == 8, "its groups gain most from more rollouts"
    assert sum(counts.values()) == 16
    assert budget.plan(["new"] * 4, 6).tolist() == [4] * 4


def test_a_skipped_prompt_is_visited_again_in_time():
    budget = PerPrompt(num_rollouts=8, min_rollouts=2, initial_rollouts=4)
    for _ in range(6):
        budget.observe(*selected([group([0] * 8, prompt_id="a"), group([0, 1] * 4, prompt_id="b")]))
    assert budget.plan(["a", "b"], 6)[0] == 0
    for step in range(300):
        budget.observe(*selected([group([0, 1] * 4, prompt_id="b")]))
        if budget.plan(["a", "b"], 6 + step)[0]:
            return
    pytest.fail("the evidence never faded")


# --- GRESO --------------------------------------------------------------------------------------


def test_greso_skips_with_the_power_of_the_streak():
    budget = GRESO(num_rollouts=8)
    for visits in range(1, 4):
        budget.observe(*selected([group([1, 1], prompt_id="easy"), group([0, 1], prompt_id="mixed")]))
        # After each step half of the groups were easy (target 8.3 %): p_easy falls by 0.01.
        assert budget.base["easy"] == pytest.approx(0.5 - 0.01 * visits)
        assert budget.base["hard"] == pytest.approx(0.5 + 0.01 * visits)
        assert budget.visit_chance("easy") == pytest.approx((0.5 - 0.01 * visits) ** visits)
        assert budget.visit_chance("mixed") == budget.visit_chance("never seen") == 1.0
    budget.observe(*selected([group([0, 1], prompt_id="easy")]))
    assert budget.visit_chance("easy") == 1.0, "signal ends the streak"


def test_greso_never_quite_gives_a_prompt_up():
    budget = GRESO(num_rollouts=8)
    for _ in range(40):
        budget.observe(*selected([group([0, 0], prompt_id="hard"), group([0, 1], prompt_id="mixed")]))
    assert budget.visit_chance("hard") == 0.01
    plans = np.array([budget.plan(["hard", "mixed"], step) for step in range(2000)])
    assert (plans[:, 1] == 8).all()
    assert 0.001 < (plans[:, 0] > 0).mean() < 0.03


def test_a_streak_of_the_other_kind_begins_anew():
    budget = GRESO(num_rollouts=8)
    mixed = group([0, 1], prompt_id="mixed")
    for rewards in ([0, 0], [0, 0], [1, 1]):
        budget.observe(*selected([group(rewards, prompt_id="q"), mixed]))
    assert budget.streaks["q"] == ("easy", 1)
