"""Data of your own: JSONL, CSV or parquet with a mapping of columns.

Our names are `id`, `problem`, `answer`, `images` (a list, or one image) and `choices`; a column of the same name needs
no mapping.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.config import did_you_mean
from fastrl.data.readers.tables import folder_of, picture, rows, text
from fastrl.data.rows import Picture, Row, with_marks
from fastrl.types import ConfigError

FIELDS = ("id", "problem", "answer", "images", "choices")
_NEEDED = ("problem", "answer")


def read(source: str, split: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read one split of a file or folder.

    Raises:
        ConfigError: a mapping of or to a column that does not exist.
    """
    for name in columns:
        if name not in FIELDS:
            raise ConfigError(
                f"columns: {name!r} is none of ours.{did_you_mean(name, FIELDS)} All: {', '.join(FIELDS)}."
            )
    name = Path(source).stem

    def make(place: str, values: Mapping[str, Any]) -> Row:
        _check_columns(values, columns, source)
        return _row(values, columns, folder_of(source), name=name, place=place)

    return rows(name, source, split, make, prefix=name)


def _check_columns(values: Mapping[str, Any], columns: Mapping[str, str], source: str) -> None:
    """A mapped column must exist in every record, and problem and answer must come from somewhere."""
    for ours in dict.fromkeys((*columns, *_NEEDED)):
        theirs = columns.get(ours, ours)
        if theirs not in values:
            raise ConfigError(
                f"{source}: no column {theirs!r} for {ours}.{did_you_mean(theirs, values)} There is "
                f"{', '.join(values)}. Name it with --columns {ours}=NAME (task.columns in a recipe)."
            )


def _row(
    values: Mapping[str, Any], columns: Mapping[str, str], folder: Path, *, name: str, place: str
) -> Row:
    found = {ours: values.get(columns.get(ours, ours)) for ours in FIELDS}
    images = _images(found["images"], folder)
    # Without a column of ids, the place is the id: stable as long as the file is.
    has_ids = columns.get("id", "id") in values
    choices = found["choices"]
    return Row(
        id=text(found["id"]) if has_ids else place,
        problem=with_marks(text(found["problem"]), len(images)),
        answer=text(found["answer"]).strip(),
        images=images,
        source=name,
        choices=tuple(text(choice) for choice in choices) if isinstance(choices, list) else None,
    )


def _images(value: Any, folder: Path) -> tuple[Picture, ...]:
    found = [picture(item, folder) for item in (value if isinstance(value, list) else [value])]
    return tuple(image for image in found if image is not None)
