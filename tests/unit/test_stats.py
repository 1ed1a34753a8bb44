"""Statistics against closed forms: no scipy is needed to know the answers."""

import math
from itertools import product

import numpy as np
import pytest

from fastrl.bench.stats import final_accuracy, paired_speedup, time_to_accuracy


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
    low, high = np.exp(np.quantile(every, [0.05, 0.95]))
    result = paired_speedup(
        list(np.exp(logs)), [1.0] * 4, rng=np.random.default_rng(0), num_resamples=200_000, level=0.9
    )
    assert (result.low, result.high) == (pytest.approx(low, rel=0.01), pytest.approx(high, rel=0.01))


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
