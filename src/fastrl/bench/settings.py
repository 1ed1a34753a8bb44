"""Settings that comparisons go through: every pruner as published, and unbiased where it can be."""

from typing import Any

from fastrl.config import FastRLConfig
from fastrl.pruners import PRUNERS

UNBIASED: dict[str, Any] = {
    "weighting": 1.0, "representative": "random", "denominator": "full", "zero_variance": "drop", "align": "dummy",
}  # fmt: skip
ALL_ROLLOUTS: dict[str, Any] = {
    "tau": 0.0, "zero_variance": "keep_all", "denominator": "full", "budget": "fixed",
}  # fmt: skip
"""Nothing dropped, yet not the identity, which leaves prompts unshared in log-probs and update."""


def every_pruner() -> dict[str, FastRLConfig]:
    """Return every pruner as published and, where it takes weights, unbiased; all at a fixed budget."""
    configs = {}
    for name, kind in PRUNERS.items():
        configs[name] = FastRLConfig(pruner=name, budget="fixed")
        if "weighting" in kind.options:
            configs[f"{name}, unbiased"] = FastRLConfig(pruner=name, budget="fixed", **UNBIASED)
    return configs
