"""Geometry3K: the original problem folders, a zip of them, or the hub's table.

Original: a folder per problem with `data.json` and `img_diagram.png`; the folders of a split lie in a folder or zip of
its name, or `data_type` says the split. Hub (hiyouga/geometry3k): columns `images`, `problem`, `answer`.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.data.readers.tables import ALIASES, folder_of, picture, rows, text, unreadable_row
from fastrl.data.rows import Picture, Row, with_marks
from fastrl.types import ConfigError

NAME = "geometry3k"
_FOLDER_NAMES = {"validation": ("val", "validation", "valid", "dev")}
_MAX_MEMBER_BYTES = 1 << 26  # 64 MiB: no diagram is that large, but a crafted zip can be
_Folder = Path | zipfile.Path


def read(source: str, split: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read one split; the source is a folder, a zip, a table or a hub name."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix.lower() == ".zip":
        return _from_problems(_open_zip(path), split)
    if path.is_dir() and any(_may_hold_problems(child) for child in path.iterdir()):
        return _from_problems(path, split)
    return _from_table(source, split)


def _from_table(source: str, split: str) -> Iterator[Row]:
    folder = folder_of(source)

    def make(key: str, values: Mapping[str, Any]) -> Row:
        found = [picture(value, folder) for value in values.get("images") or ()]
        images = tuple(image for image in found if image is not None)
        problem, answer = text(values.get("problem")), text(values.get("answer"))
        return Row(
            id=key,
            problem=with_marks(problem, len(images)),
            answer=answer.strip(),
            images=images,
            source=NAME,
        )

    return rows(NAME, source, split, make)


def _may_hold_problems(child: Path) -> bool:
    if child.suffix.lower() == ".zip" or (child / "data.json").is_file():
        return True
    return child.is_dir() and next(child.glob("*/data.json"), None) is not None


def _open_zip(path: Path) -> zipfile.Path:
    try:
        return zipfile.Path(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ConfigError(f"{path}: not a whole zip file ({error}). Get it again.") from error


def _from_problems(root: _Folder, split: str) -> Iterator[Row]:
    folder, is_of_split = _folder_of_split(root, ALIASES.get(split, split))
    problems = [child for child in folder.iterdir() if (child / "data.json").is_file()]
    num = 0
    for problem in sorted(problems, key=lambda child: (len(child.name), child.name)):
        row = _row(problem, None if is_of_split else ALIASES.get(split, split))
        if row is not None:
            num += 1
            yield row
    if not num:
        raise ConfigError(
            f"{root}: no problem of the split {split!r} among {len(problems)} folders with a data.json. A split is a "
            "folder or zip of its name, or the data_type of each problem."
        )


def _folder_of_split(root: _Folder, split: str) -> tuple[_Folder, bool]:
    """The folder whose children are problems, and whether all of them are of the split."""
    for name in _FOLDER_NAMES.get(split, (split,)):
        if (root / name).is_dir():
            return root / name, True
        if isinstance(root, Path) and (root / f"{name}.zip").is_file():
            return _folder_of_split(_open_zip(root / f"{name}.zip"), split)
    children = [child for child in root.iterdir() if child.is_dir() and child.name != "__MACOSX"]
    if len(children) == 1 and not (children[0] / "data.json").is_file():
        return _folder_of_split(children[0], split)
    return root, False


def _row(folder: _Folder, split: str | None) -> Row | None:
    """Read one problem; None where it is of another split."""
    key = f"{NAME}-{folder.name}"
    try:
        values = json.loads(_read(folder / "data.json").decode("utf-8", "surrogateescape"))
        if not isinstance(values, dict):
            raise ValueError(f"data.json holds {type(values).__name__} instead of {{...}}")
        its_split = text(values.get("data_type"))
        if split is not None and ALIASES.get(its_split, its_split) != split:
            return None
        choices = tuple(text(choice) for choice in values.get("choices") or ())
        return Row(
            id=f"{NAME}-{values['id']}" if text(values.get("id")) else "",
            problem=with_marks(text(values.get("annotat_text")), 1),
            answer=_choice(text(values.get("answer")), choices),
            images=(_diagram(folder / "img_diagram.png"),),
            source=NAME,
            choices=choices,
        )
    except (OSError, ValueError, TypeError, RecursionError) as error:
        return unreadable_row(NAME, key, f"data.json: {error}")


def _choice(letter: str, choices: tuple[str, ...]) -> str:
    """The text that a letter stands for; a letter that names no choice stays, and the check reports it."""
    index = ord(letter.strip()) - ord("A") if len(letter.strip()) == 1 else -1
    return choices[index] if 0 <= index < len(choices) else letter


def _diagram(file: _Folder) -> Picture:
    # A file that is not there, on disk or in the zip, is a matter of the check.
    return Picture(path=file) if isinstance(file, Path) else Picture(Path(file.at), _member(file))


def _member(file: zipfile.Path) -> bytes | None:
    return _read(file) if file.is_file() else None


def _read(file: _Folder) -> bytes:
    if isinstance(file, Path):
        return file.read_bytes()
    size = file.root.getinfo(file.at).file_size
    if size > _MAX_MEMBER_BYTES:
        raise OSError(f"{file.at} has {size} bytes; at most {_MAX_MEMBER_BYTES} are read from a zip")
    try:
        return file.read_bytes()
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # broken, or encrypted
        raise OSError(f"{file.at} cannot be unpacked ({error})") from error
