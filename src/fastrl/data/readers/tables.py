"""Records with columns, from wherever they lie: a file, a folder of files, a saved data set, or the hub.

A folder or file says its split in its name (`train-00000-of-00001.parquet`, `my_test.jsonl`). A single file whose name
says none is the training split and no other, so that nobody tests on what was trained on by mistake.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastrl.data.rows import Fault, Picture, Row
from fastrl.types import ConfigError

ALIASES = {"val": "validation", "valid": "validation", "dev": "validation"}
"""Names of splits that mean another one."""
ROW_UNREADABLE = "row unreadable"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_BATCH_ROWS = 32  # of parquet and Arrow files: images of so many rows are in memory at once


@dataclass(frozen=True)
class Record:
    """Columns and values of one row, or the reason why there are none."""

    values: Mapping[str, Any] = field(default_factory=dict)
    fault: Fault | None = None


def records(source: str, split: str) -> Iterator[Record]:
    """Yield the records of a split in their order.

    Args:
        source: A .jsonl, .csv or .parquet file, a folder of those, a folder of `datasets.save_to_disk`, or a hub name.
        split: Its name; val, valid and dev are validation.

    Raises:
        ConfigError: nothing there, no such split, or a file that is not what its name says.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return _from_hub(source, split)
    if path.is_file():
        _check_split_of_file(path, split)
        return _from_file(path)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _from_disk(path, split)
    return _from_folder(path, split)


