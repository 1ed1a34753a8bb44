"""Rows as the data sets that TRL, verl and EasyR1 read. Written through `datasets`, so each loads them as its own.

| for | columns |
|---|---|
| trl | id, prompt (messages; `<image>` marks become image blocks), images, answer, source |
| verl | data_source, prompt (messages with `<image>` marks), images, ability, reward_model, extra_info |
| easyr1 | id, problem (with `<image>` marks, without a template: EasyR1 adds its own), images, answer |

A data set without any image has no `images` column: trainers take that column as "this is a vision model".
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.data.prompts import Template, messages
from fastrl.data.rows import Picture, Row

if TYPE_CHECKING:
    from datasets import Dataset


def to_trl(
    rows: Sequence[Row], *, template: Template | None = None, system: str | None = None, split: str = "train"
) -> "Dataset":
    """Rows for `FastGRPOTrainer` and every other GRPO trainer of TRL.

    Args:
        rows: Checked rows.
        template: Around the problem; None = the bare problem.
        system: System message; None = none.
        split: Not used: TRL names splits by file.
    """
    from datasets import List, Value

    has_images = any(row.images for row in rows)
    content = List({"type": Value("string"), "text": Value("string")}) if has_images else Value("string")

    columns: dict[str, list[Any]] = {
        "id": [row.id for row in rows],
        "prompt": [messages(row, template, system, as_blocks=has_images) for row in rows],
        "answer": [row.answer for row in rows],
        "source": [row.source for row in rows],
    }
    return _dataset(rows, columns, {"prompt": List({"role": Value("string"), "content": content})})


def to_verl(
    rows: Sequence[Row], *, template: Template | None = None, system: str | None = None, split: str = "train"
) -> "Dataset":
    """Rows for verl's `RLHFDataset`: what `data.train_files` names. Arguments as for `to_trl`.

    `extra_info.index` is the row's number, which verl groups by; `extra_info.id` is its key.
    """
    columns: dict[str, list[Any]] = {
        "data_source": [row.source for row in rows],
        "prompt": [messages(row, template, system, as_blocks=False) for row in rows],
        "ability": ["math"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": row.answer} for row in rows],
        "extra_info": [
            {"split": split, "index": index, "id": row.id, "question": row.problem, "answer": row.answer}
            for index, row in enumerate(rows)
        ],
    }
    return _dataset(rows, columns)


def to_easyr1(
    rows: Sequence[Row], *, template: Template | None = None, system: str | None = None, split: str = "train"
) -> "Dataset":
    """Rows for EasyR1's `RLHFDataset`. A template is EasyR1's own affair (`data.format_prompt`), so none is put in."""
    return _dataset(
        rows,
        {
            "id": [row.id for row in rows],
            "problem": [row.problem for row in rows],
            "answer": [row.answer for row in rows],
        },
    )


EXPORTERS: Mapping[str, Callable[..., "Dataset"]] = {"trl": to_trl, "verl": to_verl, "easyr1": to_easyr1}


def write(
    rows: Sequence[Row],
    to: str,
    path: Path,
    *,
    template: Template | None = None,
    system: str | None = None,
    split: str = "train",
) -> None:
    """Write one split as parquet, with the bytes of its images inside.

    Args:
        rows: Checked rows.
        to: trl, verl or easyr1.
        path: File to write.
        template, system, split: As for `to_trl`.
    """
    with_bytes = [_embedded(row) for row in rows]
    EXPORTERS[to](with_bytes, template=template, system=system, split=split).to_parquet(path)


def _embedded(row: Row) -> Row:
    images = tuple(Picture(Path(p.path.name) if p.path else None, p.read()) for p in row.images)
    return dataclasses.replace(row, images=images)


def _dataset(
    rows: Sequence[Row], columns: dict[str, list[Any]], features: Mapping[str, Any] | None = None
) -> "Dataset":
    from datasets import Dataset, Features, Image, List, Value

    known: dict[str, Any] = {
        name: Value("string") for name, values in columns.items() if isinstance(values[0], str)
    }
    known |= features or {}
    if any(row.images for row in rows):
        columns = {**columns, "images": [[_cell(picture) for picture in row.images] for row in rows]}
        known["images"] = List(Image())
    nested = {name: values for name, values in columns.items() if name not in known}
    if nested:
        known |= Dataset.from_dict(nested).features
    return Dataset.from_dict(columns, features=Features({name: known[name] for name in columns}))


def _cell(picture: Picture) -> dict[str, Any]:
    return {"bytes": picture.data, "path": None if picture.path is None else str(picture.path)}
