"""Time to an accuracy, and paired speed-ups with an interval over seeds. numpy only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_LAST = 3
"""Evaluations whose mean is called the final accuracy of a run: one alone is too noisy."""

_ROUNDING = 1e-9
"""The mean of three equal accuracies may come out a little above them."""


def final_accuracy(curve: Sequence[tuple[float, float]], num_last: int = NUM_LAST) -> float:
    """Return the mean accuracy of the last evaluations of a run, the one before training left out.

    Args:
        curve: (seconds of training, accuracy in [0, 1]) pairs in the order of time; the first is the
            untrained model. If there is no other, its accuracy is returned.
        num_last: Evaluations to average; fewer if the curve is shorter.
    """
    if not curve:
        raise ValueError("final_accuracy: the curve has no evaluation. Evaluate at least once.")
    trained = curve[1:] or curve
    return float(np.mean([accuracy for _, accuracy in trained[-num_last:]]))


def time_to_accuracy(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the seconds of training at which a curve first reaches a target; None if it never does.

    The first evaluation at or above the target counts, even if a later one falls below again: the same
    rule for every method. Between it and the evaluation before, accuracy is taken as linear in time.
    A finer evaluation schedule gives noise more chances to cross, so compare equal schedules only.

    Args:
        curve: (seconds of training, accuracy in [0, 1]) pairs in the order of time.
        target: Accuracy in [0, 1].
    """
    before: tuple[float, float] | None = None
    for seconds, accuracy in curve:
        if accuracy >= target - _ROUNDING:
            if before is None:
                return float(seconds)
            start, low = before
            return float(start + (seconds - start) * min(1.0, (target - low) / (accuracy - low)))
        before = (seconds, accuracy)
    return None


def bootstrap_mean(
    values: np.ndarray, *, rng: np.random.Generator, num_resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a mean: values are resampled with replacement.

    Args:
        values: (N,) at least two.
        rng: The only source of chance.
        num_resamples: Bootstrap samples.
        level: Coverage of the interval, in (0, 1).
    """
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, 100):  # 10,000 samples of 4,000 values at once would take 320 MB
        block = means[start : start + 100]
        block[:] = values[rng.integers(len(values), size=(len(block), len(values)))].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A paired speed-up over seeds.

    Args:
        ratio: Geometric mean of baseline time / method time; NaN without any pair.
        low, high: Bootstrap percentile interval over seeds; NaN with fewer than two pairs.
        num_pairs: Seeds in which both reached the target.
        num_never: Seeds in which one of them never did: left out of the ratio, so always quote it too.
    """

    ratio: float
    low: float
    high: float
    num_pairs: int
    num_never: int


def paired_speedup(
    baseline_times: Sequence[float | None],
    method_times: Sequence[float | None],
    *,
    rng: np.random.Generator,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> Speedup:
    """Return the geometric mean of baseline / method times, paired by seed, with a bootstrap interval.

    exp(mean_s log(b_s / m_s)); seeds are resampled with replacement. With five seeds a percentile
    interval is somewhat too narrow; it says how much seeds differ, not more.

    Args:
        baseline_times, method_times: Seconds by seed, in the same order; None = never reached.
        rng: The only source of chance.
        num_resamples: Bootstrap samples.
        level: Coverage of the interval, in (0, 1).

    Raises:
        ValueError: lengths that differ, or a time that is not positive and finite.
    """
    if len(baseline_times) != len(method_times):
        raise ValueError(
            f"paired_speedup: {len(baseline_times)} baseline times and {len(method_times)} method times. Times "
            "are paired by seed: give one of each per seed, None where the target was never reached."
        )
    pairs = [
        (b, m) for b, m in zip(baseline_times, method_times, strict=True) if b is not None and m is not None
    ]
    for time in (time for pair in pairs for time in pair):
        if not (math.isfinite(time) and time > 0):
            raise ValueError(f"paired_speedup: a time of {time} s has no ratio. Times are positive seconds.")
    num_never = len(baseline_times) - len(pairs)
    if not pairs:
        return Speedup(ratio=math.nan, low=math.nan, high=math.nan, num_pairs=0, num_never=num_never)
    logs = np.log([b / m for b, m in pairs])
    low = high = math.nan
    if len(pairs) > 1:
        bounds = bootstrap_mean(logs, rng=rng, num_resamples=num_resamples, level=level)
        low, high = (math.exp(bound) for bound in bounds)
    return Speedup(
        ratio=float(np.exp(logs.mean())), low=low, high=high, num_pairs=len(pairs), num_never=num_never
    )
