"""What pruning does to the gradient, exactly: closed forms, and every draw enumerated; nothing is sampled.

No engine is involved: the policy and its scores are those of `linear_policy`, the selections, weights and
denominators the library's. Equations are the paper's (arXiv 2609.36932); words and settings are those of
docs/method.md.
"""

import functools
import math

import numpy as np
import pytest
from linear_policy import (
    CLIP,
    FEATURES_VD,
    LOSSES,
    NUM_PARAMETERS,
    OLD_D,
    THETA_D,
    VOCABULARY,
    clusters_of,
    divisor,
    estimate,
    every_draw,
    full_gradient,
    is_token_sum,
    live_share,
    log_policy,
    make_group,
    of_rows,
    row_gradient,
    row_term,
)

from fastrl import FastRLConfig, select, summarize
from fastrl.batching import DUMMY, plan_round

NAN = float("nan")
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_policy = pytest.mark.parametrize("old", OLD_D)


@every_loss
@every_policy
def test_the_closed_form_is_the_derivative_of_the_loss(loss, old):
    """Else all below is about another loss. Differences of fourth order: exact to about 1e-10."""
    tokens_T, gradients = (0, 3, 3, 7, 11, 5), []
    step = 1e-3
    for advantage in (1.3, -0.7):
        expected_D = np.zeros(NUM_PARAMETERS)
        for d, unit_D in enumerate(np.eye(NUM_PARAMETERS) * step):
            values = [row_term(loss, tokens_T, advantage, THETA_D + k * unit_D, old) for k in (-2, -1, 1, 2)]
            expected_D[d] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
        gradients.append(row_gradient(loss, tokens_T, advantage, old=old))
        np.testing.assert_allclose(gradients[-1], expected_D, atol=1e-9)
    assert max(np.linalg.norm(gradient) for gradient in gradients) > 0.01


def test_the_clipped_policy_does_clip():
    ratio_V = np.exp(log_policy(THETA_D) - log_policy(OLD_D["clipped"]))
    assert ratio_V.max() > 1 + CLIP
    assert ratio_V.min() < 1 - CLIP


# --- a closed form in the counts of answers -----------------------------------------------------

# Answers without a common token: at tau = 0.8 a cluster is "the same answer, the same advantage".
ANSWERS = ([0, 1], [2, 3, 4], [5], [6, 7, 8, 8], [9, 10, 11])
RIGHT_K = np.array([1, 0, 0, 1, 0])
COUNTS_PK = np.array([[3, 2, 1, 2, 0], [1, 4, 0, 0, 3], [0, 5, 0, 0, 2]])  # the last has zero variance


def groups_of_answers():
    groups = []
    for p, counts_K in enumerate(COUNTS_PK):
        answers = np.random.default_rng(p).permutation(np.repeat(np.arange(len(ANSWERS)), counts_K))
        groups.append(make_group(f"q{p}", [ANSWERS[a] for a in answers], RIGHT_K[answers]))
    return groups


def closed_form(loss, kind, weighting, dropped):
    """sum_P sum_a n_a^weighting A_a s_a / denominator, with n_a rollouts that gave answer a."""
    count_KV = np.array([np.bincount(answer, minlength=VOCABULARY) for answer in ANSWERS])
    length_K = count_KV.sum(1)
    score_KD = (count_KV - length_K[:, None] * np.exp(log_policy(THETA_D))) @ FEATURES_VD
    if not is_token_sum(loss):
        score_KD = score_KD / length_K[:, None]
    total_D, rows, tokens = np.zeros(NUM_PARAMETERS), 0, 0
    for counts_K in COUNTS_PK:
        num, p = counts_K.sum(), (counts_K * RIGHT_K).sum() / counts_K.sum()
        has_signal = 0 < p < 1
        if has_signal:  # binary rewards, Bessel-corrected deviation
            odds = math.sqrt((1 - p) / p)
            advantage_K = np.where(RIGHT_K == 1, odds, -1 / odds) * math.sqrt((num - 1) / num)
            weight_K = np.where(counts_K > 0, counts_K.astype(float) ** weighting, 0.0)
            total_D += (weight_K * advantage_K) @ score_KD
        counted_K = {"full": counts_K, "live": counts_K * has_signal}.get(kind)
        if kind == "kept":
            counted_K = (counts_K > 0) * (has_signal or not dropped)
        rows, tokens = rows + counted_K.sum(), tokens + counted_K @ length_K
    return total_D / divisor(loss, rows, tokens)


