"""Pruners against examples worked by hand: CPPO, PODS, log-det, leverage, and clusters with several survivors."""

import json
from pathlib import Path

import numpy as np
import pytest

from fastrl import FastRL, FastRLConfig, Group, select
from fastrl.bench.faithfulness import score_selection
from fastrl.pruners import MDAP, LeverageSampling, LogDet, MaxVariance, TopAdvantage
from fastrl.pruners.kernels import systematic

GRAMS = Path(__file__).parents[3] / "shared" / "data" / "gradient_gram" / "gemma3_270m.json"


def group(rewards, advantages=None, tokens=None, prompt_id="q", **more):
    return Group(
        prompt_id=prompt_id,
        tokens_G=tokens or [[i] for i in range(len(rewards))],
        rewards_G=np.array(rewards, dtype=float),
        advantages_G=None if advantages is None else np.array(advantages, dtype=float),
        **more,
    )


def rng(seed=0):
    return np.random.default_rng(seed)


# --- CPPO ---------------------------------------------------------------------------------------


def test_cppo_ranks_the_whole_batch():
    # |A| over both groups: 2.0, 1.5, 1.4 | 0.5, 0.4, 0.3, 0.2, 0.1; floor(8 * 0.4) = 3.
    groups = [group([0] * 4, [0.5, -1.5, 0.1, 0.2]), group([0] * 4, [2.0, -0.3, 0.4, -1.4], prompt_id="r")]
    kept = [s.keep_G.tolist() for s in TopAdvantage(keep_share=0.4)(groups, rng=rng())]
    assert kept == [[False, True, False, False], [True, False, False, True]]


def test_cppo_may_leave_a_group_without_rollouts_and_gives_no_weights():
    groups = [group([0] * 2, [0.1, -0.1]), group([0] * 2, [1.0, -1.0], prompt_id="r")]
    first, second = TopAdvantage(keep_share=0.5)(groups, rng=rng())
    assert not first.keep_G.any()
    assert second.weight_G.tolist() == [1.0, 1.0]


def test_cppo_keeps_the_floor_of_the_share_even_where_floats_fall_short():
    groups = [group([0] * 100, np.linspace(-1, 1, 100))]
    (chosen,) = TopAdvantage(keep_share=0.29)(groups, rng=rng())  # 0.29 * 100 = 28.999...
    assert chosen.num_kept == 29


def test_cppo_breaks_ties_at_random():
    groups = [group([1, 0], [1.0, -1.0], prompt_id=str(p)) for p in range(4)]
    kept = sum(
        np.concatenate([s.keep_G for s in TopAdvantage(keep_share=0.25)(groups, rng=rng(seed))])
        for seed in range(400)
    )
    assert (np.abs(kept - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all()


# --- PODS ---------------------------------------------------------------------------------------


def test_pods_takes_the_highest_and_the_lowest_rewards():
    # Of 0, 2, 3, 7, 8 the three of largest variance are 0, 7, 8 (38 / 3), and not 0, 2, 8 (34.7 / 3).
    (chosen,) = MaxVariance(keep_share=0.6)([group([3, 8, 0, 7, 2], [1, 1, -1, 1, -1])], rng=rng())
    assert np.flatnonzero(chosen.keep_G).tolist() == [1, 2, 3]


def test_pods_takes_half_and_half_of_binary_rewards_as_far_as_there_are_enough():
    for num_right, expected in ((4, 2), (6, 2), (1, 1), (7, 3)):
        rewards = [1.0] * num_right + [0.0] * (8 - num_right)
        (chosen,) = MaxVariance(keep_share=0.5)([group(rewards, np.array(rewards) - 0.5)], rng=rng())
        assert chosen.num_kept == 4
        assert sum(np.array(rewards)[chosen.keep_G]) == expected


def test_pods_normalises_advantages_over_what_it_keeps():
    (chosen,) = select(
        [group([1, 0, 0, 0, 0, 0, 0, 0])], FastRLConfig(pruner="max_variance", keep_share=0.25)
    )
    # Kept: the right one and one wrong one. Mean 1/2, Bessel-corrected deviation sqrt(1/2).
    assert chosen.advantages_G[chosen.keep_G] == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)])
    assert not chosen.advantages_G[~chosen.keep_G].any()


def test_pods_leaves_a_group_without_signal_alone():
    # The answers are all wrong; that shaped rewards vary teaches nothing.
    shaped = group([0.1, 0.2, 0.0, 0.3], outcomes_G=np.zeros(4))
    (chosen,) = select([shaped], FastRLConfig(pruner="max_variance"))
    assert chosen.advantages_G is None


# --- clusters with several survivors ------------------------------------------------------------


def test_two_survivors_of_a_cluster_share_its_weight():
    same = group([1] * 5 + [0], [0.4] * 5 + [-2.0], tokens=[[7]] * 5 + [[8]])
    pruner = MDAP(representative="random", per_cluster=2, weighting=1.0)
    (chosen,) = pruner([same], rng=rng())
    assert chosen.num_kept == 3
    assert sorted(chosen.weight_G[chosen.keep_G].tolist()) == [1.0, 2.5, 2.5]
    kept = np.flatnonzero(chosen.keep_G[:5])
    assert sorted(np.bincount(chosen.cluster_G[:5], minlength=6)[kept].tolist()) == [2, 3]


