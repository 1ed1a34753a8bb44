r"""MATH (Hendrycks et al. 2021): the original folders of JSON files, or tables with `problem` and `solution`.

The answer is what the last \boxed{} of the worked solution holds.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.data.readers.tables import rows, text, unreadable_row
from fastrl.data.rows import Row
from fastrl.rewards.extraction import extract_boxed
from fastrl.types import ConfigError

NAME = "math"


def read(source: str, split: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read one split; the source is the original folder (`train/algebra/1.json`), a table or a hub name."""
    path = Path(source).expanduser()
    if path.is_dir() and next(path.glob("*/*/*.json"), None) is not None:
        return _from_folders(path, split)
    return rows(NAME, source, split, _row)


def _from_folders(root: Path, split: str) -> Iterator[Row]:
    folder = root / split
    if not folder.is_dir():
        names = ", ".join(sorted(child.name for child in root.iterdir() if child.is_dir()))
        raise ConfigError(f"{root}: no split {split!r}; there is {names}.")
    files = folder.glob("*/*.json")
    for file in sorted(files, key=lambda f: (f.parent.name, len(f.stem), f.stem)):
        key = f"{NAME}-{split}-{file.parent.name}-{file.stem}"
        try:
            values = json.loads(file.read_bytes().decode("utf-8", "surrogateescape"))
            if not isinstance(values, dict):
                raise ValueError(f"{type(values).__name__} instead of {{...}}")
            yield _row(key, values)
        except (OSError, ValueError, RecursionError) as error:
            yield unreadable_row(NAME, key, f"{file.name}: {error}")


def _row(key: str, values: Mapping[str, Any]) -> Row:
    solution = text(values.get("solution"))
    answer = text(values["answer"]) if values.get("answer") else extract_boxed(solution) or ""
    return Row(id=key, problem=text(values.get("problem")), answer=answer, source=NAME)