@every_loss
@pytest.mark.parametrize("kind", ["full", "live", "kept"])
@pytest.mark.parametrize("weighting", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("zero_variance", ["keep_one", "drop"])
def test_the_pruned_gradient_is_its_closed_form_in_counts_of_answers(loss, kind, weighting, zero_variance):
    config = FastRLConfig(
        weighting=weighting, representative="random", align="dummy", zero_variance=zero_variance
    )
    groups = groups_of_answers()
    selections = select(groups, config)
    dropped = zero_variance == "drop"
    kept = (COUNTS_PK[:2] if dropped else COUNTS_PK) > 0
    assert sum(selection.num_kept for selection in selections) == kept.sum(), "one per answer"
    found_D = estimate(loss, groups, selections, kind)
    np.testing.assert_allclose(found_D, closed_form(loss, kind, weighting, dropped), rtol=1e-12, atol=1e-14)
    full_D = full_gradient(loss, groups)
    np.testing.assert_allclose(full_D, closed_form(loss, "full", 1.0, dropped), rtol=1e-12, atol=1e-14)
    # Copies of an answer have one gradient, so the weights alone restore the full one, up to the live share.
    share = live_share(loss, groups)
    scale = {"full": 1.0, "live": share}.get(kind)
    if weighting == 1.0 and scale is not None:
        np.testing.assert_allclose(found_D * scale, full_D, rtol=1e-12, atol=1e-14)
    else:
        cosine = found_D @ full_D / np.linalg.norm(found_D) / np.linalg.norm(full_D)
        assert np.linalg.norm(found_D - full_D) > 0.02 * np.linalg.norm(full_D)
        assert weighting == 1.0 or cosine < 0.9995, (
            "other weights are another direction, not another step size"
        )


@every_loss
@pytest.mark.parametrize("kind", ["full", "live"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_windows", [1, 2])
def test_windows_ranks_and_dummies_change_nothing_in_the_sum(loss, kind, num_ranks, num_windows):
    """A window divides by its share of the rows, so the mean over windows is the estimate of the round."""
    groups = [*groups_of_answers(), make_group("q3", [ANSWERS[0]], [NAN])]  # 24 rows
    config = FastRLConfig(weighting=1.0, representative="random", align="dummy", zero_variance="drop")
    selections = select(groups, config)
    tokens, tokens_N, advantage_N, live_N = of_rows(groups)
    advantage_N = advantage_N * np.concatenate([selection.weight_G for selection in selections])
    plans = plan_round(
        np.concatenate([selection.keep_G for selection in selections]),
        tokens_N=tokens_N, length_N=tokens_N, live_N=live_N, num_windows=num_windows, num_steps=4, size=6,
        denominator=kind, num_ranks=num_ranks, rng=np.random.default_rng(0),
    )  # fmt: skip
    total_D, seen = np.zeros(NUM_PARAMETERS), []
    for plan in plans:
        by = divisor(loss, plan.denominators.rows, plan.denominators.tokens)
        rows = [row for rank in range(num_ranks) for row in plan.rows(rank)]
        seen += rows
        for i in rows:
            if i != DUMMY:
                total_D += row_gradient(loss, tokens[i], advantage_N[i]) / by / num_windows
    assert (DUMMY in seen) == (num_ranks > 1), "only uneven ranks need dummies"
    np.testing.assert_allclose(total_D, estimate(loss, groups, selections, kind), rtol=1e-12, atol=1e-14)


# --- unbiased: every draw, with its probability -------------------------------------------------

REWARDS = {
    # A class holds equal advantages; one rollout of the first group cannot be scored.
    "equal": ([1, 0, 0, 1, 0, NAN], [0, 1, 0, 1], [1, 1, 1]),
    # Every advantage is its own; only a wide tolerance makes classes.
    "unequal": ([0.11, 0.93, 0.78, 0.24, 0.97, NAN], [0.52, 0.31, 0.50, 0.35], [0.3, 0.3, 0.3]),
}
TOLERANCE = {"equal": 1e-4, "unequal": 0.5}
UNBIASED = {
    "tau_0.7": {"tau": 0.7},
    "tau_0.8": {"tau": 0.8},
    "tau_1": {"tau": 1.0},
    "bigrams": {"tau": 1.0, "ngram": 2},
    "seed": {"tau": 0.7, "compare": "seed"},
    "advantage_only": {"pruner": "advantage_only"},
    "random": {"pruner": "random", "keep_share": 0.5},
}
every_kind = pytest.mark.parametrize("kind", REWARDS)
every_pruner = pytest.mark.parametrize("pruner", UNBIASED)


def mixed_groups(kind):
    """Responses of different lengths that share some tokens, and a zero-variance group.

    Rollouts 0 and 2 of the second group have distance 0 in one class: what any tau but 0 prunes.
    """
    tokens = (
        [[0, 1, 2], [0, 1, 2, 3, 4], [1, 2, 3], [2, 0, 1, 2, 0, 5], [3, 4, 6, 1], [0, 1, 2]],
        [[7, 8], [7, 8, 9], [8, 7, 7], [8, 9, 7, 10, 11]],
        [[0], [1, 2], [3, 4, 5, 6]],
    )
    return [
        make_group(f"q{p}", t, rewards)
        for p, (t, rewards) in enumerate(zip(tokens, REWARDS[kind], strict=True))
    ]


@functools.cache
def draws(kind, pruner, weighting=1.0):
    """The groups, and all draws of an otherwise unbiased setting."""
    config = FastRLConfig(
        **{"pruner": "mdap", "advantage_tol": TOLERANCE[kind], **UNBIASED[pruner]}, weighting=weighting,
        representative="random", zero_variance="drop", denominator="full", align="dummy",
    )  # fmt: skip
    groups = mixed_groups(kind)
    return groups, every_draw(groups, config)


def expected(loss, groups, outcomes, kind="full", old="on_policy"):
    estimates = [(q, estimate(loss, groups, selections, kind, old)) for q, selections in outcomes]
    return sum(q * estimate_D for q, estimate_D in estimates), [estimate_D for _, estimate_D in estimates]


@every_loss
@every_kind
@every_pruner
@every_policy
def test_the_expected_pruned_gradient_is_the_full_gradient(loss, kind, pruner, old):
    """The claim behind `weighting: 1`: unbiased for any clustering, clipped or not, own A_i kept."""
    groups, outcomes = draws(kind, pruner)
    full_D = full_gradient(loss, groups, old)
    mean_D, each_D = expected(loss, groups, outcomes, old=old)
    assert len(outcomes) >= 4
    assert max(np.linalg.norm(d - full_D) for d in each_D) > 0.1 * np.linalg.norm(full_D), "chance matters"
    np.testing.assert_allclose(mean_D, full_D, rtol=0, atol=1e-12)
    # `live` is the same up to the share of live rows (tokens): zero-variance groups do not dilute it.
    share = live_share(loss, groups)
    assert share < 0.9
    live_D, _ = expected(loss, groups, outcomes, "live", old)
    np.testing.assert_allclose(live_D * share, full_D, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pruner", [name for name in UNBIASED if name != "random"])
def test_the_cases_above_are_what_they_are_called(pruner):
    """Clusters of several rollouts, of equal advantages in one case and of unequal ones in the other."""
    for kind in REWARDS:
        groups, outcomes = draws(kind, pruner)
        spans = []
        for group, selection in zip(groups, outcomes[0][1], strict=True):
            clusters = clusters_of(selection)
            spans += [np.ptp(group.advantages_G[members]) for members in clusters if len(members) > 1]
        assert spans
        assert all(span < 1e-12 for span in spans) if kind == "equal" else max(spans) > 0.1


@pytest.mark.parametrize("pruner", [name for name in UNBIASED if name != "random"])
def test_weights_add_up_to_the_group_and_balance_in_every_single_draw(pruner):
    """sum w_i = number of scorable rollouts; sum w_i A_i = 0 where a cluster has one advantage."""
    groups, outcomes = draws("equal", pruner)
    for _, selections in outcomes:
        for group, selection in zip(groups[:2], selections[:2], strict=True):
            assert selection.weight_G.sum() == group.scorable_G.sum()
            assert abs(selection.weight_G @ group.advantages_G) < 1e-12


@every_loss
@every_kind
@pytest.mark.parametrize("weighting", [0.0, 0.5, 1.0])
def test_the_bias_of_other_weightings_is_the_size_of_the_cluster(loss, kind, weighting):
    """E[g] = 1/N sum_C |C|^(weighting - 1) sum_{i in C} A_i s_i: big clusters count for less."""
    groups, outcomes = draws(kind, "tau_1", weighting)
    tokens, tokens_N, advantage_N, _ = of_rows(groups)
    target_D, offset = np.zeros(NUM_PARAMETERS), 0
    for group, selection in zip(groups, outcomes[0][1], strict=True):
        for members in clusters_of(selection):
            for i in members + offset:
                target_D += len(members) ** (weighting - 1) * row_gradient(loss, tokens[i], advantage_N[i])
        offset += group.num_rollouts
    target_D /= divisor(loss, len(tokens), tokens_N.sum())
    mean_D, _ = expected(loss, groups, outcomes)
    np.testing.assert_allclose(mean_D, target_D, rtol=0, atol=1e-12)
    bias = np.linalg.norm(mean_D - full_gradient(loss, groups))
    assert bias < 1e-12 if weighting == 1.0 else bias > 0.1 * np.linalg.norm(mean_D)


# --- the bias of one survivor per class, binary rewards -----------------------------------------

SIZE = 8


def one_per_class(num_right, weighting=0.0, advantages=None):
    """A group of 8 with 0/1 rewards in which all rollouts share a token: at tau = 1, one per class."""
    rewards = np.random.default_rng(num_right).permutation(
        np.repeat([1.0, 0.0], [num_right, SIZE - num_right])
    )
    tokens = [[0, 1 + i] for i in range(SIZE)]
    advantages = advantages(rewards) if advantages else None
    group = make_group("q", tokens, rewards, advantages)
    random = {"representative": "random", "align": "dummy"} if weighting else {}
    config = FastRLConfig(tau=1.0, weighting=weighting, **random)
    (selection,) = select([group], config)
    assert selection.num_kept == 2
    return group, selection


@pytest.mark.parametrize("num_right", range(1, SIZE))
@pytest.mark.parametrize("weighting", [0.0, 0.25, 0.5, 1.0])
def test_right_answers_outweigh_wrong_ones_by_the_odds(num_right, weighting):
    """((1 - p) / p)^(1 - weighting): the paper's weighting pushes what is rare, weighting 1 balances."""
    group, selection = one_per_class(num_right, weighting)
    weighted_G = selection.weight_G * group.advantages_G
    p = num_right / SIZE
    ratio = weighted_G[weighted_G > 0].sum() / -weighted_G[weighted_G < 0].sum()
    assert ratio == pytest.approx(((1 - p) / p) ** (1 - weighting), rel=1e-12)


@pytest.mark.parametrize("num_right", range(1, SIZE))
def test_the_advantages_that_the_paper_keeps_do_not_sum_to_zero(num_right):
    """(1 - 2p) / sqrt(p (1 - p)) with the population deviation; Bessel's (ours) is sqrt((G-1)/G) of it."""
    p = num_right / SIZE
    closed = (1 - 2 * p) / math.sqrt(p * (1 - p))

    def population(rewards):
        return (rewards - rewards.mean()) / rewards.std(ddof=0)

    for advantages, scale in ((population, 1.0), (None, math.sqrt((SIZE - 1) / SIZE))):
        group, selection = one_per_class(num_right, advantages=advantages)
        kept = group.advantages_G[selection.keep_G]
        assert kept.sum() == pytest.approx(closed * scale, rel=1e-12, abs=1e-12)
        assert group.advantages_G.sum() == pytest.approx(0.0, abs=1e-12)
        # What is kept is on average larger by 1 / (4 p (1 - p)): another step size under `denominator: kept`.
        seen = summarize([group], [selection])
        growth = seen["advantage/abs_mean_kept"] / seen["advantage/abs_mean_all"]
        assert growth == pytest.approx(1 / (4 * p * (1 - p)), rel=1e-12)


# --- the variance, and its limit ----------------------------------------------------------------


@every_loss
@every_kind
@pytest.mark.parametrize("pruner", ["tau_0.7", "tau_0.8", "tau_1", "bigrams", "advantage_only"])
def test_the_variance_is_its_closed_form(loss, kind, pruner):
    """E||g - full||^2 = 1/N^2 sum_C |C| A_C^2 sum_{i in C} ||s_i - mean s_C||^2, one draw per cluster.

    With unequal advantages in a cluster, g_i = A_i s_i takes the place of A_C s_i. N stands for
    what the loss divides by; groups draw independently, so their variances add up.
    """
    groups, outcomes = draws(kind, pruner)
    tokens, tokens_N, _, _ = of_rows(groups)
    variance, offset = 0.0, 0
    for group, selection in zip(groups, outcomes[0][1], strict=True):
        for members in clusters_of(selection):
            score_CD = np.array([row_gradient(loss, tokens[i], 1.0) for i in members + offset])
            advantage_C = group.advantages_G[members]
            if kind == "equal":
                spread = advantage_C[0] ** 2 * ((score_CD - score_CD.mean(0)) ** 2).sum()
            else:
                own_CD = advantage_C[:, None] * score_CD
                spread = ((own_CD - own_CD.mean(0)) ** 2).sum()
            variance += len(members) * spread
        offset += group.num_rollouts
    variance /= divisor(loss, len(tokens), tokens_N.sum()) ** 2
    full_D = full_gradient(loss, groups)
    measured = sum(q * ((estimate(loss, groups, s, "full") - full_D) ** 2).sum() for q, s in outcomes)
    assert variance > 1e-4
    assert measured == pytest.approx(variance, rel=1e-10)


@every_loss
@every_kind
@every_policy
@pytest.mark.parametrize("representative", ["first", "random"])
@pytest.mark.parametrize("compare", ["kept", "seed"])
def test_tau_zero_is_the_base_loss_bit_for_bit(loss, kind, old, representative, compare):
    weighting = float(representative == "random")
    config = FastRLConfig(
        tau=0.0, representative=representative, weighting=weighting, compare=compare, align="dummy",
        advantage_tol=TOLERANCE[kind],
    )  # fmt: skip
    groups = mixed_groups(kind)[1:]  # without the unscorable rollout, which no pruner keeps
    selections = select(groups, config)
    full_D = full_gradient(loss, groups, old)
    assert np.linalg.norm(full_D) > 0.01
    for denominator in ("full", "kept"):
        assert np.array_equal(estimate(loss, groups, selections, denominator, old), full_D)
