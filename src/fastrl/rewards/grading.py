"""Is this answer right? Pure string work: nothing a model wrote is ever evaluated."""

import re
from fractions import Fraction

BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
NUMBER = re.compile(r"[+-]?(\d+/\d+|(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?)", re.ASCII | re.IGNORECASE)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced \boxed{...}, stripped; None if there is none.

    Braces nest, escaped braces (\{ and \}) do not count, a box that is never closed is passed over. Of
    boxes inside each other the innermost of the last is meant. Linear in the length of the text.
    """
    open_braces: list[re.Match[str]] = []
    last_start, content = -1, None
    for brace in BRACES.finditer(text):
        if brace[0].endswith("{") and brace[0] != r"\{":
            open_braces.append(brace)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and opening.start() > last_start:
                last_start, content = opening.start(), text[opening.end() : brace.start()].strip()
    return content


def grade_answer(prediction: str | None, gold: str) -> float:
    """Return 1.0 if the prediction is the gold answer, else 0.0.

    Equal means the same string once all whitespace is taken out, or the same number: 70 = 70.0 = 140/2.
    No prediction is a wrong one. Numbers are compared exactly, without rounding.
    """
    if prediction is None:
        return 0.0
    said, meant = "".join(prediction.split()), "".join(gold.split())
    if said == meant:
        return 1.0
    value = _number(said)
    return float(value is not None and value == _number(meant))


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text) if NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):  # more digits than int() reads, or a zero denominator
        return None
