"""Rows of steps and evaluations in the shape that every part of a page reads.

A step: step, train_s, cpu_s, step_s, num_rollouts (G_t), generated_rows, trained_rows, generated_tokens,
trained_tokens, kept_frac, entropy, reward, stage_<name> in seconds. An evaluation: step, train_s, cpu_s,
generated_rows and trained_tokens so far, greedy, sampled, format, pass_at_k. What was not recorded is None.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.report.page.read import number

STAGES = ("generation", "rewards", "old_ref", "select", "update", "rest")
STEP = (
    "step", "train_s", "cpu_s", "step_s", "num_rollouts", "generated_rows", "trained_rows", "generated_tokens",
    "trained_tokens", "kept_frac", "entropy", "reward", *(f"stage_{stage}" for stage in STAGES),
)  # fmt: skip
EVALUATION = (
    "step", "train_s", "cpu_s", "generated_rows", "trained_tokens", "greedy", "sampled", "format", "pass_at_k",
)  # fmt: skip
_LOGGED = {
    "num_rollouts": "fastrl/num_rollouts/mean",
    "generated_rows": "fastrl/rollouts",
    "trained_rows": "fastrl/trained/rows",
    "trained_tokens": "fastrl/trained/tokens",
    "kept_frac": "fastrl/kept/frac",
}
"""Our column -> the key in metrics.jsonl; the others have their own name there."""


def step_row(logged: Mapping[str, Any]) -> dict[str, float | None]:
    """A row of metrics.jsonl as a step."""
    row = {name: number(logged.get(_LOGGED.get(name, name))) for name in STEP}
    for stage in STAGES[:-1]:
        row[f"stage_{stage}"] = number(logged.get(f"fastrl/time/{stage}_s"))
    timed = [row[f"stage_{stage}"] or 0.0 for stage in STAGES[:-1]]
    if row["step_s"] is not None and any(timed):
        row["stage_rest"] = max(0.0, row["step_s"] - sum(timed))
    length, num = number(logged.get("completions/mean_length")), row["generated_rows"]
    row["generated_tokens"] = None if length is None or num is None else length * num
    return row


def evaluation_rows(
    logged: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, float | None]]
) -> list[dict[str, float | None]]:
    """Rows of evaluations.jsonl, with what had been spent by then."""
    rows = []
    for line in logged:
        row = {name: number(line.get(name)) for name in EVALUATION}
        step = row["step"]
        before = [s for s in steps if s["step"] is not None and step is not None and s["step"] <= step]
        row["cpu_s"] = before[-1]["cpu_s"] if before else 0.0
        for name in ("generated_rows", "trained_tokens"):
            row[name] = total(before, name) if before else 0.0
        rows.append(row)
    return rows


def total(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """Sum of a column; None if nothing was recorded."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return float(sum(values)) if values else None


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is there; None of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def notes_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a log says on reliability: counts over its steps."""

    def values(key: str) -> list[float]:
        return [value for row in rows if (value := number(row.get(key))) is not None]

    non_finite = [row.get("step") for row in rows for value in row.values() if _is_non_finite(value)]
    return {
        "steps": len(rows),
        "empty_steps": sum(value > 0 for value in values("fastrl/empty_steps")),
        "unscorable": mean(values("fastrl/frac_unscorable")),
        "zero_variance": mean(values("fastrl/frac_zero_variance") or values("frac_reward_zero_std")),
        "top_up": mean(values("fastrl/top_up/frac")),
        "non_finite": len(set(non_finite)),
    }


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and number(value) is None
