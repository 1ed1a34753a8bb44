"""`FastRL`: one object around any trainer. Plan the rollouts, select among them, observe, repeat."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastrl.advantages import advantage_classes, group_advantages, is_zero_variance
from fastrl.batching import canonical_order
from fastrl.budgets import BUDGETS, Budget, check_keys, check_unchanged
from fastrl.config import FastRLConfig
from fastrl.pruners import PRUNERS, Pruner, keep_all, keep_none
from fastrl.refill import drop_surplus, num_prompts_at_first, num_prompts_missing
from fastrl.similarity import jaccard_distances, mean_similarity
from fastrl.types import ConfigError, Group, NoSignalError, Selection, StateError

STATE_VERSION = 1
_MIN_EMPTY_GROUPS = 64
"""Groups that a stretch of empty steps must also hold before it stops a run: with one prompt per
step, ten zero-variance groups in a row are nothing unusual."""
_NOT_DECIDING = ("max_empty_steps", "trace")
"""Settings that change no selection and no plan, so a resumed run may change them."""
_SIMILARITY_SAMPLE = 16
"""Groups of a step that the similarity metric looks at: enough for a mean, cheap enough for every step."""


class FastRL:
    """Pruning and budgeting for one run, around any trainer.

        frl = FastRL(FastRLConfig(), num_rollouts=8, total_steps=200, steps_per_epoch=8)
        counts = frl.plan(prompt_ids)                # rollouts to sample per prompt
        selections = frl.select(groups)              # what to train on
        frl.observe(groups, selections)              # history for the next plan

    A decision is a function of (config, seed, step, group content): not of the order of the groups,
    of ranks, or of the clock (but for the discovery budget, whose prices may be measured). `select` is pure;
    `observe` ends the step.

    Args:
        config: All settings.
        num_rollouts: G_1, the engine's own number of rollouts per prompt; never exceeded.
        total_steps: Steps of the run; needed by the ARS budget only.
        steps_per_epoch: Steps of an epoch; needed by the ARS budget only.

    Raises:
        ConfigError: num_rollouts below min_rollouts, max_rollouts above num_rollouts, or what the
            budget needs is missing.
    """

    def __init__(
        self,
        config: FastRLConfig | None = None,
        *,
        num_rollouts: int,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        self.config = config or FastRLConfig()
        if num_rollouts < self.config.min_rollouts:
            raise ConfigError(
                f"num_rollouts: the engine samples {num_rollouts} rollouts per prompt, below min_rollouts: "
                f"{self.config.min_rollouts}. A group needs at least two for a baseline: sample more."
            )
        if (self.config.max_rollouts or 0) > num_rollouts:
            raise ConfigError(
                f"max_rollouts: {self.config.max_rollouts} exceeds the engine's {num_rollouts} rollouts per prompt, "
                "which its memory and batch sizes are made for. Raise the engine's number, or lower max_rollouts."
            )
        self._num_rollouts = num_rollouts
        ceiling = self.config.max_rollouts or num_rollouts
        if (self.config.initial_rollouts or 0) > ceiling:
            raise ConfigError(
                f"initial_rollouts: {self.config.initial_rollouts} exceeds the {ceiling} rollouts per prompt that the "
                "engine samples at most. Raise the engine's number, or lower initial_rollouts."
            )
        kind = BUDGETS[self.config.budget]
        schedule = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
        options: dict[str, Any] = {**self.config.to_dict(), **schedule}
        self.budget: Budget = kind(num_rollouts=ceiling, **{name: options[name] for name in kind.options})
        self.step = 0
        self.empty_steps = 0
        self._empty_causes: Counter[str] = Counter()
        self._metrics: dict[str, float] = {}

    @property
    def denominator(self) -> str:
        """What the loss divides by. A method that drops nothing divides as the engine does."""
        return "full" if self.config.is_identity else self.config.denominator

    def rng(self, purpose: int = 0) -> np.random.Generator:
        """Return the generator of this step: the same on every rank and after a resume."""
        return np.random.default_rng([self.config.seed, self.step, purpose])

    def plan(self, prompt_ids: Sequence[str]) -> np.ndarray:
        """Return the (P,) numbers of rollouts to sample for the prompts of this step; 0 = skip this prompt.

        Only budgets that skip (per_prompt, greso) plan 0, and never for all prompts.
        """
        return self.budget.plan(prompt_ids, self.step)

    def num_prompts(self, num_prompts: int) -> int:
        """Return how many prompts this step should sample first, where the engine's batch has `num_prompts`.

        More than that under `refill: kept`; for an engine that cannot draw more prompts, ignore it.
        """
        return num_prompts_at_first(self.config.refill, num_prompts, self.config.keep_share)

    def num_prompts_missing(self, groups: Sequence[Group], num_prompts: int) -> int:
        """Return how many more prompts to sample in this step, given all its groups so far (`refill: signal`)."""
        has_signal_P = (_with_advantages(group).has_signal for group in groups)
        return num_prompts_missing(self.config.refill, num_prompts, has_signal_P)

    def with_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """As the function of this name."""
        return with_advantages(groups)

    def select(self, groups: Sequence[Group], *, num_prompts: int | None = None) -> list[Selection]:
        """Select what to train on: one selection per group, advantages computed where missing.

        Under budgets that give prompts different numbers of rollouts on purpose, weights also make every prompt
        count the same (`Budget.weights`).

        Args:
            groups: All groups of this step.
            num_prompts: Prompts of the engine's batch: under `refill: signal`, groups with signal beyond it are
                surplus. None = no bound.
        """
        selections = select(groups, self.config, rng=self.rng())
        if self.config.refill == "signal" and num_prompts is not None:
            selections = drop_surplus(self.with_advantages(groups), selections, num_prompts)
        factors_P = self.budget.weights(np.array([group.num_rollouts for group in groups]))
        return [
            selection if factor == 1.0 else replace(selection, weight_G=selection.weight_G * factor)
            for selection, factor in zip(selections, factors_P, strict=True)
        ]

    def observe(
        self,
        groups: Sequence[Group],
        selections: Sequence[Selection],
        *,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """End the step: feed the budget, update the metrics, count steps without signal.

        Args:
            groups: As given to `select`.
            selections: As returned by `select`, before any alignment.
            seconds: What the last finished step took: "generation" (with rewards), "update" (with log-probs),
                "step" (all). Only the discovery budget reads them; on several ranks, give all the same.

        Raises:
            NoSignalError: the last `max_empty_steps` steps, with at least 64 groups, had no signal. Never
                under a configuration that changes nothing: the engine would go on.
        """
        groups = self.with_advantages(groups)
        self.budget.observe(groups, selections, seconds=seconds)
        self._metrics = {
            **_summary(groups, selections),
            "similarity/mean_within_class": self._similarity(groups),
        }
        self.step += 1
        self._count_empty(groups)

    def _similarity(self, groups: Sequence[Group]) -> float:
        means = [
            mean_similarity(
                jaccard_distances(group.tokens_G, self.config.ngram),
                advantage_classes(_advantages(group), group.scorable_G, self.config.advantage_tol),
            )
            for group in (groups[p] for p in canonical_order(groups)[:_SIMILARITY_SAMPLE])
        ]
        return float(np.nanmean(means)) if not np.isnan(means).all() else float("nan")

    def _count_empty(self, groups: Sequence[Group]) -> None:
        causes = Counter(_cause(group) for group in groups)
        self.empty_steps = 0 if causes["signal"] else self.empty_steps + 1
        self._metrics["empty_steps"] = float(self.empty_steps)
        if causes["signal"]:
            self._empty_causes.clear()
            return
        self._empty_causes.update(causes)
        is_long = self._empty_causes.total() >= _MIN_EMPTY_GROUPS
        if self.empty_steps >= self.config.max_empty_steps and is_long and not self.config.is_identity:
            histogram = ", ".join(f"{count} {cause}" for cause, count in self._empty_causes.most_common())
            raise NoSignalError(
                f"{self.empty_steps} steps in a row had no group to learn from (max_empty_steps: "
                f"{self.config.max_empty_steps}). Groups of these steps: {histogram}. All correct: the data is too "
                "easy, or the reward saturated; all wrong: too hard, or the reward cannot parse the answers; "
                "unscorable: the reward functions return None. Look at some completions; raise "
                "max_empty_steps only if such stretches are expected."
            )

    def metrics(self) -> dict[str, float]:
        """Return what the last observed step looked like; its keys depend on the configuration alone."""
        return {**self._metrics, **self.budget.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """Return all state as JSON-ready values."""
        return {
            "version": STATE_VERSION,
            "config": self.config.to_dict(),
            "num_rollouts": self._num_rollouts,
            "step": self.step,
            "empty_steps": self.empty_steps,
            "empty_causes": dict(self._empty_causes),
            "budget": self.budget.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; strict about version, fields and configuration.

        Raises:
            StateError: another version, other fields, or a configuration that differs (all keys named).
        """
        if state.get("version") != STATE_VERSION:
            raise StateError(
                f"saved state has version {state.get('version')}, this FastRL reads version {STATE_VERSION}. "
                "Resume with the FastRL that wrote it."
            )
        check_keys(state, self.state_dict(), "FastRL run")
        saved = {"num_rollouts": state["num_rollouts"], **state["config"]}
        current = {"num_rollouts": self._num_rollouts, **self.config.to_dict()}
        for name in _NOT_DECIDING:
            saved.pop(name, None)
            current.pop(name)
        check_unchanged(saved, current)
        step, empty_steps = int(state["step"]), int(state["empty_steps"])
        causes = Counter({str(k): int(v) for k, v in state["empty_causes"].items()})
        # The budget is the last that can refuse: a refused state changes nothing.
        self.budget.load_state_dict(state["budget"])
        self.step, self.empty_steps, self._empty_causes = step, empty_steps, causes


