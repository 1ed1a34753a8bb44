"""Files of a run folder, also of one that is being written: a half line, a missing file, a table that is not whole."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.types import ConfigError

WATCHED = (
    "recipe.yaml", "versions.json", "summary.json", "compare.json", "metrics.jsonl", "evaluations.jsonl",
    "rollouts.jsonl", "runs.parquet", "steps.parquet", "evaluations.parquet",
)  # fmt: skip
"""Names of files that make a page old when they change."""


def kind_of(folder: Path) -> str:
    """Return "train" or "compare": which command writes such a folder.

    Raises:
        ConfigError: no folder, or one of neither command.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: no such folder. A RUN is the output folder of fastrl train or fastrl compare, finished or "
            "not; give its path."
        )
    if (folder / "compare.json").is_file() or (folder / "cells").is_dir():
        return "compare"
    if (folder / "recipe.yaml").is_file() or (folder / "summary.json").is_file():
        return "train"
    raise ConfigError(
        f"{folder}: neither a run of fastrl train (recipe.yaml, summary.json) nor of fastrl compare (compare.json). "
        "Give the folder that was their --out. Rollouts of another trainer: fastrl analyze."
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that is written whole or not at all; {} if it is not there.

    Raises:
        ConfigError: no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: not JSON ({error}). FastRL writes this file whole or not at all, so it was changed or cut "
            "afterwards. Restore it, or make the run again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, found {type(content).__name__}. Restore the file."
        )
    return content


def read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file; none if it is not there.

    A last line that is cut is what a run leaves that is writing or was killed: left out in silence. Another line that
    is no JSON object is left out and counted in `problems`.
    """
    if not path.is_file():
        return []
    rows, bad = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and line.endswith(b"\n"):
            bad += 1
    if bad:
        problems.append(
            f"{path.name} of {path.parent.name}: {bad} lines are no JSON objects and were left out."
        )
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # of JSON or of UTF-8
        return None
    return row if isinstance(row, dict) else None


def read_table(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Read the rows of a parquet file; none, and a line in `problems`, if it is missing or not whole."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        problems.append(f"{path.name} is not there, so what is drawn from it is missing.")
        return []
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        problems.append(f"{path.name} could not be read ({str(error).splitlines()[0]}).")
        return []


def fingerprint(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file that a page is made from."""
    found = {}
    for path in _watched(folder):
        try:
            status = path.stat()
        except FileNotFoundError:  # replaced this moment
            continue
        found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _watched(folder: Path) -> Iterator[Path]:
    return (path for name in WATCHED for path in folder.rglob(name))


def is_finished(folder: Path) -> bool:
    """Whether nothing more will be written: a summary, or every cell done or failed."""
    if (folder / "compare.json").is_file():
        return cells_are_done(read_json(folder / "compare.json").get("cells"))
    return (folder / "summary.json").is_file()


def cells_are_done(cells: Mapping[str, Any] | None) -> bool:
    """Whether a comparison has ended: nothing is left to train, though cells may have failed."""
    return bool(cells and cells.get("ended"))


def number(value: Any) -> float | None:
    """The value as a finite float, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def dig(content: Any, *keys: str) -> Any:
    """`content[a][b]...`; None where a key is missing or a value is null."""
    for key in keys:
        if not isinstance(content, Mapping):
            return None
        content = content.get(key)
    return content


def plain(value: Any) -> Any:
    """The value as strict JSON: NaN and infinity are null, text is valid Unicode, keys are text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    return str(value)