def rows(
    name: str,
    source: str,
    split: str,
    make: Callable[[str, Mapping[str, Any]], Row],
    *,
    prefix: str | None = None,
) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        name: Name of the data set.
        source, split: As for `records`.
        make: (id by place, values of the columns) -> row; a ValueError says what cannot be read.
        prefix: Of ids by place; None = the name and the split.
    """
    prefix = prefix or f"{name}-{ALIASES.get(split, split)}"
    for number, record in enumerate(records(source, split)):
        key = f"{prefix}-{number:05d}"
        if record.fault is not None:
            yield Row(id=key, problem="", answer="", source=name, fault=record.fault)
            continue
        try:
            yield make(key, record.values)
        except ConfigError:  # of the whole table, not of this row
            raise
        except ValueError as error:
            yield unreadable_row(name, key, str(error))


def folder_of(source: str) -> Path:
    """The folder that relative paths of images start from: that of the file, or the source itself."""
    path = Path(source).expanduser()
    return path.parent if path.is_file() else path


def picture(value: Any, folder: Path) -> Picture | None:
    """Read a cell that holds an image: `{bytes, path}` as in the hub's tables, bytes, or a path; None = no image.

    Raises:
        ValueError: something else.
    """
    if value is None or value == "":
        return None
    if isinstance(value, bytes):
        return Picture(data=value)
    if isinstance(value, str):
        return Picture(path=folder / value)
    if isinstance(value, dict) and set(value) <= {"bytes", "path"}:
        path = folder / value["path"] if value.get("path") else None
        return None if path is None and value.get("bytes") is None else Picture(path, value.get("bytes"))
    raise ValueError(f"an image is a path, bytes or {{bytes, path}}, not {type(value).__name__}")


def text(value: Any) -> str:
    """Read a cell that holds text or a number; an empty cell is "".

    Raises:
        ValueError: something else.
    """
    if value is None or value != value:  # NaN is what pandas writes for an empty cell
        return ""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"text or a number is asked for, not {type(value).__name__}")


def unreadable_row(source: str, key: str, reason: str) -> Row:
    """Stand in for a row that cannot be read: it never passes the check."""
    return Row(id=key, problem="", answer="", source=source, fault=Fault(ROW_UNREADABLE, reason))


def splits_named(stem: str) -> set[str]:
    """The words of a file's name, aliases resolved: a split that is among them is the file's."""
    words = re.split(r"[^a-z]+", stem.lower())
    return {ALIASES.get(word, word) for word in words}


def _check_split_of_file(path: Path, split: str) -> None:
    wanted = ALIASES.get(split, split)
    named = splits_named(path.stem)
    its_own = named & {"train", "validation", "test"} or {"train"}
    if wanted not in named | its_own:
        raise ConfigError(
            f"{path}: this file is the split {' and '.join(sorted(its_own))}, not {split!r}. A file whose name says "
            f"no split is train. Name it {split}{path.suffix}, or give a folder with one file per split."
        )


def _from_file(path: Path) -> Iterator[Record]:
    reader = _FORMATS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"{path}: {path.suffix or 'no suffix'} is not read; one of {', '.join(_FORMATS)} is."
        )
    return reader(path)


def _from_folder(folder: Path, split: str) -> Iterator[Record]:
    wanted = ALIASES.get(split, split)
    files = sorted(file for suffix in _FORMATS for file in folder.rglob(f"*{suffix}") if file.is_file())
    of_split = [file for file in files if wanted in splits_named(file.stem)]
    if not of_split:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:10]) or "no table at all"
        raise ConfigError(
            f"{folder}: no {' or '.join(_FORMATS)} file with {split!r} in its name; there is {names}. Name the files "
            "after their split, or give one file."
        )
    return (record for file in of_split for record in _from_file(file))


def _from_jsonl(path: Path) -> Iterator[Record]:
    # Bytes that are no UTF-8 become lone surrogates, which the check reports with the row's id.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                yield _unreadable(f"{path.name}, line {number}: not JSON ({error})")
                continue
            if isinstance(values, dict):
                yield Record(values)
            else:
                yield _unreadable(f"{path.name}, line {number}: {type(values).__name__} instead of {{...}}")


def _from_csv(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.DictReader(file)
        while True:
            try:
                values = next(lines, None)
            except csv.Error as error:
                raise ConfigError(
                    f"{path}, line {lines.line_num}: not CSV ({error}). Write it as JSONL."
                ) from error
            if values is None:
                return
            if None in values or None in values.values():
                yield _unreadable(
                    f"{path.name}, line {lines.line_num}: another number of cells than of columns"
                )
            else:
                yield Record(values)


def _from_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from _from_batch(batch)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{path}: not a whole parquet file ({error}). Get or write it again.") from error


def _from_batch(batch: Any) -> Iterator[Record]:
    """Records of a pyarrow batch or table; row by row, since one text that is no UTF-8 fails a whole batch."""
    for i in range(batch.num_rows):
        try:
            (values,) = batch.slice(i, 1).to_pylist()
        except UnicodeDecodeError as error:
            yield Record(fault=Fault("text not UTF-8", f"a column holds bytes that are no UTF-8 ({error})"))
        else:
            yield Record(values)


def _from_disk(folder: Path, split: str) -> Iterator[Record]:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.Dataset):
        loaded = datasets.DatasetDict({str(loaded.split or "train"): loaded})
    wanted = ALIASES.get(split, split)
    by_name = {ALIASES.get(name, name): part for name, part in loaded.items()}
    if wanted not in by_name:
        raise ConfigError(f"{folder}: no split {split!r}; there is {', '.join(loaded)}.")
    return _from_dataset(by_name[wanted])


def _from_hub(source: str, split: str) -> Iterator[Record]:
    if not _HUB_NAME.fullmatch(source) or Path(source).suffix.lower() in _FORMATS:
        raise ConfigError(
            f"{source}: no such file or folder, and not a hub name (owner/name). Check the path."
        )
    import datasets

    try:
        return _from_dataset(datasets.load_dataset(source, split=split))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}, split {split!r}: no such folder here, and the hub did not give it ({error}). Without a "
            "network, give a local copy as the source (docs/data.md)."
        ) from error


def _from_dataset(dataset: Any) -> Iterator[Record]:
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        yield from _from_batch(table)


def _unreadable(reason: str) -> Record:
    return Record(fault=Fault(ROW_UNREADABLE, reason))


_FORMATS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _from_jsonl,
    ".csv": _from_csv,
    ".parquet": _from_parquet,
}
