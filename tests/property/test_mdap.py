"""MDAP against a restatement of its formulas with sets and exact fractions.

Nothing below calls a helper of the package: the expected answer is written down from Eq. 4-9 of
the paper and from the documented departures (classes compare with their first member, nearest
leader, one n-gram for a short response).
"""

from fractions import Fraction
from math import isnan, sqrt

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastrl import FastRLConfig, Group, select
from fastrl.pruners import MDAP

NAN = float("nan")
TOL = Fraction(1, 10_000)
TAUS = ("0", "0.1", "0.2", "0.25", "0.4", "0.5", "0.6", "0.75", "0.8", "0.9", "1")


# --- the formulas, restated ---------------------------------------------------------------------


def grams(tokens, n):
    if not tokens:
        return set()
    if len(tokens) < n:
        return {tuple(tokens)}
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def distance(a, b):
    """Eq. 7; two empty sets are equal."""
    return Fraction(0) if not a | b else 1 - Fraction(len(a & b), len(a | b))


def variance(rewards):
    mean = sum(rewards) / len(rewards)
    return sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)


def classes_of(rewards, tol=TOL):
    """Eq. 4 without a square root: |A_i - A_j| < tol is (r_i - r_j)^2 < tol^2 var(r).

    Rewards so close to the tolerance that float64 cannot decide are not examples.
    """
    exact = {i: Fraction(r) for i, r in enumerate(rewards) if not isnan(r)}
    values = list(exact.values())
    if not values:
        return []
    span, scale = max(values) - min(values), max(1, *map(abs, values))
    assume(abs(span / scale - Fraction(1, 10**6)) > Fraction(1, 10**9))
    if len(values) < 2 or span <= Fraction(1, 10**6) * scale:
        return [list(exact)]
    bound = tol**2 * max(variance(values), Fraction(1, 10**12))
    classes = []
    for i, r in exact.items():
        for members in classes:
            gap = (r - exact[members[0]]) ** 2
            assume(abs(gap / bound - 1) > Fraction(1, 10**6))
            if gap < bound:
                members.append(i)
                break
        else:
            classes.append([i])
    return classes


def clusters_of(tokens, rewards, *, tau, n, compare):
    """The whole method: {leader: members}, leaders kept by the greedy walk of Eq. 8."""
    sets = [grams(t, n) for t in tokens]
    clusters = {}
    for members in classes_of(rewards):
        kept = []
        for i in members:
            rivals = kept if compare == "kept" else kept[:1]
            if all(distance(sets[i], sets[j]) >= tau for j in rivals):
                kept.append(i)
        for leader in kept:
            clusters[leader] = [leader]
        for i in members:
            if i not in kept:
                nearest = min(kept, key=lambda j: (distance(sets[i], sets[j]), kept.index(j)))
                clusters[nearest].append(i)
    return {leader: sorted(members) for leader, members in clusters.items()}


# --- random groups ------------------------------------------------------------------------------

BINARY = st.sampled_from([0.0, 1.0])
SHAPED = st.sampled_from([0.0, 0.5, 1.0, 1.5])
CONTINUOUS = st.one_of(
    st.floats(-2, 2, allow_nan=False),
    # Neighbours a few tenths of the tolerance apart: classes that could chain.
    st.integers(0, 60).map(lambda k: 1.0 + k * 1e-5),
)


@st.composite
def raw_groups(draw):
    size = draw(st.integers(1, 16))
    kind = draw(st.sampled_from([BINARY, SHAPED, CONTINUOUS]))
    rewards = draw(st.lists(st.one_of(kind, kind, kind, st.just(NAN)), min_size=size, max_size=size))
    alphabet = draw(st.sampled_from([2, 4, 9]))
    response = st.lists(st.integers(0, alphabet), max_size=8)
    pool = draw(st.lists(response, min_size=1, max_size=6))  # a pool, so that duplicates are common
    tokens = draw(st.lists(st.one_of(response, st.sampled_from(pool)), min_size=size, max_size=size))
    return tokens, rewards


