"""Prune and budget a policy whose gradient is known: bias, error and G_t in seconds, without any model.

The policy is a softmax over K modes (fixed answers) per prompt. The score of mode k is e_k - pi, so gradients
are exact arithmetic and their mean over full groups has a closed form. Suffixes: _K modes, _N draws, _D = P x K.
But the scores of two modes are as unlike as any others, whatever tokens they share: `error` is that of a
similarity which knows nothing about gradients. Bias, G_t and counts need no such care.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import Any

import numpy as np
from numpy.linalg import eigvalsh, norm

from fastrl.advantages import group_advantages
from fastrl.batching import denominators
from fastrl.bench.settings import every_pruner
from fastrl.bench.stage_model import PUBLISHED, speedup
from fastrl.budgets import BUDGETS
from fastrl.config import FastRLConfig
from fastrl.method import FastRL, select
from fastrl.types import ConfigError, Group, Selection

MODES = (
    (1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 7, 8, 9, 10, 11),
    (1, 2, 3, 12, 13), (1, 2, 3, 12, 14), (7, 15, 16, 17),
)  # fmt: skip
"""Tokens of each mode. In each class two modes are close (Jaccard distance 1/3) and one is far (9/10 or 1)."""
CORRECT_K = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
SUCCESS_RATES = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95)  # of the prompts before training
FULL = FastRLConfig(pruner="none", budget="fixed")
LEVEL = 0.999
"""Coverage of an interval. A table has some thirty: at 0.95, most tables would hold a false alarm."""
RATES = {"moving": 2.0, "still": 0.0}  # learning rates of the two runs
NUM_EPOCHS = 20
_POLICY, _DRAWS, _CHOICES, _STEPS, _NOISE = range(5)  # streams of chance
_MODE_OF = {tokens: k for k, tokens in enumerate(MODES)}


def default_configs() -> dict[str, FastRLConfig]:
    """Return `every_pruner()`, and every budget under MDAP."""
    return every_pruner() | {f"budget {name}": FastRLConfig(budget=name) for name in BUDGETS}


def simulate(
    configs: Mapping[str, FastRLConfig] | None = None,
    *,
    seed: int = 0,
    num_draws: int = 400,
    num_steps: int = 80,
    num_rollouts: int = 8,
) -> dict[str, Any]:
    """Measure configurations on the toy policy.

    Args:
        configs: By name; None or empty = `default_configs()`.
        seed: Of policy, groups and choices; all configurations see the same uniform numbers.
        num_draws: Steps at the fixed policy, for the estimates.
        num_steps: Steps of each of two runs: one learns, one stands still (learning rate 0).
        num_rollouts: G_1.

    Returns:
        JSON-ready: the arguments; `level`; `success_rates` of the prompts; `estimates`, name -> `_estimate`,
        without those that select like an earlier one (a budget decides how many there are, not which are
        kept); `dynamics`, name -> {moving, still} -> `_run`.

    Raises:
        ConfigError: a number below 2, a seed below 0, or what `FastRL` refuses.
    """
    numbers = {"seed": seed, "num_draws": num_draws, "num_steps": num_steps, "num_rollouts": num_rollouts}
    for name, number in numbers.items():
        least = 0 if name == "seed" else 2
        if number < least:
            raise ConfigError(f"{name}: {number} is below {least}: nothing to draw or compare. Raise it.")
    configs = configs or default_configs()
    logits_PK = initial_logits(np.random.default_rng([seed, _POLICY]))
    probs_PK, counts_P = softmax(logits_PK), np.full(len(logits_PK), num_rollouts)
    chances = [np.random.default_rng([seed, _DRAWS, draw]) for draw in range(num_draws)]
    draws = [_sample(probs_PK, counts_P, rng, num_rollouts) for rng in chances]
    full_ND = np.array([_gradient(FULL, g, select(g, FULL), probs_PK)[0].ravel() for g in draws])
    dynamics = {
        name: {kind: _run(c, logits_PK, rate, seed, num_steps, num_rollouts) for kind, rate in RATES.items()}
        for name, c in configs.items()
    }
    first: dict[FastRLConfig, str] = {}
    for name, c in configs.items():
        first.setdefault(replace(c, budget="fixed", min_rollouts=2, max_rollouts=None), name)
    return {
        **numbers,
        "level": LEVEL,
        "success_rates": list(SUCCESS_RATES),
        "configs": {name: c.to_dict() for name, c in configs.items()},
        "estimates": {n: _estimate(configs[n], draws, full_ND, probs_PK, seed) for n in first.values()},
        "dynamics": dynamics,
    }


def initial_logits(rng: np.random.Generator) -> np.ndarray:
    """Return (P, K) logits: normal, then the correct modes of each prompt shifted to its exact success rate."""
    logits_PK = rng.standard_normal((len(SUCCESS_RATES), len(MODES)))
    success_P, wanted_P = softmax(logits_PK) @ CORRECT_K, np.array(SUCCESS_RATES)
    shift_P = np.log(wanted_P / (1 - wanted_P)) - np.log(success_P / (1 - success_P))
    return logits_PK + shift_P[:, None] * CORRECT_K


def softmax(logits_PK: np.ndarray) -> np.ndarray:
    """Return the (P, K) probabilities of the modes."""
    weights_PK = np.exp(logits_PK - logits_PK.max(1, keepdims=True))
    return weights_PK / weights_PK.sum(1, keepdims=True)


def expected_gradient(probs_PK: np.ndarray, num_rollouts: int) -> np.ndarray:
    """Return the (P, K) expectation of the full-group estimator, the mean over prompts of

        pi_k (c_k - p) * E_n[sqrt(n (G - n) (1 - 1 / G)) / G] / (p (1 - p)),   n ~ Binomial(G, p):

    the gradient of a prompt's success rate p, times what dividing by the group's deviation makes of it.
    """
    p = (probs_PK @ CORRECT_K)[:, None]
    n = np.arange(1, num_rollouts)  # a group of equal rewards has no gradient
    ways = np.array([comb(num_rollouts, k) for k in n.tolist()], dtype=float)
    signal = np.sqrt(n * (num_rollouts - n) * (1 - 1 / num_rollouts)) / num_rollouts
    factor = (ways * p**n * (1 - p) ** (num_rollouts - n) * signal).sum(1, keepdims=True) / (p * (1 - p))
    return factor * probs_PK * (CORRECT_K - p) / len(probs_PK)


def _sample(probs_PK: np.ndarray, counts_P: np.ndarray, rng: np.random.Generator, most: int) -> list[Group]:
    """Sample a group per prompt with a count above 0. The i-th rollout is the same whatever the counts."""
    uniform_PG = rng.random((len(probs_PK), most))
    mode_PG = (uniform_PG[:, :, None] > probs_PK.cumsum(1)[:, None, :-1]).sum(2)
    groups = []
    for p in np.flatnonzero(counts_P).tolist():
        modes_G = mode_PG[p, : counts_P[p]].tolist()
        tokens_G, rewards_G = [MODES[k] for k in modes_G], CORRECT_K[modes_G]
        advantages = {"rewards_G": rewards_G, "advantages_G": group_advantages(rewards_G)}
        groups.append(Group(prompt_id=str(p), tokens_G=tokens_G, **advantages))
    return groups


def _gradient(
    config: FastRLConfig, groups: Sequence[Group], selections: Sequence[Selection], probs_PK: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return sum_i w_i A_i (e_k - pi) / denominator, and the sums of w_i A_i over the rollouts of each mode, (P, K)."""
    push_PK = np.zeros_like(probs_PK)
    for group, selection in zip(groups, selections, strict=True):
        modes_G = [_MODE_OF[tuple(tokens)] for tokens in group.tokens_G]
        push_G = selection.push_G(group)
        push_PK[int(group.prompt_id)] = np.bincount(modes_G, push_G, len(MODES))
    keep_N = np.concatenate([selection.keep_G for selection in selections])
    live_N = np.concatenate([np.full(group.num_rollouts, np.any(group.advantages_G)) for group in groups])
    rows = {"tokens_N": np.ones(len(keep_N)), "live_N": live_N, "window": np.flatnonzero(keep_N)}
    kind = "full" if config.is_identity else config.denominator
    divide_by = denominators(kind, **rows, num_windows=1).rows
    return (push_PK - push_PK.sum(1, keepdims=True) * probs_PK) / divide_by, push_PK


