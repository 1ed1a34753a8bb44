"""Rule-based rewards: is the answer right, and is it in the format that was asked for?"""

from fastrl.rewards.functions import accuracy_reward, format_reward, has_format
from fastrl.rewards.grading import extract_boxed, grade_answer

__all__ = ["accuracy_reward", "extract_boxed", "format_reward", "grade_answer", "has_format"]
