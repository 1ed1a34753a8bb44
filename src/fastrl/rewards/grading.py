r"""Is this answer right? The heart of the reward: a wrong grader trains a wrong model. See docs/grading.md.

    grade(r"4\sqrt{3} cm", "4√{3}cm").status      # Status.RIGHT
    grade_answer("17.3 m", "10√{3}m")             # 1.0
    grade_answer("5 m", "5cm")                    # 0.0
    grade_answer("5", "")                         # None: the gold answer cannot be read

Most answers are a number with or without a unit: read exactly and without sympy. The rest goes to math-verify, in a
process that can be killed. Works in any thread, without signals; nothing a model wrote is ever evaluated.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from fastrl.rewards import engine
from fastrl.rewards.exact import MAX_LENGTH
from fastrl.rewards.extraction import extract_answer, extract_boxed
from fastrl.rewards.reading import Answer, choice_letter, equal_numbers, is_unsolved, read
from fastrl.rewards.status import Grade, Status

__all__ = ["Grade", "Status", "extract_answer", "extract_boxed", "grade", "grade_answer"]

_WORDS = re.compile(r"[^\W\d_]+(?:[\s\-'’]+[^\W\d_]+)*")
_HOSTILE = re.compile(
    r"\d{31}|!|(?:\^|\*\*)\s*\{?\s*[({]*\s*-?\s*\d{3}|(?:\^|\*\*)[^+\-*/=]{0,12}(?:\^|\*\*)"
)
_MAX_NESTING = 12


def grade_answer(prediction: str | None, gold: str, choices: Sequence[str] | None = None) -> float | None:
    """Return 1.0 if the prediction is the gold answer, 0.0 if not, None if the gold answer cannot be read."""
    return grade(prediction, gold, choices).value


def grade(prediction: str | None, gold: str, choices: Sequence[str] | None = None) -> Grade:
    """Compare an answer with the right one.

    Args:
        prediction: What a completion states (`extract_answer`); None = nothing.
        gold: The right answer.
        choices: Texts of the choices A, B, ...: then a letter stands for its text, on both sides.
    """
    return Grade(_status(prediction, gold, tuple(choices or ())))


def _status(prediction: str | None, gold: str, choices: tuple[str, ...]) -> Status:
    if choices:
        gold = _of_choice(gold, choices)
        prediction = prediction if prediction is None else _of_choice(prediction, choices)
    if not _is_readable(gold):
        return Status.UNPARSABLE_GOLD
    if prediction is None or not prediction.strip():
        return Status.NO_ANSWER
    if "".join(prediction.split()) == "".join(gold.split()):
        return Status.RIGHT
    said, meant = _read(prediction), _read(gold)
    if said.value is not None and meant.value is not None:
        return Status.RIGHT if equal_numbers(said, meant) else Status.WRONG
    if said.text.casefold() == meant.text.casefold():
        return Status.RIGHT
    letter = choice_letter(gold)
    if letter is not None and not choices:
        return Status.RIGHT if choice_letter(prediction) == letter else Status.WRONG
    if said.is_several != meant.is_several or _WORDS.fullmatch(meant.text):
        return Status.WRONG
    if is_unsolved(said.text) and not is_unsolved(meant.text):
        return Status.WRONG
    if _is_hostile(said.text):
        return Status.UNPARSABLE_PREDICTION
    found = engine.compare(said.text, meant.text)
    # A gold answer that we read, such as 45°, is readable, also where math-verify does not read it.
    return Status.UNPARSABLE_PREDICTION if found is Status.UNPARSABLE_GOLD else found


def _of_choice(text: str, choices: tuple[str, ...]) -> str:
    letter = choice_letter(text)
    index = -1 if letter is None else ord(letter) - ord("A")
    return choices[index] if 0 <= index < len(choices) else text


@lru_cache(maxsize=16384)
def _read(text: str) -> Answer:
    return read(text)


@lru_cache(maxsize=16384)
def _is_readable(gold: str) -> bool:
    """A number, words, or something that math-verify reads."""
    meant = _read(gold)
    if meant.value is not None:
        return True
    if not meant.text or _is_hostile(meant.text):
        return False
    if _WORDS.fullmatch(meant.text):
        return True
    return engine.compare(None, meant.text) is not Status.UNPARSABLE_GOLD


def _is_hostile(text: str) -> bool:
    """Long, deep or high: what no right answer looks like, and what symbolic engines choke on."""
    if len(text) > MAX_LENGTH or _HOSTILE.search(text):
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest > _MAX_NESTING
