"""pass@k against every draw, and intervals over items against what they must cover."""

from itertools import combinations

import numpy as np
import pytest

from fastrl.bench.evaluate import powers_of_two
from fastrl.bench.items import estimate, pass_at_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n):
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(right, k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(draws)), (n, c, k)


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    p, n, k = 0.2, 8, 4
    found = [pass_at_k(n, int(c), k) for c in rng.binomial(n, p, size=20_000)]
    assert np.mean(found) == pytest.approx(1 - (1 - p) ** k, abs=4 * np.std(found) / np.sqrt(20_000))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_counts_that_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="sample more, or choose a smaller k"):
        pass_at_k(n, c, k)


def test_the_interval_has_the_width_of_a_mean():
    values = [1.0] * 300 + [0.0] * 100
    found = estimate(values, rng=np.random.default_rng(0))
    sigma = np.sqrt(0.75 * 0.25 / 400)
    assert found.mean == 0.75
    assert found.low == pytest.approx(0.75 - 1.96 * sigma, abs=0.004)
    assert found.high == pytest.approx(0.75 + 1.96 * sigma, abs=0.004)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = (rng.random((400, 100)) < 0.6).astype(float)
    found = [estimate(row, rng=np.random.default_rng(1), num_resamples=1000) for row in draws]
    covered = np.mean([e.low <= 0.6 <= e.high for e in found])
    assert 0.90 < covered < 0.985


def test_one_item_has_no_interval_and_none_is_an_error():
    found = estimate([1.0], rng=np.random.default_rng(0))
    assert found.mean == 1.0
    assert np.isnan(found.low)
    assert np.isnan(found.high)
    with pytest.raises(ValueError, match="at least one item"):
        estimate([], rng=np.random.default_rng(0))


def test_ks_are_powers_of_two_up_to_the_number_of_samples():
    assert [powers_of_two(n) for n in (0, 1, 2, 6, 16)] == [[], [1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]