options = st.fixed_dictionaries(
    {"tau": st.sampled_from(TAUS), "n": st.integers(1, 3), "compare": st.sampled_from(["kept", "seed"])}
)


def run(tokens, rewards, *, tau, n, compare, seed=0, **settings_):
    config = FastRLConfig(tau=float(tau), ngram=n, compare=compare, **settings_)
    group = Group(prompt_id="q", tokens_G=tokens, rewards_G=np.array(rewards))
    (selection,) = select([group], config, rng=np.random.default_rng(seed))
    return selection


def partition(cluster_G):
    """{representative: members} of a selection."""
    found = {}
    for i, representative in enumerate(cluster_G.tolist()):
        if representative != -1:
            found.setdefault(representative, []).append(i)
    return found


# --- the tests ----------------------------------------------------------------------------------


@settings(max_examples=400)
@given(raw_groups(), options)
def test_mdap_keeps_exactly_what_the_formulas_keep(raw, option):
    tokens, rewards = raw
    expected = clusters_of(tokens, rewards, **{**option, "tau": Fraction(option["tau"])})
    selection = run(tokens, rewards, **option)
    assert np.flatnonzero(selection.keep_G).tolist() == sorted(expected)
    assert partition(selection.cluster_G) == expected
    assert selection.weight_G.tolist() == [1.0 if i in expected else 0.0 for i in range(len(tokens))]


@settings(max_examples=200)
@given(raw_groups(), options)
def test_every_pruned_rollout_is_within_tau_of_a_kept_one_of_its_own_class(raw, option):
    tokens, rewards = raw
    home = {i: k for k, members in enumerate(classes_of(rewards)) for i in members}
    selection = run(tokens, rewards, **option)
    for i, r in enumerate(rewards):
        leader = int(selection.cluster_G[i])
        if isnan(r):
            assert leader == -1
            assert not selection.keep_G[i]
        elif selection.keep_G[i]:
            assert leader == i
        else:
            assert selection.keep_G[leader]
            assert home[leader] == home[i]
            a, b = grams(tokens[i], option["n"]), grams(tokens[leader], option["n"])
            assert distance(a, b) < Fraction(option["tau"])


@settings(max_examples=100)
@given(raw_groups(), st.integers(1, 3), st.sampled_from(["kept", "seed"]))
def test_tau_zero_keeps_every_scorable_rollout(raw, n, compare):
    tokens, rewards = raw
    selection = run(tokens, rewards, tau="0", n=n, compare=compare)
    assert selection.keep_G.tolist() == [not isnan(r) for r in rewards]


@settings(max_examples=100)
@given(raw_groups(), st.integers(1, 3))
def test_tau_one_keeps_only_rollouts_that_share_no_ngram(raw, n):
    tokens, rewards = raw
    selection = run(tokens, rewards, tau="1", n=n, compare="kept")
    for members in classes_of(rewards):
        kept = [grams(tokens[i], n) for i in members if selection.keep_G[i]]
        assert kept
        assert all(distance(a, b) == 1 for k, a in enumerate(kept) for b in kept[:k])


