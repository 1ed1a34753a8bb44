"""Time to an accuracy, paired speed-ups and differences, IQM, and intervals over seeds. numpy only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fastrl.bench.student import student_quantile

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


def mean_accuracy(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the mean accuracy over the first seconds of training: the area under the curve over its width.

    Between evaluations accuracy is linear in time; after the last one it stays. It rewards being good early
    and being good at the end, and needs no target.

    Args:
        curve: (seconds of training, accuracy in [0, 1]) pairs in the order of time, from second 0 on.
        seconds: Width; for a comparison, the same for all methods (the baseline's training time).
    """
    times, accuracies = np.array(curve, dtype=float).T
    inside = times[times < seconds]
    grid = np.append(inside, seconds)
    return float(np.trapezoid(np.interp(grid, times, accuracies), grid) / seconds)


def iqm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interquartile mean over the last axis: the mean without the lowest and the highest quarter.

    The 25 % trimmed mean (`scipy.stats.trim_mean(values, 0.25)`), as Agarwal et al. 2021 (arXiv 2108.13264) recommend
    for few runs: less variance than the median, less weight of outliers than the mean.

    Args:
        values: (..., N). floor(N / 4) values are cut on either side.
    """
    cut = values.shape[-1] // 4
    middle: NDArray[np.float64] = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    return middle.mean(axis=-1)


def mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the last axis, as a statistic of `bootstrap`."""
    return values.mean(axis=-1)


Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def bootstrap(
    strata: Sequence[NDArray[np.float64]],
    *,
    rng: np.random.Generator,
    statistic: Statistic = mean,
    num_resamples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Return the stratified bootstrap interval of a statistic: each stratum is resampled within itself.

    Expanded percentile interval (Hesterberg 2015, arXiv 1411.5279, section 5.3): the percentiles are those at which a
    normal interval would have the width of Student's, since plain percentiles of five seeds cover 84 % where
    they promise 95 %. With hundreds of values the two agree.

    Args:
        strata: Values of each stratum, such as the seeds of one loss; at least two in each.
        rng: The only source of chance.
        statistic: (..., all values) -> (...), over the strata joined in their order.
        num_resamples: Bootstrap samples.
        level: Coverage of the interval, in (0, 1).

    Raises:
        ValueError: a stratum with fewer than two values.
    """
    sizes = [len(stratum) for stratum in strata]
    if min(sizes, default=0) < 2:
        raise ValueError(
            f"bootstrap: strata of {sizes} values. One value says nothing about spread: give at least two each."
        )
    statistics = np.empty(num_resamples)
    for start in range(0, num_resamples, 100):  # 10,000 samples of 4,000 values at once would take 320 MB
        block = statistics[start : start + 100]
        drawn = [values[rng.integers(len(values), size=(len(block), len(values)))] for values in strata]
        block[:] = statistic(np.concatenate(drawn, axis=1))
    tail = _expanded_tail(sizes, level)
    low, high = np.quantile(statistics, [tail, 1 - tail])
    return float(low), float(high)


def _expanded_tail(sizes: Sequence[int], level: float) -> float:
    """The tail of the percentiles: Student's quantile, and n / (n - 1) for the variance that resampling lacks."""
    num, freedom = sum(sizes), sum(sizes) - len(sizes)
    return NormalDist().cdf(student_quantile((1 - level) / 2, freedom) * math.sqrt(num / freedom))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of paired differences (method - baseline) with a bootstrap interval; NaN bounds below two pairs."""

    mean: float
    low: float
    high: float


def paired_difference(
    baseline: Sequence[float], method: Sequence[float], *, rng: np.random.Generator, level: float = 0.95
) -> Difference:
    """Return the mean of method - baseline over seeds, in the same order, with its interval.

    Raises:
        ValueError: lengths that differ, or nothing.
    """
    if len(baseline) != len(method) or not baseline:
        raise ValueError(
            f"paired_difference: {len(baseline)} values of the baseline and {len(method)} of the method. They are "
            "paired by seed: give one of each per seed."
        )
    differences = np.array(method, dtype=float) - np.array(baseline, dtype=float)
    low = high = math.nan
    if len(differences) > 1:
        low, high = bootstrap([differences], rng=rng, level=level)
    return Difference(mean=float(differences.mean()), low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """A paired speed-up over seeds.

    Args:
        ratio: Geometric mean of baseline time / method time; NaN without any pair.
        low, high: Bootstrap interval over seeds (`bootstrap`); NaN with fewer than two pairs.
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

    exp(mean_s log(b_s / m_s)); seeds are resampled with replacement.

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
        bounds = bootstrap([logs], rng=rng, num_resamples=num_resamples, level=level)
        low, high = (math.exp(bound) for bound in bounds)
    return Speedup(
        ratio=float(np.exp(logs.mean())), low=low, high=high, num_pairs=len(pairs), num_never=num_never
    )
