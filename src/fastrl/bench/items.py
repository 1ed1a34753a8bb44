"""Accuracy over the items of a benchmark: pass@k, and how much it owes to the items that were drawn. numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

from fastrl.bench.stats import bootstrap


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that k of the samples, drawn without replacement, hold a right one (Chen et al. 2021, Eq. 1).

    1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k from n >= k samples.

    Args:
        num_samples: n, answers sampled for the item.
        num_right: c, right ones among them.
        k: Draws.

    Raises:
        ValueError: k above n, or counts that cannot be.
    """
    if not (0 <= num_right <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass_at_k: {num_right} right of {num_samples} samples at k = {k}. It needs 0 <= right <= samples and "
            "1 <= k <= samples: sample more, or choose a smaller k."
        )
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over items with a bootstrap interval over items; NaN bounds with fewer than two."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float], *, rng: np.random.Generator, num_resamples: int = 10_000) -> Estimate:
    """Mean of one value per item, with its 95 % interval.

    Args:
        values: One per item, such as 0 or 1, or pass@k; for a difference of two models, their paired differences.
        rng: The only source of chance.
        num_resamples: Bootstrap samples of items.
    """
    array: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"estimate: values of shape {array.shape}; one per item, and at least one item, is needed."
        )
    if len(array) == 1:
        return Estimate(mean=float(array[0]), low=float("nan"), high=float("nan"))
    low, high = bootstrap([array], rng=rng, num_resamples=num_resamples)
    return Estimate(mean=float(array.mean()), low=low, high=high)
