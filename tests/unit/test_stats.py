"""Statistics against closed forms, scipy and simulation."""

import math
from itertools import product

import numpy as np
import pytest
import scipy.integrate
import scipy.stats

from fastrl.bench.stats import (
    bootstrap,
    final_accuracy,
    iqm,
    mean_accuracy,
    paired_difference,
    paired_speedup,
    time_to_accuracy,
)
from fastrl.bench.student import student_quantile


def test_the_crossing_is_interpolated_between_evaluations():
    assert time_to_accuracy([(0, 0.2), (10, 0.6), (20, 0.8)], 0.5) == pytest.approx(7.5)
    assert time_to_accuracy([(0, 0.2), (10, 0.6), (20, 0.8)], 0.6) == pytest.approx(10.0)


def test_the_first_crossing_counts_even_if_the_curve_falls_again():
    assert time_to_accuracy([(0, 0.0), (10, 1.0), (20, 0.2), (30, 1.0)], 0.5) == pytest.approx(5.0)


def test_interpolation_starts_from_the_evaluation_before_not_from_the_best_one():
    assert time_to_accuracy([(0, 0.4), (10, 0.0), (20, 0.8)], 0.6) == pytest.approx(17.5)


def test_a_target_that_is_never_reached_has_no_time():
    assert time_to_accuracy([(0, 0.2), (10, 0.6)], 0.61) is None
    assert time_to_accuracy([], 0.5) is None


def test_a_target_that_is_met_before_training_takes_no_time():
    assert time_to_accuracy([(0, 0.6), (10, 0.9)], 0.5) == 0.0


def test_a_flat_curve_reaches_its_own_mean():
    curve = [(0.0, 0.1), *((t, 0.4) for t in (1.0, 2.0, 3.0))]
    assert np.mean([0.4] * 3) > 0.4  # by rounding
    assert time_to_accuracy(curve, final_accuracy(curve)) == pytest.approx(1.0)


def test_final_accuracy_is_the_mean_of_the_last_three():
    assert final_accuracy([(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9)]) == pytest.approx(0.6)
    assert final_accuracy([(0, 0.4)]) == pytest.approx(0.4)
    assert final_accuracy([(0, 0.3), (60, 0.9)]) == 0.9, "the untrained model is no result of training"
    with pytest.raises(ValueError, match="no evaluation"):
        final_accuracy([])


def test_the_ratio_is_a_geometric_mean_of_pairs():
    result = paired_speedup([8.0, 2.0], [2.0, 2.0], rng=np.random.default_rng(0))
    assert result.ratio == pytest.approx(2.0)
    # Swapping the roles inverts it, which an arithmetic mean of ratios would not do.
    swapped = paired_speedup([2.0, 2.0], [8.0, 2.0], rng=np.random.default_rng(0))
    assert swapped.ratio == pytest.approx(1 / result.ratio)


def test_the_interval_is_that_of_all_resamples():
    logs = np.log([1.0, 2.0, 4.0, 8.0])
    every = sorted(np.mean(sample) for sample in product(logs, repeat=4))  # the exact bootstrap distribution
    tail = scipy.stats.norm.cdf(scipy.stats.t.ppf(0.1, df=3) * math.sqrt(4 / 3))  # Hesterberg's expansion
    low, high = np.exp(np.quantile(every, [tail, 1 - tail]))
    result = paired_speedup(
        list(np.exp(logs)), [1.0] * 4, rng=np.random.default_rng(0), num_resamples=200_000, level=0.8
    )
    assert (result.low, result.high) == (pytest.approx(low, rel=0.01), pytest.approx(high, rel=0.01))


def test_student_quantiles_are_scipys():
    for freedom, probability in product(
        (1, 2, 3, 4, 5, 8, 9, 30, 101, 400), (0.001, 0.025, 0.3, 0.5, 0.9, 0.999)
    ):
        expected = scipy.stats.t.ppf(probability, freedom)
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_a_quantile_that_is_none_is_refused(probability: float, freedom: int):
    with pytest.raises(ValueError, match="degree of freedom"):
        student_quantile(probability, freedom)


def test_the_iqm_is_scipys_trimmed_mean():
    rng = np.random.default_rng(0)
    for num in range(1, 30):
        values = rng.normal(size=(7, num))
        assert iqm(values) == pytest.approx(scipy.stats.trim_mean(values, 0.25, axis=1))
    assert iqm(np.array([0.0, 1.0, 2.0, 1000.0])) == 1.5


