"""A policy with closed-form scores, the base losses on it, and every draw that a selection can make.

The policy is linear and without context: each token is drawn from softmax(Phi theta), so the score of a
response with token counts c and length L is (c - L pi) Phi. Gradients are those of the surrogate that is
maximised, written from the formulas; selections, weights and denominators are the library's.

Suffixes beside those of `fastrl.types`: _N rows of a step, _D parameters, _V words, _K answers, _C members of
a cluster.
"""

import functools
import itertools
import math

import numpy as np
import pytest

from fastrl import Group, select
from fastrl.advantages import group_advantages
from fastrl.batching import denominators

LOSSES = ("grpo", "dapo", "dr_grpo", "gspo")
VOCABULARY, MAX_LENGTH, CLIP = 12, 8, 0.2
_RNG = np.random.default_rng(20260936)
FEATURES_VD = _RNG.normal(size=(VOCABULARY, 5))
THETA_D = _RNG.normal(size=5)
NUM_PARAMETERS = len(THETA_D)
OLD_D = {"on_policy": THETA_D, "clipped": THETA_D + 0.15 * _RNG.normal(size=5)}
"""Policies that the rollouts may come from: the current one, and one far enough away that ratios are clipped."""


def log_policy(theta_D):
    logits_V = FEATURES_VD @ theta_D
    return logits_V - np.log(np.exp(logits_V).sum())


def is_token_sum(loss):
    """Whether a rollout counts by the sum over its tokens; else by their mean."""
    return loss in ("dapo", "dr_grpo")


def row_term(loss, tokens_T, advantage, theta_D, old):
    """One rollout's share of the clipped surrogate, before any denominator of the batch."""
    log_ratio_T = (log_policy(theta_D) - log_policy(OLD_D[old]))[list(tokens_T)]
    ratio = np.exp(log_ratio_T.mean() if loss == "gspo" else log_ratio_T)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return float(np.sum(surrogate) if is_token_sum(loss) else np.mean(surrogate))


@functools.cache
def row_gradient(loss, tokens_T, advantage, old="on_policy"):
    """(D,) gradient of `row_term` in closed form: ratio * A * score, where the ratio is not clipped."""
    tokens = list(tokens_T)
    score_TD = FEATURES_VD[tokens] - np.exp(log_policy(THETA_D)) @ FEATURES_VD
    log_ratio_T = (log_policy(THETA_D) - log_policy(OLD_D[old]))[tokens]
    ratio = np.exp(log_ratio_T.mean() if loss == "gspo" else log_ratio_T)
    beyond = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
    factor_T = np.where(beyond, 0.0, ratio * advantage) * np.ones(len(tokens))
    total_D = factor_T @ score_TD
    return total_D if is_token_sum(loss) else total_D / len(tokens)


def divisor(loss, rows, tokens):
    return {"grpo": rows, "gspo": rows, "dapo": tokens, "dr_grpo": rows * MAX_LENGTH}[loss]


def make_group(prompt_id, tokens, rewards, advantages=None):
    rewards = np.array(rewards, dtype=np.float64)
    advantages = group_advantages(rewards) if advantages is None else advantages
    return Group(prompt_id=prompt_id, tokens_G=tokens, rewards_G=rewards, advantages_G=advantages)


def of_rows(groups):
    """Tokens, number of tokens, advantage and liveness of each row of a step."""
    tokens = [tuple(t) for group in groups for t in group.tokens_G]
    live = np.repeat([bool(group.advantages_G.any()) for group in groups], [g.num_rollouts for g in groups])
    return tokens, np.array([len(t) for t in tokens]), np.concatenate([g.advantages_G for g in groups]), live


def estimate(loss, groups, selections, kind, old="on_policy"):
    """(D,) sum over kept rows of the gradient with advantage w_i A_i, by the library's denominators."""
    tokens, tokens_N, advantage_N, live_N = of_rows(groups)
    weight_N = np.concatenate([selection.weight_G for selection in selections])
    window = np.flatnonzero(np.concatenate([selection.keep_G for selection in selections]))
    by = denominators(kind, tokens_N=tokens_N, live_N=live_N, window=window, num_windows=1)
    total_D = np.zeros(NUM_PARAMETERS)
    for i in window:
        total_D += row_gradient(loss, tokens[i], advantage_N[i] * weight_N[i], old)
    return total_D / divisor(loss, by.rows, by.tokens)


def full_gradient(loss, groups, old="on_policy"):
    """(D,) gradient of the base loss over all rollouts: no selection, no denominator of ours."""
    tokens, tokens_N, advantage_N, _ = of_rows(groups)
    total_D = np.zeros(NUM_PARAMETERS)
    for tokens_T, advantage in zip(tokens, advantage_N, strict=True):
        total_D += row_gradient(loss, tokens_T, advantage, old)
    return total_D / divisor(loss, len(tokens), tokens_N.sum())


def live_share(loss, groups):
    """What part of the base loss's divisor comes from groups with signal."""
    _, tokens_N, _, live_N = of_rows(groups)
    return tokens_N[live_N].sum() / tokens_N.sum() if loss == "dapo" else live_N.mean()


def clusters_of(selection):
    """Index arrays of the clusters of a group; unscorable and dropped rollouts are in none."""
    return [np.flatnonzero(selection.cluster_G == i) for i in np.flatnonzero(selection.keep_G)]


class Dice:
    """A generator that walks through all outcomes: each call to it is a fork with equal branches."""

    def __init__(self, path):
        self.path, self.sizes = path, []

    def _fork(self, size):
        self.sizes.append(size)
        if len(self.path) < len(self.sizes):
            self.path.append(0)
        return self.path[len(self.sizes) - 1]

    def choice(self, options):
        return options[self._fork(len(options))]

    def permutation(self, values):
        orders = list(itertools.permutations(values.tolist()))
        return np.array(orders[self._fork(len(orders))])

    def next_path(self):
        path = list(self.path)
        while path and path[-1] == self.sizes[len(path) - 1] - 1:
            path.pop()
        return [*path[:-1], path[-1] + 1] if path else None


def every_draw(groups, config):
    """All selections that chance can lead to: [(probability, selections), ...]."""
    outcomes, path, rng = [], [], np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        while path is not None:
            dice = Dice(path)
            patch.setattr(np.random, "default_rng", lambda *_, dice=dice: dice)
            selections = select(groups, config, rng=rng)
            outcomes.append((1.0 / math.prod(dice.sizes), selections))
            path = dice.next_path()
    assert math.isclose(sum(probability for probability, _ in outcomes), 1.0)
    return outcomes
