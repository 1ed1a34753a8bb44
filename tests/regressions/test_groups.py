"""A group is the unit of GRPO. Filters that worked row by row split groups, let rows that nobody could score
vote in the baseline, took rounding noise for a signal, and left columns behind that no longer fitted their rows.
"""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group, select
from fastrl.advantages import group_advantages
from fastrl.batching import DUMMY, align_top_up, plan_round

RUN = {"num_rollouts": 8, "total_steps": 10, "steps_per_epoch": 2}
UNBIASED = {"representative": "random", "weighting": 1.0, "align": "dummy"}
CLASS_KEEPING = {  # pruners that keep a rollout of every advantage class; `random` makes no such promise
    "none": FastRLConfig(pruner="none"),
    "published": FastRLConfig(),
    "seed": FastRLConfig(tau=1.0, compare="seed"),
    "unbiased": FastRLConfig(**UNBIASED),
    "advantage_only": FastRLConfig(pruner="advantage_only"),
}
ALL = {**CLASS_KEEPING, "random": FastRLConfig(pruner="random", keep_share=0.4)}


def every_binary_group():
    """All answers right or wrong, G = 1 ... 8. All rollouts read alike, so that everything prunable is pruned."""
    for size in range(1, 9):
        for rewards in itertools.product((0.0, 1.0), repeat=size):
            yield Group(
                prompt_id="".join(str(int(r)) for r in rewards),
                tokens_G=[[7, 8]] * size,
                rewards_G=np.array(rewards),
            )


def advantages(groups):
    return [group.advantages_G for group in FastRL(**RUN).with_advantages(groups)]


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_nemo_rl_3469_group_stays_whole(config):
    """A row-wise filter with leave-one-out deviations made three rows of another batch of [1, 0, 0, 0]."""
    groups = list(every_binary_group())
    for group, chosen in zip(groups, select(groups, config), strict=True):
        assert chosen.keep_G.shape == chosen.weight_G.shape == chosen.cluster_G.shape == group.rewards_G.shape
        assert chosen.keep_G.any(), "a group with rewards never vanishes unless the settings say so"
        assert chosen.keep_G[chosen.cluster_G].all(), "who stands for a rollout is in its own group, and kept"
        (alone,) = select([group], config)
        assert alone.keep_G.tolist() == chosen.keep_G.tolist(), "other prompts decide nothing"


@pytest.mark.parametrize("config", CLASS_KEEPING.values(), ids=CLASS_KEEPING)
def test_nemo_rl_3469_mixed_group_keeps_both_signs(config):
    groups = [group for group in every_binary_group() if len(set(group.rewards_G)) == 2]
    for group, chosen, advantages_G in zip(groups, select(groups, config), advantages(groups), strict=True):
        full = (group.rewards_G - group.rewards_G.mean()) / group.rewards_G.std(ddof=1)
        np.testing.assert_allclose(advantages_G, full, err_msg="never recomputed on survivors")
        assert {1.0, -1.0} == set(np.sign(advantages_G[chosen.keep_G]).tolist())


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
@pytest.mark.parametrize("zero_variance", ["keep_one", "drop", "keep_all"])
def test_nemo_rl_3469_zero_variance_groups_are_dropped_or_kept_as_one(config, zero_variance):
    settings = {**config.to_dict(), "zero_variance": zero_variance}
    groups = [group for group in every_binary_group() if len(set(group.rewards_G)) == 1]
    for group, chosen in zip(groups, select(groups, FastRLConfig(**settings)), strict=True):
        if zero_variance == "drop":
            assert not chosen.keep_G.any()
        elif zero_variance == "keep_all":
            assert chosen.keep_G.all()
        else:
            assert 1 <= chosen.num_kept <= group.num_rollouts


# Rewards that are equal but for rounding (NeMo-RL PR 4158, 4161)


def bfloat16(values):
    """The upper half of a float32: what a reward model in bfloat16 returns."""
    return (np.float32(values).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@st.composite
def equal_but_for_rounding(draw):
    """Every rollout earns the same parts; each adds them up in float32 in an order of its own."""
    part = st.sampled_from([0.1, 0.2, 0.3, 0.35, 0.4, 0.7, 0.9]) | st.floats(0.0, 1.0, width=32)
    parts = draw(st.lists(part, min_size=2, max_size=5))
    if draw(st.booleans()):
        parts = bfloat16(parts).tolist()
    orders = draw(st.lists(st.permutations(parts), min_size=2, max_size=16))
    totals = [np.float32(0)] * len(orders)
    for i, order in enumerate(orders):
        for part in order:
            totals[i] = totals[i] + np.float32(part)
    return np.array(totals, np.float32)


def assert_no_signal(rewards_G, **more):
    group = Group(prompt_id="q", tokens_G=[[1]] * len(rewards_G), rewards_G=rewards_G, **more)
    assert advantages([group])[0].tolist() == [0.0] * len(rewards_G)
    assert not select([group], FastRLConfig(zero_variance="drop"))[0].keep_G.any()


@given(equal_but_for_rounding())
def test_nemo_rl_4161_rounding_noise_is_no_signal(rewards_G):
    assert_no_signal(rewards_G)
    # An engine that divided the residue by a tiny deviation hands us its result: it must not get through.
    assert_no_signal(rewards_G, advantages_G=4000.0 * (rewards_G - rewards_G[0]) + 1e-3)


def test_nemo_rl_4161_the_noise_is_there():
    """What the report saw: with "deviation > 0", the same parts in another order count as a mixed group."""
    totals = {(a + b) + c for a, b, c in itertools.permutations(np.float32([0.2, 0.35, 0.4]))}
    rewards_G = np.array(sorted(totals), np.float32)
    assert rewards_G.std() > 0
    naive = (rewards_G - rewards_G.mean()) / rewards_G.std()
    assert np.abs(naive).max() > 0.5
    assert_no_signal(rewards_G)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=32), st.sampled_from([1.0, 1e-3, 1e-5, 1e-9]))