# --- kernels ------------------------------------------------------------------------------------


def test_logdet_prefers_a_new_direction_to_a_copy_of_a_larger_one():
    tokens = [[1, 2], [1, 2], [5, 6], [9, 9]]
    (chosen,) = LogDet(keep_share=0.75, tau=0.1)([group([0] * 4, [1.2, 1.2, 0.9, -1.0], tokens)], rng=rng())
    assert chosen.keep_G.tolist() == [True, False, True, True]
    assert chosen.cluster_G.tolist() == [0, 0, 2, 3]


def test_logdet_keeps_both_signs():
    (chosen,) = LogDet(keep_share=0.3)([group([0] * 4, [2.0, 1.9, 1.8, -0.1])], rng=rng())
    assert np.flatnonzero(chosen.keep_G).tolist() == [0, 3]


def test_matching_weights_make_one_of_two_copies_count_for_both():
    tokens = [[1, 2], [1, 2], [5, 6]]
    pruner = LogDet(keep_share=0.67, tau=1e-6, match_weights=True)
    (chosen,) = pruner([group([0] * 3, [1.0, 1.0, -1.0], tokens)], rng=rng())
    assert chosen.weight_G == pytest.approx([2.0, 0.0, 1.0], abs=1e-4)


def test_leverage_shares_the_probability_of_copies():
    tokens = [[1], [1], [2], [3]]
    pruner = LeverageSampling(keep_share=0.5, tau=0.01)
    drawn = [
        pruner([group([0] * 4, [1.0, 1.0, 1.0, -1.0], tokens)], rng=rng(s))[0].keep_G for s in range(600)
    ]
    often = np.mean(drawn, axis=0)
    assert often.sum() == pytest.approx(2.0)
    # A copy has half the leverage of a rollout of its own direction: 2 = 2 pi + 2 (2 pi).
    assert often == pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3], abs=5 * np.sqrt(0.25 / 600))


def test_systematic_sampling_has_the_probabilities_it_is_given():
    probabilities = np.array([1.0, 0.5, 0.2, 0.3])
    draws = [systematic(probabilities, rng(seed)) for seed in range(2000)]
    assert all(len(draw) == 2 and 0 in draw for draw in draws)
    often = np.bincount(np.concatenate(draws), minlength=4) / len(draws)
    assert often == pytest.approx(probabilities, abs=5 * np.sqrt(0.25 / len(draws)))


@pytest.mark.skipif(not GRAMS.exists(), reason="the shared gradients are not on this machine")
def test_logdet_on_real_gradients_is_closer_than_random_and_its_weights_bring_it_closer_still():
    """4 of 12 kept; rewards 1 for 2, 3, 4 or 6 of 12 plus noise, as in the data's README."""
    chance, scores = rng(), {"logdet": [], "matched": [], "random": [], "centred": []}
    entries = json.loads(GRAMS.read_text(encoding="utf-8"))
    for draw in range(720):
        entry = entries[draw % 3]
        gram_GG = np.array(entry["gram"])
        rewards = 0.1 * chance.random(12)
        rewards[chance.permutation(12)[: (2, 3, 4, 6)[draw // 3 % 4]]] += 1
        advantages = (rewards - rewards.mean()) / rewards.std()
        values, vectors = np.linalg.eigh(gram_GG)
        sketched = group(
            rewards, advantages, entry["completions"], sketch_G=vectors * np.sqrt(np.maximum(values, 0))
        )
        for name, options in (
            ("logdet", {"similarity": "gradient"}),
            ("matched", {"similarity": "gradient", "match_weights": True}),
            ("centred", {"similarity": "centred", "match_weights": True}),
        ):
            (chosen,) = LogDet(keep_share=1 / 3, tau=0.1, **options)([sketched], rng=chance)
            scores[name].append(score_selection(gram_GG, advantages, chosen.weight_G))
        random_weights = np.zeros(12)
        random_weights[chance.permutation(12)[:4]] = 1
        scores["random"].append(score_selection(gram_GG, advantages, random_weights))
    cosine = {name: float(np.mean([s.cosine for s in values])) for name, values in scores.items()}
    error = {name: float(np.mean([s.error for s in values])) for name, values in scores.items()}
    assert cosine["matched"] >= 0.83 > cosine["logdet"] > cosine["centred"] > cosine["random"] + 0.15
    assert error["matched"] < 0.53 < error["logdet"] < 0.56 < error["centred"] < error["random"]


def test_weights_of_an_uneven_budget_are_applied_once():
    run = FastRL(FastRLConfig(pruner="none", budget="per_prompt"), num_rollouts=8)
    groups = [group([1, 0]), group([1, 0, 0, 0, 1, 0], prompt_id="r")]
    plain = select(groups, run.config)
    factors = run.budget.weights(np.array([2, 6]))
    for selection, before, factor in zip(run.select(groups), plain, factors, strict=True):
        assert selection.weight_G == pytest.approx(before.weight_G * factor)
    assert factors[0] > 1.0 > factors[1]
