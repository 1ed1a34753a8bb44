r"""Reward functions with TRL's signature, one for each part, so that a part alone can decide zero variance.

`accuracy_reward` and `format_reward` are the paper's (1 and 0.5) with <think> tags; `reward_functions` makes those of
any rule. All take plain strings or conversations and ignore columns they do not need. They raise on malformed input
and name the row; what a model wrote never makes them raise.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastrl.rewards.formats import has_format
from fastrl.rewards.grading import Grade
from fastrl.rewards.rules import RULES, Rule

RewardFunction = Callable[..., list[float | None]]


def reward_functions(rule: Rule) -> list[RewardFunction]:
    """The parts of a rule as reward functions for TRL, weights included: their sum is the rule's total.

    Named accuracy_reward, format_reward and overlong_reward, so `outcome_key: accuracy_reward` lets accuracy decide
    zero variance; parts that the rule does not have are left out. Where the gold answer (column `answer`) cannot be
    read, all parts are None: the rollout is unscorable, and no trainer counts it. What grading found is logged as
    shares `answers/<kind>`.
    """

    def accuracy_reward(
        completions: Sequence[Any], answer: Sequence[Any], log_metric: Any = None, **_: Any
    ) -> list[float | None]:
        _check_lengths(completions, answer)
        pairs = zip(texts(completions), answer, strict=True)
        found = [rule.grade(rule.extract(text), _gold(gold)) for text, gold in pairs]
        if log_metric is not None:
            for kind, share in shares(found).items():
                log_metric(f"answers/{kind}", share)
        return [None if grade.value is None else rule.accuracy_weight * grade.value for grade in found]

    def format_reward(
        completions: Sequence[Any], answer: Sequence[Any] | None = None, **_: Any
    ) -> list[float | None]:
        parts = [rule.format_weight * rule.format(text) for text in texts(completions)]
        return _where_scorable(parts, answer)

    def overlong_reward(
        completion_ids: Sequence[Sequence[int]], answer: Sequence[Any] | None = None, **_: Any
    ) -> list[float | None]:
        return _where_scorable([rule.overlong(len(ids)) for ids in completion_ids], answer)

    def _where_scorable(parts: list[float], answer: Sequence[Any] | None) -> list[float | None]:
        if answer is None:
            return list(parts)
        _check_lengths(parts, answer)
        readable = [rule.grade(None, _gold(gold)).value is not None for gold in answer]
        return [part if is_readable else None for part, is_readable in zip(parts, readable, strict=True)]

    functions: list[RewardFunction] = [accuracy_reward]
    if rule.has_format is not None:
        functions.append(format_reward)
    if rule.overlong_buffer:
        functions.append(overlong_reward)
    return functions


accuracy_reward, format_reward = reward_functions(replace(RULES["paper"], has_format=has_format))


def shares(grades: Sequence[Grade]) -> dict[str, float]:
    """How often each kind of grade occurred."""
    counts = Counter(grade.status.value for grade in grades)
    return {kind: count / len(grades) for kind, count in counts.items()}


def texts(completions: Sequence[Any]) -> list[str]:
    """The text of each completion: a string, or the content of the last message of a conversation.

    Raises:
        TypeError: a completion is neither; names its row.
    """
    return [_text(row, completion) for row, completion in enumerate(completions)]


def _text(row: int, completion: Any) -> str:
    content = completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        content = completion[-1].get("content") or ""
        if isinstance(content, list):  # blocks of a multimodal message
            content = "".join(block.get("text") or "" for block in content)
    if not isinstance(content, str):
        raise TypeError(
            f"completion {row} is {type(completion).__name__}: {str(completion)[:80]!r}; "
            "a string or a list of chat messages is needed."
        )
    return content


def _gold(answer: Any) -> str:
    return "" if answer is None else str(answer)


def _check_lengths(completions: Sequence[Any], answer: Sequence[Any]) -> None:
    if len(completions) != len(answer):
        raise ValueError(
            f"{len(completions)} completions came with {len(answer)} answers; one each is needed."
        )
