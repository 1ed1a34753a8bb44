"""Rollout records on disk: what was sampled, what it earned, and what became of it.

One record per rollout, as JSON lines (appended step by step) or parquet (one file per write):

    version, step, group (index in the step), prompt_id, rollout (index in the group),
    num_rollouts (of the group), tokens, reward, outcome, has_outcome, advantage, keep, weight, cluster, reason

A reward that is NaN is written as null. Nothing in a record is ever executed.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.types import FastRLError, Group, Selection

RECORD_VERSION = 1
_FIELDS = (
    "version", "step", "group", "prompt_id", "rollout", "num_rollouts", "tokens", "reward", "outcome", "advantage",
    "has_outcome", "keep", "weight", "cluster", "reason",
)  # fmt: skip


def rollout_records(
    groups: Sequence[Group], selections: Sequence[Selection], *, step: int
) -> Iterator[dict[str, Any]]:
    """Yield one JSON-ready record per rollout of a step."""
    for p, (group, selection) in enumerate(zip(groups, selections, strict=True)):
        for i in range(group.num_rollouts):
            yield {
                "version": RECORD_VERSION,
                "step": step,
                "group": p,
                "prompt_id": group.prompt_id,
                "rollout": i,
                "num_rollouts": group.num_rollouts,
                "tokens": [int(token) for token in group.tokens_G[i]],
                "reward": _plain(group.rewards_G, i),
                "outcome": _plain(group.outcomes_G, i),
                "has_outcome": group.outcomes_G is not None,
                "advantage": _plain(group.advantages_G, i),
                "keep": bool(selection.keep_G[i]),
                "weight": float(selection.weight_G[i]),
                "cluster": int(selection.cluster_G[i]),
                "reason": selection.reason,
            }


def write_rollouts(
    path: str | Path, groups: Sequence[Group], selections: Sequence[Selection], *, step: int
) -> None:
    """Write the records of a step: appended to a `.jsonl` file, or as a new `.parquet` file.

    Raises:
        FastRLError: another suffix, or a parquet file that exists.
    """
    path = Path(path)
    records = rollout_records(groups, selections, step=step)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    elif path.suffix == ".parquet":
        _write_parquet(path, records)
    else:
        raise FastRLError(f"{path}: rollout records are written as .jsonl or .parquet, not {path.suffix!r}.")


def forget_steps(path: str | Path, *, from_step: int) -> None:
    """Remove the lines of a `.jsonl` file from a step on: a resumed run does those steps again.

    A half line at the end, left by a run that was killed, goes too.

    Args:
        path: A file of records with a "step"; one that does not exist is left alone.
    """
    path = Path(path)
    if not path.is_file():
        return
    temporary = path.with_suffix(".jsonl.tmp")
    with path.open(encoding="utf-8") as lines, temporary.open("w", encoding="utf-8") as kept:
        whole = (line for line in lines if line.endswith("\n"))
        kept.writelines(line for line in whole if json.loads(line)["step"] < from_step)
    temporary.replace(path)


def read_rollouts(path: str | Path) -> list[Group]:
    """Read groups back, in the order of steps and of groups within a step.

    Args:
        path: A `.jsonl` or `.parquet` file of records, or a folder of them. In the folder of a run, which holds
            other files too, `rollouts.jsonl` is read.

    Raises:
        FastRLError: nothing to read, a line that is no record, another version, or a group with
            missing rollouts; the message names the file and the place.
    """
    path = Path(path)
    files = _record_files(path) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FastRLError(
            f"{path}: no rollout records (.jsonl or .parquet) there. Train with fastrl.trace: true."
        )
    by_group: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for file in files:
        for record in _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file):
            by_group.setdefault((record["step"], record["group"]), []).append(record)
    return [group_of(by_group[key], path) for key in sorted(by_group)]


def _record_files(folder: Path) -> list[Path]:
    of_run = folder / "rollouts.jsonl"
    return [of_run] if of_run.is_file() else sorted([*folder.glob("*.jsonl"), *folder.glob("*.parquet")])


def _read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise FastRLError(
                    f"{file}, line {number}: not a JSON record ({error}). A run that was killed can leave a half "
                    "line at the end: remove it."
                ) from error
            yield _checked(record, f"{file}, line {number}")


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
        for number, record in enumerate(batch.to_pylist(), start=1):
            yield _checked(record, f"{file}, row {number} of a batch")


def _write_parquet(path: Path, records: Iterable[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    if path.exists():
        raise FastRLError(f"{path} exists: a parquet file cannot be appended to. Choose one file per step.")
    temporary = path.with_suffix(".parquet.tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), temporary)
    temporary.replace(path)


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict) or set(record) != set(_FIELDS):
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise FastRLError(f"{where}: not a FastRL rollout record: found {found}, expected {sorted(_FIELDS)}.")
    if record["version"] != RECORD_VERSION:
        raise FastRLError(f"{where}: record version {record['version']}, this FastRL reads {RECORD_VERSION}.")
    return record


def group_of(records: Sequence[dict[str, Any]], path: str | Path) -> Group:
    """Return the group that the records of its rollouts make up, in any order.

    Args:
        records: All of one group of one step.
        path: Where they were read, for the error.

    Raises:
        FastRLError: a rollout is missing or there twice.
    """
    records = sorted(records, key=lambda record: record["rollout"])
    if [record["rollout"] for record in records] != list(range(records[0]["num_rollouts"])):
        raise FastRLError(
            f"{path}: group {records[0]['group']} of step {records[0]['step']} has the rollouts "
            f"{[r['rollout'] for r in records]} of {records[0]['num_rollouts']}: a group is "
            "whole or it is not read. Files of two runs in one folder, or a record that was lost?"
        )
    return Group(
        prompt_id=records[0]["prompt_id"],
        tokens_G=[record["tokens"] for record in records],
        rewards_G=_column(records, "reward", missing=np.nan),
        advantages_G=_column(records, "advantage", missing=None),
        outcomes_G=_column(records, "outcome", missing=np.nan) if records[0]["has_outcome"] else None,
    )


def _column(records: Sequence[dict[str, Any]], name: str, *, missing: float | None) -> Any:
    values = [record[name] for record in records]
    if missing is None and all(value is None for value in values):
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _plain(values: np.ndarray | None, i: int) -> float | None:
    if values is None or math.isnan(values[i]):
        return None
    return float(values[i])
