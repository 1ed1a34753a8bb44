"""Figures of the paper, to stand beside our own: another model, another machine, one seed. Never mixed with ours.

Source: "Learn from the Gap: Differential-Aware Advantage Pruning with Adaptive Rollout Sampling for GRPO",
arXiv 2609.36932, Tables 1, 2, 5, 7 and 8. Hours are wall clock of the whole run on H20 GPUs; accuracies are percent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastrl.config import FastRLConfig

SOURCE = "arXiv 2609.36932"
MARK = "published, another model and machine (7B, H20 GPUs, one seed)"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A base algorithm without and with FastRL: (in-domain, mean of four other benchmarks, hours) each, and speed."""

    data: str
    loss: str
    base: tuple[float, float, float]
    fastrl: tuple[float, float, float]
    speed: float


PAIRS = (
    Pair(data="Geo3K, 7B", loss="grpo", base=(53.74, 51.32, 29.72), fastrl=(55.90, 52.63, 13.87), speed=2.14),
    Pair(data="Geo3K, 7B", loss="dapo", base=(53.57, 51.35, 28.08), fastrl=(54.90, 53.08, 13.29), speed=2.11),
    Pair(data="Geo3K, 7B", loss="gspo", base=(52.41, 49.50, 26.33), fastrl=(54.57, 52.36, 12.84), speed=2.05),
    Pair(data="GeoQA, 7B", loss="grpo", base=(68.30, 52.31, 54.65), fastrl=(70.15, 53.59, 25.65), speed=2.13),
    Pair(data="GeoQA, 7B", loss="dapo", base=(67.90, 51.23, 53.22), fastrl=(70.29, 52.79, 24.62), speed=2.16),
    Pair(data="GeoQA, 7B", loss="gspo", base=(66.97, 51.39, 52.87), fastrl=(69.36, 52.48, 23.85), speed=2.22),
    Pair(
        data="Geo3K, Qwen3-VL-8B", loss="grpo",
        base=(78.87, 64.14, 30.05), fastrl=(80.03, 65.83, 16.37), speed=1.84,
    ),
    Pair(
        data="GeoQA, Qwen3-VL-8B", loss="grpo",
        base=(82.36, 62.92, 85.16), fastrl=(84.35, 64.50, 45.33), speed=1.88,
    ),
)  # fmt: skip
"""Tables 1 and 2."""

TAU: Mapping[float, Mapping[str, float]] = {
    0.0: {"in_domain": 53.74, "average": 51.32, "hours": 29.72},
    0.2: {"in_domain": 54.08, "average": 51.97, "hours": 29.33},
    0.4: {"in_domain": 54.58, "average": 52.18, "hours": 25.64},
    0.6: {"in_domain": 55.24, "average": 52.27, "hours": 21.26},
    0.8: {"in_domain": 55.90, "average": 52.63, "hours": 13.87},
    1.0: {"in_domain": 54.41, "average": 52.09, "hours": 12.65},
}
"""Table 8: Geo3K, 7B. Speed is hours at tau = 0 over hours at tau."""

ABLATION: Mapping[str, tuple[float, float]] = {
    "GRPO": (51.32, 1.0),
    "CPPO": (51.68, 1.60),
    "GRESO": (50.25, 1.09),
    "random pruning, 25 %": (51.78, 1.27),
    "random pruning, 50 %": (51.59, 1.60),
    "random pruning, 75 %": (50.08, 2.10),
    "advantage only": (52.09, 2.35),
    "FastRL without MDAP": (51.91, 1.15),
    "FastRL without ARS": (52.27, 2.06),
    "FastRL": (52.63, 2.14),
}
"""Table 5: Geo3K, 7B: (mean of four other benchmarks, speed)."""

STEP_S: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("Geo3K", "base"): {"total": 534.96, "update": 319.37, "old_ref": 125.58, "generation": 87.05},
    ("Geo3K", "fastrl"): {"total": 249.66, "update": 121.07, "old_ref": 47.61, "generation": 79.53},
    ("GeoQA", "base"): {"total": 423.10, "update": 240.95, "old_ref": 120.09, "generation": 60.41},
    ("GeoQA", "fastrl"): {"total": 198.58, "update": 100.82, "old_ref": 50.25, "generation": 46.07},
}
"""Table 7: seconds per step with GRPO; `old_ref` is the sum of the reference and the old policy."""

_NOT_COMPARED = {
    "trace", "seed", "rollout_cost", "align", "micro_batches", "updates", "share_prompt", "outcome_key",
    "max_empty_steps",
}  # fmt: skip
"""Settings that say how a method runs and is rewarded, not what it is."""


def ablation_name(fastrl: Mapping[str, Any] | None, trainer: Mapping[str, Any] | None = None) -> str | None:
    """The row of Table 5 that these settings are, or None.

    Args:
        fastrl: Settings as of `FastRLConfig.to_dict`; None = the trainer without FastRL.
        trainer: Settings of the trainer in which the method differs from the baseline.
    """
    if trainer:
        return None
    if fastrl is None:
        return "GRPO"
    default = FastRLConfig().to_dict()
    changed = {
        key: value for key, value in fastrl.items() if value != default.get(key) and key not in _NOT_COMPARED
    }
    share = changed.pop("keep_share", 0.5)
    pruner = changed.get("pruner")
    if pruner == "random" and set(changed) <= {"pruner", "budget"}:
        return {0.75: "random pruning, 25 %", 0.5: "random pruning, 50 %", 0.25: "random pruning, 75 %"}.get(
            share
        )
    rows: list[tuple[dict[str, Any], str]] = [
        ({}, "FastRL"),
        ({"budget": "fixed"}, "FastRL without ARS"),
        ({"pruner": "none"}, "FastRL without MDAP"),
        ({"pruner": "advantage_only", "budget": "fixed"}, "advantage only"),
    ]
    return next((name for settings, name in rows if settings == changed), _peer(changed))


def _peer(changed: Mapping[str, Any]) -> str | None:
    """CPPO and GRESO are recognized by what is theirs alone; what their papers leave open may differ."""
    if changed.get("pruner") == "top_advantage":
        return "CPPO"
    return "GRESO" if changed.get("budget") == "greso" else None
