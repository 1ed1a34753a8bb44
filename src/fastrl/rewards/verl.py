"""Rewards with verl's signature: one function for each rule.

    reward.custom_reward_function.path=pkg://fastrl.rewards.verl reward.custom_reward_function.name=paper

`score` is what verl trains on; the parts are logged beside it, and `+fastrl.outcome_key=accuracy` lets accuracy decide
zero variance. An unreadable gold answer scores 0 for every rollout of its prompt, which is no signal, and is counted as
`unscorable`: verl has no word for a reward that does not exist.
"""

from collections.abc import Callable
from typing import Any

from fastrl.rewards.grading import Status
from fastrl.rewards.rules import RULES, Rule, Score


def parts(score: Score) -> dict[str, float]:
    """A score as the flat numbers that verl and EasyR1 log; `total` is 0 where the gold answer cannot be read."""
    return {
        "total": score.total or 0.0,
        "accuracy": score.accuracy or 0.0,
        "format": score.format,
        "overlong": score.overlong,
        "no_answer": float(score.grade.status is Status.NO_ANSWER),
        "unscorable": float(score.total is None),
    }


def compute_score_with(rule: Rule) -> Callable[..., dict[str, float]]:
    """The `compute_score` of a rule, for one completion."""

    def compute_score(
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, float]:
        found = parts(rule.score(solution_str, "" if ground_truth is None else str(ground_truth)))
        return {"score": found.pop("total"), **found}

    return compute_score


paper = compute_score_with(RULES["paper"])
easyr1_math = compute_score_with(RULES["easyr1_math"])
r1v = compute_score_with(RULES["r1v"])
accuracy = compute_score_with(RULES["accuracy"])