def _estimate(
    config: FastRLConfig, draws: Sequence[list[Group]], full_ND: np.ndarray, probs_PK: np.ndarray, seed: int
) -> dict[str, Any]:
    """Compare the gradients of a configuration with those of the full groups, step by step.

    The mean difference is off by a normal vector of covariance C / N. By the triangle inequality its
    length is off by at most that vector's length, whose quantile is the half-width of the interval: it
    covers with `LEVEL` or more, and holds 0 exactly where the difference is within noise.

    Returns:
        kept_share: Rollouts kept / sampled.
        bias, bias_low, bias_high: |E[pruned] - E[full]| / |E[full]| and its interval.
        scale: Length of E[pruned] along E[full] / |E[full]|: the part of the bias that is a step size.
        direction: Cosine of E[pruned] and E[full]: the part that no step size mends.
        error: RMS of pruned - full / RMS of full. cosine: of pruned and full, mean over steps.
        push_P: Weight of right over weight of wrong rollouts, sum w A+ / sum w |A-|, by prompt: 1 in full
            groups, (1 - p) / p for one rollout per class of weight 1. None = one side has no weight.
    """
    pruned, kept, push_PK = [], [], np.zeros((2, *probs_PK.shape))
    for draw, groups in enumerate(draws):
        selections = select(groups, config, rng=np.random.default_rng([config.seed, seed, _CHOICES, draw]))
        gradient_PK, push = _gradient(config, groups, selections, probs_PK)
        pruned.append(gradient_PK.ravel())
        push_PK += np.maximum(push, 0), np.maximum(-push, 0)
        kept.append(np.mean([selection.keep_G.mean() for selection in selections]))
    pruned_ND = np.array(pruned)
    difference_ND = pruned_ND - full_ND
    exact_D = expected_gradient(probs_PK, draws[0][0].num_rollouts).ravel()
    mean_D = difference_ND.mean(0)
    variances = eigvalsh(np.cov(difference_ND.T) / len(draws)).clip(0)
    noise = np.random.default_rng([seed, _NOISE]).standard_normal((20_000, len(mean_D))) ** 2 @ variances
    length, bias, radius = norm(exact_D), norm(mean_D), np.sqrt(np.quantile(noise, LEVEL))
    along = (exact_D + mean_D) @ exact_D / length
    lengths_N = norm(full_ND, axis=1) * norm(pruned_ND, axis=1)
    cosines = (full_ND * pruned_ND).sum(1)[lengths_N > 0] / lengths_N[lengths_N > 0]
    return {
        "kept_share": float(np.mean(kept)),
        "bias": float(bias / length),
        "bias_low": float(max(0.0, bias - radius) / length),
        "bias_high": float((bias + radius) / length),
        "scale": float(along / length),
        "direction": float(along / norm(exact_D + mean_D)),
        "error": float(norm(difference_ND) / norm(full_ND)),
        "cosine": float(cosines.mean()),
        "push_P": [float(a / b) if min(a, b) > 0 else None for a, b in push_PK.sum(2).T],
    }