def test_many_values_have_scipys_interval():
    values = np.random.default_rng(0).exponential(size=400)
    expected = scipy.stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    ).confidence_interval
    found = bootstrap([values], rng=np.random.default_rng(2), num_resamples=20_000)
    width = expected.high - expected.low
    assert found == pytest.approx((expected.low, expected.high), abs=0.04 * width)


def test_strata_are_resampled_within_themselves():
    """Two strata without spread of their own: resampled together they would have an interval, apart they have none."""
    apart = bootstrap([np.array([0.0, 0.0, 0.0]), np.array([1.0, 1.0, 1.0])], rng=np.random.default_rng(0))
    assert apart == (0.5, 0.5)
    low, high = bootstrap([np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])], rng=np.random.default_rng(0))
    assert low < 0.2 < 0.8 < high


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="at least two each"):
        bootstrap([np.array([1.0, 2.0]), np.array([1.0])], rng=np.random.default_rng(0))


@pytest.mark.parametrize(("num", "lowest"), [(5, 0.90), (20, 0.92)])
def test_coverage_is_near_what_is_promised(num: int, lowest: float):
    """Of 800 samples; two standard errors are 1.5 points. Plain percentiles cover 84 % at five values."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(800, num))
    bounds = [bootstrap([sample], rng=rng, num_resamples=1000) for sample in samples]
    assert lowest <= np.mean([low <= 0 <= high for low, high in bounds]) <= 0.97


def test_plain_percentiles_would_cover_too_little():
    rng = np.random.default_rng(0)
    means = [rng.choice(s, size=(1000, 5)).mean(axis=1) for s in rng.normal(size=(800, 5))]
    bounds = [np.quantile(resampled, [0.025, 0.975]) for resampled in means]
    assert np.mean([low <= 0 <= high for low, high in bounds]) < 0.88


def test_differences_are_paired():
    found = paired_difference([0.1, 0.5, 0.9], [0.2, 0.6, 1.0], rng=np.random.default_rng(0))
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match="paired by seed"):
        paired_difference([0.1], [], rng=np.random.default_rng(0))


def test_mean_accuracy_is_the_area_over_the_width():
    curve = [(0, 0.0), (10, 1.0)]
    assert mean_accuracy(curve, 10) == pytest.approx(0.5)
    assert mean_accuracy(curve, 5) == pytest.approx(0.25)
    assert mean_accuracy(curve, 20) == pytest.approx(0.75), "after its end a run stays where it is"
    times, accuracies = [0.0, 3.0, 4.0, 9.0], [0.2, 0.5, 0.4, 0.9]
    expected = scipy.integrate.trapezoid(accuracies, times) / 9
    assert mean_accuracy(list(zip(times, accuracies, strict=True)), 9) == pytest.approx(expected)


def test_equal_ratios_have_an_interval_without_width():
    result = paired_speedup([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], rng=np.random.default_rng(0))
    assert (result.low, result.ratio, result.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_is_a_function_of_the_generator():
    def interval(seed: int) -> tuple[float, float]:
        result = paired_speedup([3.0, 2.0, 5.0], [1.0, 2.0, 2.0], rng=np.random.default_rng(seed))
        return result.low, result.high

    assert interval(1) == interval(1)


def test_seeds_that_never_arrive_are_counted_and_left_out():
    result = paired_speedup([4.0, 4.0, None], [2.0, None, 1.0], rng=np.random.default_rng(0))
    assert (result.ratio, result.num_pairs, result.num_never) == (pytest.approx(2.0), 1, 2)
    assert math.isnan(result.low)
    assert math.isnan(result.high)


def test_no_pair_gives_no_number():
    result = paired_speedup([None], [1.0], rng=np.random.default_rng(0))
    assert math.isnan(result.ratio)
    assert result.num_never == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(bad: float):
    with pytest.raises(ValueError, match="positive seconds"):
        paired_speedup([bad], [1.0], rng=np.random.default_rng(0))


def test_unpaired_times_are_refused():
    with pytest.raises(ValueError, match="paired by seed"):
        paired_speedup([1.0, 2.0], [1.0], rng=np.random.default_rng(0))
