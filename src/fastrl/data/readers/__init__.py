"""Data sets in the shapes they travel in, read as rows: `READERS` has one entry per data set."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fastrl.config import did_you_mean
from fastrl.data.readers import file, geometry3k, geoqa8k, math
from fastrl.data.rows import Row
from fastrl.types import ConfigError


@dataclass(frozen=True)
class Reader:
    """How a data set is read.

    Args:
        read: (source, split, columns) -> rows; source and columns as for `load`.
        hub: Name on the Hugging Face hub, where it is read if no source is given; None = a source is needed.
        splits: What is exported if no split is named.
    """

    read: Callable[[str, str, Mapping[str, str]], Iterator[Row]]
    hub: str | None
    splits: tuple[str, ...] = ("train", "test")


READERS: dict[str, Reader] = {
    "geometry3k": Reader(geometry3k.read, "hiyouga/geometry3k"),
    "geoqa8k-r1v": Reader(geoqa8k.read, "leonardPKU/GEOQA_8K_R1V"),
    "math": Reader(math.read, "DigitalLearningGmbH/MATH-lighteval"),
    "file": Reader(file.read, None, splits=("train",)),
}


def load(
    name: str, source: str | None = None, split: str = "train", columns: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Read a data set row by row; no image is decoded.

    Args:
        name: One of `READERS`.
        source: File, folder, zip or hub name; None = the published name on the hub, the only case in which something
            is downloaded without being named.
        split: train, validation or test, or what the data calls its splits.
        columns: For `file`: our name -> the file's, such as {"problem": "question"}.

    Raises:
        ConfigError: an unknown data set, a source or split that is not there, or columns that cannot be.
    """
    if name not in READERS:
        raise ConfigError(
            f"data set {name!r} is unknown.{did_you_mean(name, READERS)} All: {', '.join(READERS)}. "
            "Data of your own: file."
        )
    reader = READERS[name]
    if columns and name != "file":
        raise ConfigError(
            f"columns: those of {name} are known; a mapping belongs to file. Remove it, or read your copy as file."
        )
    source = source if source is not None else reader.hub
    if source is None:
        raise ConfigError(f"{name}: no source. Give the path of a JSONL, CSV or parquet file, or a folder.")
    return reader.read(source, split, columns or {})
