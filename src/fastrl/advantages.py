"""Group advantages, the zero-variance test, and classes of equal advantage (paper, step 3 and Eq. 4)."""

import numpy as np

EQUAL_REWARDS_TOL = 1e-6
"""Rewards of a group that span less than this (relative to max(1, |r|)) are equal: the rest is the
rounding noise of float32 sums, which a division by a tiny standard deviation would blow up."""

STD_FLOOR = 1e-6
"""Smallest standard deviation that an advantage is divided by."""


def is_zero_variance(values_G: np.ndarray) -> bool:
    """Say whether a group has nothing to compare: all scorable values are equal, or fewer than two exist.

    Decided from the span of the values, not from their standard deviation: rounding noise makes
    "std > 0" true for equal rewards.

    Args:
        values_G: (G,) rewards or outcomes; NaN = unscorable, ignored.
    """
    values = values_G[~np.isnan(values_G)]
    if len(values) < 2:
        return True
    scale = max(1.0, float(np.abs(values).max()))
    return float(values.max() - values.min()) <= EQUAL_REWARDS_TOL * scale


def group_advantages(rewards_G: np.ndarray, *, scale: bool = True) -> np.ndarray:
    """Return the advantages of one full group.

        A_i = (r_i - mean(r)) / max(std(r), floor)                         (paper, step 3)

    The mean and the (Bessel-corrected) standard deviation are over the scorable rollouts. A is
    exactly 0 for all rollouts of a zero-variance group and for unscorable rollouts, and |A| is at
    most sqrt(G - 1).

    Differs from the paper: the floor under the standard deviation.

    Args:
        rewards_G: (G,) total rewards; NaN = unscorable.
        scale: False gives r_i - mean(r) (Dr. GRPO).
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    advantages_G = np.zeros_like(rewards_G)
    if is_zero_variance(rewards_G):
        return advantages_G
    scorable_G = ~np.isnan(rewards_G)
    rewards = rewards_G[scorable_G]
    std = max(float(rewards.std(ddof=1)), STD_FLOOR) if scale else 1.0
    advantages_G[scorable_G] = (rewards - rewards.mean()) / std
    return advantages_G


def advantage_classes(advantages_G: np.ndarray, scorable_G: np.ndarray, tol: float) -> list[list[int]]:
    """Partition the scorable rollouts of a group into classes of equal advantage.

        S_k = {o_i : |A_i - a_k| < tol},  a_k the advantage of the class's first member     (Eq. 4)

    Comparing with the first member keeps classes narrower than 2 tol: no chain of small steps
    can join advantages that differ.

    Args:
        advantages_G: (G,) advantages.
        scorable_G: (G,) bool; False rollouts belong to no class.
        tol: Width below which two advantages are the same.

    Returns:
        Lists of rollout indices in order of first appearance; each in sampling order.
    """
    classes: list[list[int]] = []
    values = advantages_G.tolist()
    for i in np.flatnonzero(scorable_G).tolist():
        for members in classes:
            if abs(values[i] - values[members[0]]) < tol:
                members.append(i)
                break
        else:
            classes.append([i])
    return classes