def test_nemo_rl_4158_no_advantage_exceeds_its_bound(rewards, spread):
    """|A| <= (G - 1) / sqrt(G) for any rewards, however close together they are."""
    advantages_G = group_advantages(0.35 + spread * np.array(rewards))
    assert np.abs(advantages_G).max() <= np.sqrt(max(len(rewards) - 1, 0)) + 1e-9


# Rollouts that nobody could score (NeMo-RL PR 4160)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=8),
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
    st.sampled_from(["none", "published", "seed"]),
)
def test_nemo_rl_4160_unscorable_rows_have_no_vote(rewards, places, pruner):
    rewards_G = np.array(rewards)
    tokens_G = [[10 * (i % 3), 10 * (i % 3) + i] for i in range(len(rewards))]
    beside_G, beside_tokens = rewards_G.copy(), list(tokens_G)
    for place in places:
        at = min(place, len(beside_G))
        beside_G = np.insert(beside_G, at, np.nan)
        beside_tokens.insert(at, tokens_G[0])  # reads like a sibling: it must not stand for it either
    without = Group(prompt_id="q", tokens_G=tokens_G, rewards_G=rewards_G)
    beside = Group(prompt_id="q", tokens_G=beside_tokens, rewards_G=beside_G)
    scored = ~np.isnan(beside_G)
    expected, found = (advantages([group])[0] for group in (without, beside))
    assert found[scored].tolist() == expected.tolist()
    assert not found[~scored].any()
    chosen = [select([group], ALL[pruner])[0].keep_G for group in (without, beside)]
    assert chosen[1][scored].tolist() == chosen[0].tolist()
    assert not chosen[1][~scored].any()


@given(st.integers(1, 6), st.integers(0, 6))
def test_nemo_rl_4160_one_scored_row_alone_has_no_baseline(place, unscored):
    rewards_G = np.insert(np.full(unscored, np.nan), min(place, unscored), 1.0)
    assert group_advantages(rewards_G).tolist() == [0.0] * len(rewards_G)


# Every column follows its row (NeMo-RL PR 3794)


@st.composite
def tagged_steps(draw):
    """Groups in which tokens, reward and advantage of a rollout all spell its row number."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    groups, row = [], 0
    for p, size in enumerate(sizes):
        tags = np.arange(row, row + size)
        row += size
        groups.append(
            Group(
                prompt_id=f"q{p}",
                tokens_G=[[tag, 1000] for tag in tags],
                rewards_G=tags.astype(float),
                # Two signs and few classes: all pruners have something to do.
                advantages_G=np.where(tags % 2, 1.0, -1.0) * (1 + tags % 3),
            )
        )
    return groups


@given(tagged_steps(), st.integers(1, 4), st.sampled_from(sorted(ALL)), st.data())
def test_nemo_rl_3794_all_fields_of_a_row_stay_together(groups, num_ranks, name, data):
    """The rewards that were attached to the filtered rows were those of the unfiltered batch."""
    order = data.draw(st.permutations(range(len(groups))))
    config = FastRLConfig(**{**ALL[name].to_dict(), "tau": 1.0})
    ready = FastRL(**RUN).with_advantages([groups[p] for p in order])
    aligned, _ = align_top_up(ready, select(ready, config), num_ranks)
    column = {
        "token": [tokens[0] for group in ready for tokens in group.tokens_G],
        "reward": [float(r) for group in ready for r in group.rewards_G],
        "advantage": [float(a) for group in ready for a in group.advantages_G],
        "keep": [bool(k) for chosen in aligned for k in chosen.keep_G],
        "weight": [float(w) for chosen in aligned for w in chosen.weight_G],
        "stands_for_it": [int(c) for chosen in aligned for c in chosen.cluster_G],
    }
    filled = -len(column["keep"]) % num_ranks
    keep_N = np.array(column["keep"] + [False] * filled)
    tokens_N = np.full(len(keep_N), 2)
    plans = plan_round(
        keep_N, tokens_N=tokens_N, length_N=tokens_N, live_N=keep_N, num_windows=1, num_steps=len(keep_N),
        size=2, denominator="kept", num_ranks=num_ranks, rng=np.random.default_rng(0),
    )  # fmt: skip
    trained = [row for plan in plans for rank in range(num_ranks) for row in plan.rows(rank) if row != DUMMY]
    assume(trained)
    for row in trained:
        tag = column["token"][row]
        assert column["reward"][row] == tag
        zero = is_alone(groups, tag)
        assert column["advantage"][row] == (0.0 if zero else (1 if tag % 2 else -1) * (1 + tag % 3))
        assert column["keep"][row]
        assert column["weight"][row] > 0
    dropped = set(range(len(column["keep"]))) - set(trained)
    assert all(column["weight"][row] == 0 and not column["keep"][row] for row in dropped)
    assert plans[0].denominators.rows == len(trained)


def is_alone(groups, tag):
    """A group of one rollout has no baseline: its advantage is 0."""
    return any(len(group.tokens_G) == 1 and group.tokens_G[0][0] == tag for group in groups)
