r"""Grading as mathruler does, which EasyR1's `math` and `r1v` rewards use: to compare with numbers of theirs.

It is stricter than `grade` in form and blinder in units: fractions must be reduced, a whole gold answer wants a whole
number, English units and \text are cut away, other units make an answer unreadable, a rounded decimal is wrong.

Differs from mathruler in the engine: equality of expressions is decided by `fastrl.rewards.exact` and math-verify, in
bounded time, where mathruler asks sympy.simplify.
"""

import re

from fastrl.rewards import engine
from fastrl.rewards.exact import Unreadable, read_number
from fastrl.rewards.status import Grade, Status

_UNITS = re.compile(
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)(?:es|s)?"
    r"(?:\^\s*\{?\d+\}?)?"
)
_WRAPPERS = re.compile(
    r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}|\\left|\\right|(?<!\\)\\[!,; ]|\\%|[%$~]|\^\s*\{?\\circ\}?|\\circ"
)
_MIXED = re.compile(r"(?<=\d)(?=\\[dt]?frac)|(?<=\d)\s+(?=\d)")
_COMMAND = re.compile(r"\\[a-z]+|sqrt|pi")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_FRACTION = re.compile(r"-?\d+/\d+")
_FRAC = re.compile(r"\\[dt]?frac\s*\{(-?\d+)\}\s*\{(-?\d+)\}")


def grade_mathruler(prediction: str | None, gold: str) -> Grade:
    """Compare two answers as mathruler's `grade_answer` would; an empty gold answer cannot be read."""
    if not gold.strip():
        return Grade(Status.UNPARSABLE_GOLD)
    if prediction is None or not prediction.strip():
        return Grade(Status.NO_ANSWER)
    said, meant = _normalize(prediction), _normalize(gold)
    return Grade(Status.RIGHT if said == meant or _all_equal(said, meant) else Status.WRONG)


def _normalize(text: str) -> str:
    text = _MIXED.sub("+", _WRAPPERS.sub(lambda match: match[1] or "", text))
    text = (
        text.replace(" or ", ",")
        .replace(" and ", ",")
        .replace("million", "*10^6")
        .replace("billion", "*10^9")
    )
    text = _FRAC.sub(r"\1/\2", _THOUSANDS.sub("", _UNITS.sub("", text)))
    text = "".join(text.split()).lower()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    left, equals, right = text.partition("=")
    if equals and len(left) <= 2 and "=" not in right:
        text = right
    try:
        number = float(text)
        return str(round(number)) if abs(number - round(number)) <= 1e-7 else text
    except (ValueError, OverflowError):
        return text


def _all_equal(said: str, meant: str) -> bool:
    said_parts, meant_parts = _parts(said), _parts(meant)
    is_tuple = len(meant_parts) > 1
    if is_tuple and (said[:1], said[-1:]) != (meant[:1], meant[-1:]):
        return False
    if len(said_parts) != len(meant_parts):
        return False
    return all(_equal(a, b) for a, b in zip(said_parts, meant_parts, strict=True))


def _parts(text: str) -> list[str]:
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and "," in text:
        return [part.strip() for part in text[1:-1].split(",")]
    return text.split(",")


def _equal(said: str, meant: str) -> bool:
    if _FRACTION.fullmatch(said) and _FRACTION.fullmatch(meant):
        return said == meant  # an unreduced fraction is wrong there
    if _is_whole(meant) and not _is_whole(said):
        return False
    if any(sign in said + meant for sign in "√π") or _has_letters(said) != _has_letters(meant):
        return said == meant  # signs and letters that it cannot read
    try:
        return read_number(said) == read_number(meant)
    except Unreadable:
        pass
    if not said or len(said) > 100 or len(meant) > 100 or any(mark in said for mark in ("^{", "^(")):
        return said == meant  # mathruler, too, shuns exponents that are expressions
    return engine.compare(said, meant) is Status.RIGHT


def _has_letters(text: str) -> bool:
    return any(character.isalpha() for character in _COMMAND.sub("", text))


def _is_whole(text: str) -> bool:
    try:
        number = float(text)
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False
