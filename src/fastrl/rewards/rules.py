r"""The published rule-based rewards, each written down once.

    total = accuracy_weight * accuracy + format_weight * format + overlong

| name | accuracy | format | of what |
|---|---|---|---|
| paper | 1 | 0.5 | \boxed{} after <thinking>...</thinking> (arXiv 2609.36932) |
| easyr1_math | 0.9 | 0.1 | \boxed{} after <think>, graded as mathruler does (EasyR1's `math`) |
| r1v | 0.5 | 0.5 | <think>...</think><answer>...</answer> (R1-V) |
| accuracy | 1 | 0 | the answer alone |

How an engine calls them: `fastrl.rewards.functions` (TRL), `.verl`, `.easyr1`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fastrl.rewards.formats import has_easyr1_format, has_r1v_format, has_thinking_format
from fastrl.rewards.grading import Grade, extract_answer, extract_boxed, grade
from fastrl.rewards.mathruler import grade_mathruler


@dataclass(frozen=True, kw_only=True)
class Score:
    """The parts of one completion's reward.

    Args:
        grade: What grading found.
        accuracy: 1 right, 0 wrong; None where the gold answer cannot be read.
        format: 1 in the format asked for, else 0.
        overlong: DAPO's penalty, in [-1, 0].
        total: The weighted sum; None where accuracy is.
    """

    grade: Grade
    accuracy: float | None
    format: float
    overlong: float
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One reward.

    Args:
        accuracy_weight, format_weight: Of the parts.
        has_format: Text -> is it in the format? None = the reward has no such part.
        extract: Text -> the answer that it states, or None.
        grade: (answer or None, gold) -> what grading found.
        overlong_buffer: Length of DAPO's soft punishment, in tokens before `max_tokens`; 0 = none.
        max_tokens: Most tokens of a completion.
    """

    accuracy_weight: float
    format_weight: float = 0.0
    has_format: Callable[[str], bool] | None = None
    extract: Callable[[str], str | None] = extract_answer
    grade: Callable[[str | None, str], Grade] = grade
    overlong_buffer: int = 0
    max_tokens: int = 0

    def with_overlong(self, buffer: int, max_tokens: int) -> "Rule":
        """The same reward with DAPO's soft punishment of `buffer` tokens; 0 = without.

        Raises:
            ValueError: the buffer is longer than a completion can be.
        """
        if not 0 <= buffer <= max_tokens:
            raise ValueError(
                f"overlong buffer: {buffer} is outside [0, {max_tokens}], the longest completion: every answer would "
                "be punished, also the empty one. Make it shorter."
            )
        return replace(self, overlong_buffer=buffer, max_tokens=max_tokens)

    def score(self, text: str, gold: str, num_tokens: int = 0) -> Score:
        """Score one completion of `num_tokens` tokens; the length matters to the overlong penalty alone."""
        found = self.grade(self.extract(text), gold)
        in_format, overlong = self.format(text), self.overlong(num_tokens)
        total = None
        if found.value is not None:
            total = self.accuracy_weight * found.value + self.format_weight * in_format + overlong
        return Score(grade=found, accuracy=found.value, format=in_format, overlong=overlong, total=total)

    def format(self, text: str) -> float:
        """1 in the format asked for, else 0; 0 where the reward has no such part."""
        return float(self.has_format is not None and self.has_format(text))

    def overlong(self, num_tokens: int) -> float:
        """DAPO's soft punishment (arXiv 2503.14476, Eq. 13): 0 down to -1 over the last `overlong_buffer` tokens."""
        if not self.overlong_buffer:
            return 0.0
        begin = self.max_tokens - self.overlong_buffer
        return -min(1.0, max(0.0, (num_tokens - begin) / self.overlong_buffer))


RULES: dict[str, Rule] = {
    "paper": Rule(
        accuracy_weight=1.0, format_weight=0.5, has_format=has_thinking_format, extract=extract_boxed
    ),
    "easyr1_math": Rule(
        accuracy_weight=0.9,
        format_weight=0.1,
        has_format=has_easyr1_format,
        extract=extract_boxed,
        grade=grade_mathruler,
    ),
    "r1v": Rule(accuracy_weight=0.5, format_weight=0.5, has_format=has_r1v_format),
    "accuracy": Rule(accuracy_weight=1.0),
}