def _run(
    config: FastRLConfig, logits_PK: np.ndarray, rate: float, seed: int, num_steps: int, size: int
) -> dict[str, Any]:
    """Train the policy by plain gradient ascent through `FastRL`; rate 0 leaves it as it is.

    Returns:
        num_rollouts, kept: Per step, mean over the prompts, those that were skipped included.
        success: Per step, before it: exact mean success rate. success_P: of each prompt at the end.
        sampled, trained: Rollouts of the run; predicted_speedup: at the stages of Geo3K.
    """
    num_prompts, sampled, kept, success = len(logits_PK), [], [], []
    config = replace(config, max_empty_steps=10**9)  # a toy that has learnt all there is may go on
    epoch = max(1, num_steps // NUM_EPOCHS)
    frl = FastRL(config, num_rollouts=size, total_steps=num_steps, steps_per_epoch=epoch)
    for step in range(num_steps):
        probs_PK = softmax(logits_PK)
        success.append(float((probs_PK @ CORRECT_K).mean()))
        counts_P = frl.plan([str(p) for p in range(num_prompts)])
        groups = _sample(probs_PK, counts_P, np.random.default_rng([seed, _STEPS, step]), size)
        selections = frl.select(groups)
        sampled.append(int(counts_P.sum()))
        kept.append(sum(selection.num_kept for selection in selections))
        if groups:  # a step of which every prompt was skipped has nothing to learn from
            logits_PK = logits_PK + rate * _gradient(config, groups, selections, probs_PK)[0]
            frl.observe(groups, selections)
    full = num_steps * num_prompts * size
    shares = {"kept_share": sum(kept) / full, "rollout_share": sum(sampled) / full}
    return {
        "num_rollouts": [count / num_prompts for count in sampled],
        "kept": [count / num_prompts for count in kept],
        "success": success,
        "success_P": (softmax(logits_PK) @ CORRECT_K).tolist(),
        "sampled": sum(sampled),
        "trained": sum(kept),
        "predicted_speedup": speedup(PUBLISHED["Geo3K", "GRPO"], **shares),
    }
