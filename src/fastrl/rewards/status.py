"""What grading can find."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """One answer against its gold answer."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    UNPARSABLE_PREDICTION = "unparsable_prediction"
    OUT_OF_TIME = "out_of_time"
    UNPARSABLE_GOLD = "unparsable_gold"


@dataclass(frozen=True)
class Grade:
    """A status and what it is worth."""

    status: Status

    @property
    def value(self) -> float | None:
        """1 for a right answer, None where the gold answer cannot be read, else 0."""
        if self.status is Status.UNPARSABLE_GOLD:
            return None
        return float(self.status is Status.RIGHT)
