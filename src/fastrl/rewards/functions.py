r"""The paper's reward as two reward functions with TRL's signature.

    r = R_format (0.5: reasoning inside <think> tags, then the answer in \boxed{}) + R_accuracy (1 if right)

Both take plain strings or conversations and ignore columns they do not need. They raise on malformed
input and name the row; what a model wrote never makes them raise.
"""

import re
from collections.abc import Sequence
from typing import Any

from fastrl.rewards.grading import extract_boxed, grade_answer

FORMAT_REWARD = 0.5
ACCURACY_REWARD = 1.0
THINK_TAG = re.compile(r"</?think>")


def format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 0.5 for each completion in the format asked for, else 0.0."""
    return [FORMAT_REWARD * has_format(text) for text in _texts(completions)]


def accuracy_reward(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    r"""Return 1.0 for each completion whose last \boxed{} holds the gold answer, else 0.0.

    A gold answer that is None or empty cannot be scored: the result is None, which no trainer counts.
    """
    if len(completions) != len(answer):
        raise ValueError(
            f"{len(completions)} completions came with {len(answer)} answers; one each is needed."
        )
    return [
        None
        if gold is None or not str(gold).strip()
        else ACCURACY_REWARD * grade_answer(extract_boxed(text), str(gold))
        for text, gold in zip(_texts(completions), answer, strict=True)
    ]


def has_format(text: str) -> bool:
    r"""Tell whether a completion is one <think>...</think> with reasoning in it and then a filled \boxed{}.

    Words around the box are allowed, words before <think> and further think tags are not.
    """
    if THINK_TAG.findall(text) != ["<think>", "</think>"] or not text.lstrip().startswith("<think>"):
        return False
    reasoning, _, rest = text.lstrip().removeprefix("<think>").partition("</think>")
    return bool(reasoning.strip()) and bool(extract_boxed(rest))


def _texts(completions: Sequence[Any]) -> list[str]:
    """The text of each completion: a string, or the content of the last message of a conversation."""
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
