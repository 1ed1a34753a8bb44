r"""From what stands in a box to an answer that can be compared: clean text, and a number with its unit."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from fastrl.rewards.exact import MAX_LENGTH, Exact, Unreadable, read_number
from fastrl.rewards.units import Unit, split_unit

_RAISED = str.maketrans(
    {"²": "^2", "³": "^3", "−": "-", "–": "-", "﹣": "-", "，": ",", "（": "(", "）": ")", "＝": "="}
)
_INVISIBLE = re.compile(r"[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\x00]")
_SPACING = re.compile(r"\\[,;:!> ]|\\q?quad|\\displaystyle|~|\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]]|\$")
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_MINUTES = re.compile(r"(?<!\d)(\d+)\s*[°º]\s*(\d+)\s*['′](?!\d)")
_SEVERAL = re.compile(r",|;|、|或|和|\bor\b|\band\b|\\pm|±|\\cup|\\in\b")
_STATES = re.compile(r"=|≈|\\approx|\bis\b|(?<=[A-Za-z])\s*:|：|是|为")
_SOLVED_FOR_MORE = re.compile(r"(?<![A-Za-z\\])\d\s*[a-z]\b")
_DECIMAL = re.compile(r"[+-]?\d*\.\d+")
_CHOICE = re.compile(
    r"(?:option|choice|answer)?\s*(?:\(([A-H])\)(?:\s.*)?|([A-H])(?:\s*[.:)].*)?)", re.DOTALL | re.IGNORECASE
)
_ENDS = " \t\n.。,;，；:"


@dataclass(frozen=True)
class Answer:
    """An answer as far as we can read it.

    Args:
        text: Cleaned, for comparing words and for engines that read more.
        value: The number; None where it is none that we read.
        unit: Its unit, if it names one.
        decimals: Shown digits behind the point, where the number is one plain decimal.
        digits: Significant digits shown, there.
        is_several: It lists several values.
    """

    text: str
    value: Exact | None = None
    unit: Unit | None = None
    decimals: int | None = None
    digits: int = 0
    is_several: bool = False


def clean(text: str) -> str:
    """Take out what changes no meaning: dollar signs, spacing, \\left and \\right, text wrappers, invisible marks."""
    text = _INVISIBLE.sub("", text).translate(_RAISED)
    for _ in range(3):  # wrappers inside wrappers
        text = _TEXT.sub(r" \1 ", text)
    text = " ".join(_SPACING.sub(" ", text).split())
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = _MINUTES.sub(lambda match: f"({match[1]}+{match[2]}/60)°", text)
    return text.strip().rstrip(_ENDS)


def read(text: str) -> Answer:
    """Read an answer. What is no number keeps its text alone.

    Where it states something ("x = 5", "the length is 5 cm", "a ≈ 22.7 m"), what follows the last such word counts.
    """
    cleaned = clean(text)
    if len(cleaned) > MAX_LENGTH:
        return Answer(cleaned)
    several = bool(_SEVERAL.search(cleaned))
    candidates = [cleaned] if several else [cleaned, *_stated(cleaned)]
    for candidate in candidates:
        number = _number(cleaned, candidate)
        if number is not None:
            return number
    return Answer(cleaned, is_several=several)


def is_unsolved(text: str) -> bool:
    """Whether an equation leaves work to do: 2x = 6 states nothing about 6."""
    *before, _ = _STATES.split(text)
    return any(map(_SOLVED_FOR_MORE.search, before))


def _stated(cleaned: str) -> list[str]:
    *before, last = _STATES.split(cleaned)
    return [last.strip()] if before and last.strip() and not is_unsolved(cleaned) else []


def _number(cleaned: str, candidate: str) -> Answer | None:
    body, unit = split_unit(candidate)
    for text, its_unit in ((body, unit), (candidate, None)):
        try:
            value = read_number(text)
        except Unreadable:
            continue
        plain = _DECIMAL.fullmatch(text.strip())
        decimals = len(text.strip().partition(".")[2]) if plain else None
        digits = len(Decimal(text.strip()).as_tuple().digits) if plain else 0
        return Answer(cleaned, value, its_unit, decimals, digits)
    return None


def choice_letter(text: str) -> str | None:
    """The letter of a choice: B, (b), "B. 45°", "option B"; None where the text is something else."""
    match = _CHOICE.fullmatch(clean(text))
    return (match[1] or match[2]).upper() if match else None


def equal_numbers(said: Answer, meant: Answer) -> bool:
    """Compare two numbers with their units.

    A unit that one of them does not name is taken to be the other's; units of different kinds contradict each other;
    units of one kind are converted. A decimal stands for all numbers that round to it, if it shows two decimals or
    three digits: 17.32 is 10√3, 0.33 is 1/3, 27.1 is not 27. From six decimals on, a relative 1e-6 passes: float noise.
    """
    if said.unit is not None and meant.unit is not None:
        if said.unit.dimension != meant.unit.dimension:
            return False
        ratio = said.unit.scale / meant.unit.scale
        return _equal(said, meant, ratio)
    if _equal(said, meant, Fraction(1)):
        return True
    named = said.unit or meant.unit
    if named is None or named.dimension != "percent":
        return False
    return _equal(said, meant, named.scale if said.unit else 1 / named.scale)  # 50 % is 0.5


def _equal(said: Answer, meant: Answer, ratio: Fraction) -> bool:
    value = said.value * Exact.of(ratio)  # type: ignore[operator]
    if value == meant.value:
        return True
    if ratio != 1:
        return False
    return _rounds_to(said, meant) or _rounds_to(meant, said)


def _rounds_to(shown: Answer, other: Answer) -> bool:
    """Whether a decimal is what the other number rounds to, at the digits that it shows."""
    if shown.decimals is None or (shown.decimals < 2 and shown.digits < 3):
        return False
    target, value = float(shown.value), float(other.value)  # type: ignore[arg-type]
    half = 0.5 * 10.0**-shown.decimals * (1 + 1e-9)
    noise = 1e-6 * abs(value) if shown.decimals >= 6 else 0.0
    return abs(target - value) <= max(half, noise)