def with_advantages(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with advantages over the full group, exactly 0 where there is no signal.

    The engine's own advantages stay as they are in groups with signal. Where the outcomes are
    all equal, A is 0 however the total reward was shaped; an unscorable rollout has A = 0.
    """
    return [_with_advantages(group) for group in groups]


def make_pruner(config: FastRLConfig) -> Pruner:
    """Build the configured pruner with the options it takes."""
    kind = PRUNERS[config.pruner]
    return kind(**{name: getattr(config, name) for name in kind.options})


def select(
    groups: Sequence[Group], config: FastRLConfig | None = None, *, rng: np.random.Generator | None = None
) -> list[Selection]:
    """Select what to train on in each group, without any run around it.

    Args:
        groups: Advantages are computed over the full group where the engine gave none.
        config: Defaults to the published setting.
        rng: Defaults to one seeded by config.seed.

    Returns:
        One selection per group, in the order of the groups; the order itself decides nothing.
    """
    config = config or FastRLConfig()
    rng = rng or np.random.default_rng(config.seed)
    order = canonical_order(groups)
    ready = [_with_advantages(groups[p]) for p in order]
    zero = [is_zero_variance(group.results_G) for group in ready]
    to_prune = [k for k, is_zero in enumerate(zero) if not (is_zero and config.zero_variance != "keep_one")]
    pruned = iter(make_pruner(config)([ready[k] for k in to_prune], rng=rng))
    chosen: list[Selection | None] = [None] * len(groups)
    for p, group, is_zero in zip(order, ready, zero, strict=True):
        if is_zero and config.zero_variance == "drop":
            selection = keep_none(group, reason="zero_variance")
        elif is_zero and config.zero_variance == "keep_all":
            selection = keep_all(group, reason="zero_variance")
        else:
            selection = next(pruned)
        chosen[p] = selection if group.scorable_G.any() else replace(selection, reason="unscorable")
    return [selection for selection in chosen if selection is not None]


def summarize(groups: Sequence[Group], selections: Sequence[Selection]) -> dict[str, float]:
    """Return what selections do to their groups, under the metric names of the documentation.

    Counts are per prompt and before any alignment; shares are of all rollouts.
    """
    return _summary(with_advantages(groups), selections)


def _summary(groups: Sequence[Group], selections: Sequence[Selection]) -> dict[str, float]:
    keep_N = np.concatenate([s.keep_G for s in selections])
    weight_N = np.concatenate([s.weight_G for s in selections])
    tokens_N = np.array([len(tokens) for group in groups for tokens in group.tokens_G])
    advantage_N = np.abs(np.concatenate([_advantages(group) for group in groups]))
    sampled_P = np.array([group.num_rollouts for group in groups])
    kept_P = np.array([s.num_kept for s in selections])
    kept_weights = weight_N[keep_N]
    return {
        "num_rollouts/mean": float(sampled_P.mean()),
        "num_rollouts/min": float(sampled_P.min()),
        "num_rollouts/max": float(sampled_P.max()),
        "kept/mean": float(kept_P.mean()),
        "kept/min": float(kept_P.min()),
        "kept/max": float(kept_P.max()),
        "kept/frac": float(keep_N.mean()),
        "kept/tokens_frac": float(tokens_N[keep_N].sum() / max(tokens_N.sum(), 1)),
        "frac_zero_variance": float(np.mean([is_zero_variance(group.results_G) for group in groups])),
        "frac_unscorable": float(np.mean(np.concatenate([~group.scorable_G for group in groups]))),
        "weight/max": float(weight_N.max()),
        "weight/effective_size": float(kept_weights.sum() ** 2 / max((kept_weights**2).sum(), 1e-300)),
        "advantage/abs_mean_all": float(advantage_N.mean()),
        "advantage/abs_mean_kept": float(advantage_N[keep_N].mean()) if keep_N.any() else 0.0,
    }


def _advantages(group: Group) -> np.ndarray:
    assert group.advantages_G is not None
    return group.advantages_G


def _with_advantages(group: Group) -> Group:
    if is_zero_variance(group.results_G):
        advantages_G = np.zeros(group.num_rollouts)
    elif group.advantages_G is None:
        advantages_G = group_advantages(group.rewards_G)
    else:
        advantages_G = np.where(group.scorable_G, group.advantages_G, 0.0)
    return replace(group, advantages_G=advantages_G)


def _cause(group: Group) -> str:
    """Why a group has no signal, in the words of the message that users read."""
    if not group.scorable_G.any():
        return "unscorable"
    if group.has_signal:
        return "signal"
    values = group.results_G
    if not is_zero_variance(values):
        return "without any advantage"
    return f"all at {np.nanmean(values):.3g}" if np.isfinite(values).any() else "unscorable"
