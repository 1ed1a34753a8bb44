"""Rewards with EasyR1's signature: one function for each rule, over a batch.

    worker.reward.reward_function="$(python -c 'import fastrl.rewards.easyr1 as m; print(m.__file__)'):paper"

`overall` is what EasyR1 trains on. An unreadable gold answer scores 0, as in `fastrl.rewards.verl`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastrl.rewards.rules import RULES, Rule
from fastrl.rewards.verl import parts

# Read by EasyR1 from the module that it loads.
REWARD_NAME = "fastrl"
REWARD_TYPE = "batch"


def compute_score_with(rule: Rule) -> Callable[..., list[dict[str, float]]]:
    """The `compute_score` of a rule, for a list of {response, response_length, ground_truth}.

    `overlong_buffer` and `max_response_length` (EasyR1's `reward_function_kwargs`) punish long responses softly.
    """

    def compute_score(
        reward_inputs: Sequence[dict[str, Any]],
        overlong_buffer: int = 0,
        max_response_length: int = 0,
        **_: Any,
    ) -> list[dict[str, float]]:
        soft = rule.with_overlong(overlong_buffer, max_response_length)
        scores = []
        for row in reward_inputs:
            gold = row["ground_truth"]
            found = parts(
                soft.score(row["response"], "" if gold is None else str(gold), row.get("response_length", 0))
            )
            scores.append({"overall": found.pop("total"), **found})
        return scores

    return compute_score


paper = compute_score_with(RULES["paper"])
easyr1_math = compute_score_with(RULES["easyr1_math"])
r1v = compute_score_with(RULES["r1v"])
accuracy = compute_score_with(RULES["accuracy"])
