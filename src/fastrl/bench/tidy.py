"""Tidy tables of a comparison: one parquet file each of runs, of steps and of evaluations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fastrl.bench.cells import STEP_COLUMNS
from fastrl.bench.stats import final_accuracy

Key = tuple[str, str, int]


def write_tidy(out: Path, cells: Mapping[Key, Mapping[str, Any]]) -> None:
    """Write runs.parquet, steps.parquet and evaluations.parquet; each row names its loss, method and seed.

    Args:
        out: Folder.
        cells: Finished cells by (loss, method, seed).
    """
    rows: dict[str, list[dict[str, Any]]] = {"runs": [], "steps": [], "evaluations": []}
    for (loss, method, seed), cell in cells.items():
        names = {"loss": loss, "method": method, "seed": seed}
        rows["runs"].append({**names, **run_row(cell)})
        rows["steps"] += [{**names, **row} for row in step_rows(cell)]
        rows["evaluations"] += [{**names, **row} for row in evaluation_rows(cell)]
    for name, content in rows.items():
        if content:
            path = out / f"{name}.parquet"
            pq.write_table(pa.Table.from_pylist(content), path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)


def run_row(cell: Mapping[str, Any]) -> dict[str, Any]:
    """One row for a run: seconds, final accuracies, rollouts and tokens, seconds of each stage."""
    summary, steps = cell["summary"], step_rows(cell)
    last = cell["evaluations"][-1] if cell["evaluations"] else {}
    return {
        "num_updates": summary["num_steps"],
        "train_s": summary["train_s"],
        "cpu_s": summary["cpu_s"],
        "step_s": summary["step_s"],
        **{
            kind: final_accuracy([(row["train_s"], row[kind]) for row in cell["evaluations"]])
            for kind in ("greedy", "sampled")
            if cell["evaluations"]
        },
        "pass_at_k": last.get("pass_at_k"),
        "generated_rows": summary["rollouts"]["generated"],
        "trained_rows": summary["rollouts"]["trained"],
        "generated_tokens": sum(row["generated_tokens"] for row in steps),
        "trained_tokens": sum(row["trained_tokens"] or 0 for row in steps),
        "num_rollouts": mean_num_rollouts(cell),
        **{f"stage_{stage}": seconds for stage, seconds in summary["stage_s"].items()},
    }


def mean_num_rollouts(cell: Mapping[str, Any]) -> float:
    """Mean G_t of a cell's rounds; only the first update of a round logs it."""
    logged = [row["num_rollouts"] for row in cell["steps"] if row["num_rollouts"] is not None]
    return float(sum(logged) / len(logged))


def step_rows(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell's steps, with the tokens that were generated for each."""
    return [
        {
            **{column: row.get(column) for column in STEP_COLUMNS},
            "generated_tokens": (row["generated_rows"] or 0) * (row["completion_length"] or 0),
        }
        for row in cell["steps"]
    ]


def evaluation_rows(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell's evaluations, with what had been generated and trained on until each."""
    steps, rows = step_rows(cell), []
    for row in cell["evaluations"]:
        before = steps[: row["step"]]
        rows.append(
            {
                **{key: row[key] for key in ("step", "train_s", "cpu_s", "greedy", "sampled", "format")},
                "pass_at_k": row.get("pass_at_k"),
                "generated_rows": sum(step["generated_rows"] or 0 for step in before),
                "generated_tokens": sum(step["generated_tokens"] for step in before),
                "trained_rows": sum(step["trained_rows"] or 0 for step in before),
                "trained_tokens": sum(step["trained_tokens"] or 0 for step in before),
            }
        )
    return rows
