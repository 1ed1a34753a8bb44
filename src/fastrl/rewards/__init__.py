"""Rule-based rewards: is the answer right, and is it in the format that was asked for?"""

from fastrl.rewards.formats import has_format
from fastrl.rewards.functions import accuracy_reward, format_reward, reward_functions
from fastrl.rewards.grading import extract_answer, extract_boxed, grade, grade_answer
from fastrl.rewards.rules import RULES

__all__ = [
    "RULES",
    "accuracy_reward",
    "extract_answer",
    "extract_boxed",
    "format_reward",
    "grade",
    "grade_answer",
    "has_format",
    "reward_functions",
]