@settings(max_examples=200)
@given(raw_groups(), options, st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_random_representative_is_a_member_of_the_same_clusters(raw, option, seed, weighting):
    tokens, rewards = raw
    expected = clusters_of(tokens, rewards, **{**option, "tau": Fraction(option["tau"])})
    selection = run(
        tokens, rewards, **option, seed=seed, representative="random", weighting=weighting, align="dummy"
    )
    found = partition(selection.cluster_G)
    assert sorted(found.values()) == sorted(expected.values())
    assert np.flatnonzero(selection.keep_G).tolist() == sorted(found)
    for representative, members in found.items():
        assert representative in members
        weight = {0.0: 1.0, 0.5: sqrt(len(members)), 1.0: float(len(members))}[weighting]
        assert selection.weight_G[representative] == pytest.approx(weight, rel=1e-12)
    assert selection.weight_G[~selection.keep_G].tolist() == [0.0] * int((~selection.keep_G).sum())


@settings(max_examples=100)
@given(raw_groups(), options, st.sampled_from([0.0, 0.5, 1.0]))
def test_the_first_rollout_of_a_cluster_can_carry_its_weight(raw, option, weighting):
    # Not a configuration that users can ask for, but the class's own documented option.
    tokens, rewards = raw
    expected = clusters_of(tokens, rewards, **{**option, "tau": Fraction(option["tau"])})
    values = [r for r in rewards if not isnan(r)]
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    flat = len(values) < 2 or max(values) - min(values) <= 1e-6 * max(1.0, *map(abs, values))
    mean = 0.0 if flat else sum(values) / len(values)
    advantages = [0.0 if flat or isnan(r) else (r - mean) / max(spread, 1e-6) for r in rewards]
    group = Group(
        prompt_id="q", tokens_G=tokens, rewards_G=np.array(rewards), advantages_G=np.array(advantages)
    )
    pruner = MDAP(tau=float(option["tau"]), ngram=option["n"], compare=option["compare"], weighting=weighting)
    (selection,) = pruner([group], rng=np.random.default_rng(0))
    weights = [len(expected[i]) ** weighting if i in expected else 0.0 for i in range(len(tokens))]
    assert selection.weight_G == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("union", range(1, 41))
def test_a_distance_of_exactly_tau_is_kept_and_a_hair_below_is_pruned(union):
    for shared in range(union):
        # |a & b| = shared, |a | b| = union: the second response holds the shared tokens and the rest.
        tokens = [list(range(shared + 1)), [*range(shared), *range(shared + 1, union)]]
        exact = distance(grams(tokens[0], 1), grams(tokens[1], 1))
        assert exact == 1 - Fraction(shared, union)
        tie = run(tokens, [1.0, 1.0], tau=float(exact), n=1, compare="kept")
        assert tie.keep_G.tolist() == [True, True]
        if exact < 1:
            above = run(tokens, [1.0, 1.0], tau=float(exact) + 1e-9, n=1, compare="kept")
            assert above.keep_G.tolist() == [True, False]


@pytest.mark.parametrize("tenths", range(11))
def test_a_decimal_tau_means_the_decimal_not_its_binary_neighbour(tenths):
    tokens = [list(range(10)), list(range(10 - tenths))]  # distance tenths / 10
    selection = run(tokens, [0.0, 0.0], tau=str(tenths / 10), n=1, compare="kept")
    assert selection.keep_G.tolist() == [True, True]


def test_compare_seed_keeps_what_compare_kept_prunes():
    # 2 is far from 0 but equal to 1: the released script, which looks at the first only, keeps it.
    tokens = [[1, 2], [3, 4], [3, 4]]
    kept = run(tokens, [1.0, 1.0, 1.0], tau="0.8", n=1, compare="kept")
    seed = run(tokens, [1.0, 1.0, 1.0], tau="0.8", n=1, compare="seed")
    assert kept.keep_G.tolist() == [True, True, False]
    assert seed.keep_G.tolist() == [True, True, True]


def test_a_pruned_rollout_joins_its_nearest_leader_not_the_first_that_is_near_enough():
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8], [4, 5, 6, 7]]  # distances of the last: 6/7 and 2/5
    selection = run(tokens, [1.0, 1.0, 1.0], tau="0.9", n=1, compare="kept")
    assert selection.keep_G.tolist() == [True, True, False]
    assert selection.cluster_G.tolist() == [0, 1, 1]


def test_random_representatives_are_drawn_evenly():
    draws = 4000
    counts = np.zeros(4)
    for seed in range(draws):
        selection = run(
            [[7]] * 4, [1.0] * 4, tau="0.8", n=1, compare="kept", seed=seed, representative="random"
        )
        counts += selection.keep_G
    assert counts.sum() == draws
    # Five standard deviations of a binomial with p = 1/4; the seeds are fixed, so this is no lottery.
    assert np.abs(counts - draws / 4).max() < 5 * sqrt(draws * 0.25 * 0.75)
