"""`fastrl analyze`: what pruning and adaptive budgets would have done to a run that is over. numpy, no model.

Every setting selects on the rollouts that were sampled. What it would have changed is not known: a policy trained on
survivors writes other rollouts. Predicted times follow the stage-time model (`bench.stage_model`) with its assumptions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fastrl.advantages import is_zero_variance
from fastrl.bench.logs import LoggedStep
from fastrl.bench.settings import UNBIASED
from fastrl.bench.stage_model import StageTimes, speedup
from fastrl.config import FastRLConfig
from fastrl.method import FastRL, select
from fastrl.types import NoSignalError

TAUS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def default_settings() -> dict[str, FastRLConfig]:
    """MDAP as published and unbiased at each tau, and the peers' pruners at their papers' shares."""
    published = {f"mdap, tau {tau:g}": FastRLConfig(tau=tau) for tau in TAUS}
    unbiased = {f"unbiased, tau {tau:g}": FastRLConfig(tau=tau, **UNBIASED) for tau in TAUS}
    peers = {
        "advantage_only": FastRLConfig(pruner="advantage_only"),
        "top_advantage (CPPO), 50 %": FastRLConfig(pruner="top_advantage", keep_share=0.5),
        "max_variance (PODS), 50 %": FastRLConfig(pruner="max_variance", keep_share=0.5),
        "random, 50 %": FastRLConfig(pruner="random", keep_share=0.5),
    }
    return {**published, **unbiased, **peers}


@dataclass
class _Tally:
    rollouts: int = 0
    tokens: int = 0
    groups: int = 0
    zero_variance: int = 0
    unscorable: int = 0
    steps: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)


def analyze(
    steps: Iterable[LoggedStep],
    settings: Mapping[str, FastRLConfig],
    stages: StageTimes,
    *,
    num_steps: int,
    steps_per_epoch: int | None = None,
) -> dict[str, Any]:
    """Return what each setting would have kept of a run, and what G_t budgets would have asked for.

    Args:
        steps: The log, one step at a time.
        settings: Name -> settings whose pruner is tried.
        stages: Seconds per step of the run.
        num_steps: Steps of the log, which ARS's schedule is made of.
        steps_per_epoch: For ARS, which changes G after each epoch; None = the whole log is one.

    Returns:
        JSON values: `run` (steps, groups, rollouts, tokens, shares, problems), `settings` (name -> kept_share,
        tokens_share, speedup), `budgets` (name -> G of each step), `stages`.
    """
    tally, kept, budgets = (
        _Tally(),
        {name: [0, 0] for name in settings},
        _Budgets(stages, num_steps, steps_per_epoch),
    )
    for step in steps:
        tally.problems.update(step.problems)
        if not step.groups:
            continue
        _count(tally, step.groups)
        for name, config in settings.items():
            selections = select(step.groups, config, rng=np.random.default_rng([config.seed, step.step]))
            for group, selection in zip(step.groups, selections, strict=True):
                lengths_G = np.array([len(tokens) for tokens in group.tokens_G])
                kept[name][0] += int(selection.keep_G.sum())
                kept[name][1] += int(lengths_G[selection.keep_G].sum())
        budgets.follow(step.groups)
    rollouts, tokens = max(tally.rollouts, 1), max(tally.tokens, 1)
    return {
        "run": {
            "steps": tally.steps,
            "groups": tally.groups,
            "rollouts": tally.rollouts,
            "tokens": tally.tokens,
            "rollouts_per_prompt": tally.sizes.most_common(1)[0][0] if tally.sizes else 0,
            "frac_zero_variance": tally.zero_variance / max(tally.groups, 1),
            "frac_unscorable": tally.unscorable / rollouts,
            "problems": dict(tally.problems),
        },
        "settings": {
            name: {
                "kept_share": num / rollouts,
                "tokens_share": num_tokens / tokens,
                "speedup": speedup(stages, kept_share=num / rollouts),
            }
            for name, (num, num_tokens) in kept.items()
        },
        "budgets": budgets.planned,
        "stages": asdict(stages),
    }


def _count(tally: _Tally, groups: Sequence[Any]) -> None:
    tally.steps += 1
    tally.groups += len(groups)
    for group in groups:
        tally.sizes[group.num_rollouts] += 1
        tally.rollouts += group.num_rollouts
        tally.tokens += sum(map(len, group.tokens_G))
        tally.unscorable += int((~group.scorable_G).sum())
        tally.zero_variance += is_zero_variance(group.results_G)


class _Budgets:
    """What budgets would ask for next, given the run's own rollouts: they never see those of their own G."""

    def __init__(self, stages: StageTimes, num_steps: int, steps_per_epoch: int | None) -> None:
        cost = max(stages.generation / max(stages.trained, 1e-9), 1e-6)
        self._configs = {
            "ars": FastRLConfig(max_empty_steps=10**9),
            "discovery": FastRLConfig(
                budget="discovery", rollout_cost=cost, max_empty_steps=10**9, **UNBIASED
            ),
        }
        self._schedule = {"total_steps": num_steps, "steps_per_epoch": steps_per_epoch or num_steps}
        self._methods: dict[str, FastRL] = {}
        self.planned: dict[str, list[float]] = {name: [] for name in self._configs}

    def follow(self, groups: Sequence[Any]) -> None:
        if not self._methods:
            size = max(group.num_rollouts for group in groups)
            self._methods = {
                name: FastRL(config, num_rollouts=size, **self._schedule)
                for name, config in self._configs.items()
            }
        for name, method in self._methods.items():
            ids = [group.prompt_id for group in groups]
            self.planned[name].append(float(np.mean(method.plan(ids))))
            try:
                method.observe(groups, method.select(groups))
            except NoSignalError:  # a run without signal is a finding of the table, not an end
                continue
