"""What every pruner promises. A new line in `PRUNERS` is covered without a new test."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRLConfig, Group, select
from fastrl.method import make_pruner
from fastrl.pruners import PRUNERS

NAN = float("nan")
every_pruner = pytest.mark.parametrize("name", sorted(PRUNERS))
BATCH_WIDE = {"top_advantage"}
"""CPPO ranks the rollouts of all groups together, so a group may lose all (tests/unit/test_pruner_examples.py)."""
IN_EXPECTATION = {"leverage"}
"""Horvitz-Thompson weights sum to G in expectation only; the test of the mean weight covers them."""
unbiased_pruners = pytest.mark.parametrize(
    "name", [name for name in sorted(PRUNERS) if "weighting" in PRUNERS[name].options]
)


def configs(name, **more):
    """The published options and a few others that the pruner takes."""
    variants = [
        {}, {"tau": 0.0}, {"tau": 0.4, "ngram": 2}, {"tau": 1.0, "compare": "seed"},
        {"representative": "random"}, {"per_cluster": 2}, {"similarity": "centred", "tau": 0.6},
        {"match_weights": True}, {"keep_share": 0.25}, {"keep_share": 1.0}, {"advantage_tol": 0.5},
    ]  # fmt: skip
    taken = [options for options in variants if set(options) <= set(PRUNERS[name].options)]
    return [FastRLConfig(pruner=name, **{**options, **more}) for options in taken]


@st.composite
def steps(draw):
    """Groups with frozen advantages, as every pruner is given them: ragged, tied, empty, unscorable."""
    groups = []
    for p in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 9))
        kind = draw(
            st.sampled_from([st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.5]), st.floats(-1, 1)])
        )
        rewards = np.array(draw(st.lists(st.one_of(kind, kind, st.just(NAN)), min_size=size, max_size=size)))
        tokens = draw(st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=size, max_size=size))
        centred = np.nan_to_num(rewards - (np.nanmean(rewards) if not np.isnan(rewards).all() else 0.0))
        groups.append(Group(prompt_id=f"q{p}", tokens_G=tokens, rewards_G=rewards, advantages_G=centred))
    return groups


def prune(config, groups, seed=0):
    return make_pruner(config)(groups, rng=np.random.default_rng(seed))


def plain(selections):
    return [(s.keep_G.tolist(), s.weight_G.tolist(), s.cluster_G.tolist(), s.reason) for s in selections]


@every_pruner
def test_its_options_are_settings_and_its_defaults_are_theirs(name):
    settings_ = {field.name: field.default for field in dataclasses.fields(FastRLConfig)}
    assert set(PRUNERS[name].options) <= set(settings_)
    fields = {field.name: field.default for field in dataclasses.fields(PRUNERS[name])}
    assert fields == {option: settings_[option] for option in PRUNERS[name].options}


@every_pruner
def test_its_name_is_a_choice_of_the_configuration(name):
    assert FastRLConfig(pruner=name).pruner == name
    assert type(make_pruner(FastRLConfig(pruner=name))) is PRUNERS[name]


@every_pruner
@settings(max_examples=60)
@given(groups=steps())
def test_it_answers_once_per_group_with_arrays_of_the_groups_size(name, groups):
    for config in configs(name):
        selections = prune(config, groups)
        assert len(selections) == len(groups)
        for group, chosen in zip(groups, selections, strict=True):
            for array, kind in ((chosen.keep_G, "b"), (chosen.weight_G, "f"), (chosen.cluster_G, "i")):
                assert array.shape == (group.num_rollouts,)
                assert array.dtype.kind == kind
            assert chosen.reason


@every_pruner
@settings(max_examples=60)
@given(groups=steps())
def test_it_keeps_at_least_one_scorable_rollout_and_never_an_unscorable_one(name, groups):
    for config in configs(name):
        for group, chosen in zip(groups, prune(config, groups), strict=True):
            assert not chosen.keep_G[~group.scorable_G].any()
            if name not in BATCH_WIDE:
                assert chosen.keep_G.any() == group.scorable_G.any()


@every_pruner
@settings(max_examples=60)
@given(groups=steps(), weighting=st.sampled_from([0.0, 0.3, 1.0]))
def test_weights_are_finite_positive_where_kept_and_zero_exactly_where_dropped(name, groups, weighting):
    for config in configs(name, representative="random", align="dummy", weighting=weighting):
        for chosen in prune(config, groups):
            assert np.isfinite(chosen.weight_G).all()
            assert ((chosen.weight_G > 0) == chosen.keep_G).all()
            assert (chosen.weight_G[~chosen.keep_G] == 0.0).all()


@every_pruner
@settings(max_examples=60)
@given(groups=steps())
def test_without_weighting_every_survivor_weighs_one(name, groups):
    for config in configs(name):
        if config.match_weights or config.per_cluster > 1:
            continue
        for chosen in prune(config, groups):
            assert (chosen.weight_G[chosen.keep_G] == 1.0).all()


@pytest.mark.parametrize(
    "name", [n for n in sorted(PRUNERS) if n not in IN_EXPECTATION and "weighting" in PRUNERS[n].options]
)
@settings(max_examples=60)
@given(groups=steps(), seed=st.integers(0, 3))
def test_full_weighting_sums_to_the_number_of_scorable_rollouts(name, groups, seed):
    for config in configs(name, representative="random", align="dummy", weighting=1.0):
        for group, chosen in zip(groups, prune(config, groups, seed), strict=True):
            assert chosen.weight_G.sum() == pytest.approx(group.scorable_G.sum(), rel=1e-12)


@unbiased_pruners
def test_full_weighting_gives_every_rollout_the_mean_weight_of_one(name):
    # The first step of every unbiasedness proof, by the law of large numbers with fixed seeds.
    group = Group(
        prompt_id="q",
        tokens_G=[[1], [1], [1], [2], [2], [3]],
        rewards_G=np.array([1.0, 1, 1, 1, 0, 0]),
        advantages_G=np.array([0.5, 0.5, 0.5, 0.5, -1.0, -1.0]),
    )
    config = FastRLConfig(pruner=name, representative="random", align="dummy", weighting=1.0)
    draws = np.array([prune(config, [group], seed)[0].weight_G for seed in range(3000)])
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - 1.0) <= 5 * error).all()


@every_pruner
@settings(max_examples=60)
@given(groups=steps())
def test_clusters_point_to_kept_rollouts_and_kept_ones_stand_for_themselves(name, groups):
    for config in configs(name):
        for group, chosen in zip(groups, prune(config, groups), strict=True):
            kept = np.flatnonzero(chosen.keep_G)
            if name in BATCH_WIDE and not len(kept):
                assert (chosen.cluster_G == -1).all()
                continue
            assert ((chosen.cluster_G == -1) == ~group.scorable_G).all()
            assert chosen.cluster_G[kept].tolist() == kept.tolist()
            assert chosen.keep_G[chosen.cluster_G[group.scorable_G]].all()


@every_pruner
@settings(max_examples=60)
@given(groups=steps(), seed=st.integers(0, 5))
def test_it_is_a_pure_function_of_groups_and_generator(name, groups, seed):
    for config in configs(name):
        before = pickle.dumps(groups)
        chance = np.random.get_state()[1].copy()  # noqa: NPY002
        first = plain(prune(config, groups, seed))
        assert plain(prune(config, groups, seed)) == first
        assert pickle.dumps(groups) == before
        now = np.random.get_state()[1]  # noqa: NPY002
        assert (now == chance).all(), "it drew from the global generator"


@every_pruner
@settings(max_examples=60)
@given(groups=steps(), chance=st.randoms(use_true_random=False))
def test_permuting_the_groups_permutes_the_selections(name, groups, chance):
    order = list(range(len(groups)))
    chance.shuffle(order)
    for config in configs(name):
        here = plain(select(groups, config))
        there = plain(select([groups[p] for p in order], config))
        assert there == [here[p] for p in order]


@every_pruner
def test_an_empty_step_is_an_empty_answer(name):
    assert prune(FastRLConfig(pruner=name), []) == []


@every_pruner
@pytest.mark.parametrize(
    "rewards",
    [[1.0], [NAN], [NAN] * 4, [1.0] * 4, [1.0, NAN, NAN], [0.0, 1.0]],
    ids=["one", "one unscorable", "all unscorable", "all equal", "one scorable", "pair"],
)
@pytest.mark.parametrize("tokens", [[], [3]], ids=["empty responses", "equal responses"])
def test_degenerate_groups_are_no_accident(name, rewards, tokens):
    for zero_variance in ("keep_one", "drop", "keep_all"):
        config = FastRLConfig(pruner=name, zero_variance=zero_variance)
        group = Group(prompt_id="q", tokens_G=[tokens] * len(rewards), rewards_G=np.array(rewards))
        (chosen,) = select([group], config)
        assert np.isfinite(chosen.weight_G).all()
        assert not chosen.keep_G[~group.scorable_G].any()
        is_flat = len({r for r in rewards if r == r}) < 2
        expected = group.scorable_G.any() and not (is_flat and zero_variance == "drop")
        assert chosen.keep_G.any() == expected  # also under CPPO: of one group, the largest |A| is its own


@pytest.mark.parametrize("name", ["leverage", "logdet"])
@pytest.mark.parametrize("power", [-1000, -520, 500])
def test_the_size_of_the_advantages_changes_nothing(name, power):
    rewards = np.array([0.0, 1.0, 1.0, 0.5])
    tokens = [[0, 1], [1, 2], [1, 2, 3], []]
    results = []
    for factor in (1.0, 2.0**power):
        group = Group(
            prompt_id="q",
            tokens_G=tokens,
            rewards_G=rewards,
            advantages_G=(rewards - rewards.mean()) * factor,
        )
        results.append([prune(config, [group])[0] for config in configs(name)])
    for chosen, scaled in zip(*results, strict=True):
        np.testing.assert_array_equal(scaled.keep_G, chosen.keep_G)
        np.testing.assert_array_equal(scaled.weight_G, chosen.weight_G)
