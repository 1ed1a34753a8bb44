"""FastRL's state in a checkpoint of an engine: one JSON file with a version."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastrl.types import StateError


def write_json(path: Path, state: Mapping[str, Any], *, version: int) -> None:
    """Write under a temporary name that is then renamed: the file is whole, or it is not there."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps({"version": version, **state}), encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path, *, version: int, remedy: str) -> dict[str, Any]:
    """Read what `write_json` wrote, strictly.

    Args:
        remedy: What to do instead, where the file is damaged.

    Raises:
        StateError: a damaged file, or another version.
    """
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise StateError(f"{path} is damaged ({error}). {remedy}.") from error
    if state.get("version") != version:
        raise StateError(
            f"{path} has version {state.get('version')}, this FastRL reads version {version}. Resume with the "
            "FastRL that wrote it."
        )
    return state
