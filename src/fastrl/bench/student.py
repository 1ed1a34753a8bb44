"""Student's t distribution for whole degrees of freedom, in closed form. The standard library only."""

import math


def student_quantile(probability: float, freedom: int) -> float:
    """Return t with P(T <= t) = probability, by bisection to 1e-12.

    Args:
        probability: In (0, 1).
        freedom: Degrees of freedom, at least 1.

    Raises:
        ValueError: a probability or a number outside these.
    """
    if not (0 < probability < 1 and freedom >= 1):
        raise ValueError(
            f"student_quantile: probability {probability} at {freedom} degrees of freedom. It needs a probability "
            "within (0, 1) and at least one degree of freedom."
        )
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, freedom: int) -> float:
    """Return P(T <= t): Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even degrees of freedom)."""
    angle = math.atan(t / math.sqrt(freedom))
    cos_squared = math.cos(angle) ** 2
    is_odd = freedom % 2
    term, total = 1.0, 0.0
    for k in range((freedom - is_odd) // 2):  # 1, 1/2, 3/8, ... if even; 1, 2/3, 8/15, ... if odd
        total += term
        term *= cos_squared * (2 * k + 1 + is_odd) / (2 * k + 2 + is_odd)
    within = math.sin(angle) * total
    if is_odd:
        within = 2 / math.pi * (angle + math.cos(angle) * within)
    return (1 + within) / 2
