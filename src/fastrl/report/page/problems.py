"""Texts and pictures of prompts, and tokens as text, from what lies on this machine: nothing is downloaded."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fastrl
from fastrl.report.page.read import dig
from fastrl.types import FastRLError

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_PIXELS = 512
"""Of the longer side of a picture on the page."""


class Decoder:
    """Token ids as text, by the tokenizer of the trained model, else of the model that was trained.

    Args:
        folder: Where the trained model is saved, once it is.
        settings: The recipe.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        candidates = [folder, *(_own_folder(settings))]
        files = [candidate / "tokenizer.json" for candidate in candidates]
        self._file = next((file for file in files if file.is_file()), None)
        self._tokenizer: Any = None
        self.note = "" if self._file else "Token ids are shown: no tokenizer.json of the model lies here."

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a rollout, special tokens included."""
        if self._file is None:
            return " ".join(map(str, tokens))
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._file))
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def _own_folder(settings: Mapping[str, Any]) -> list[Path]:
    if dig(settings, "task", "name") == "testbed":
        return [Path(fastrl.__file__).parent / "testbed" / "checkpoint"]
    model = dig(settings, "task", "model")
    return [Path(model)] if isinstance(model, str) else []


class Prompts:
    """Prompts of a run by their id.

    Args:
        settings: The recipe.
        seed: Of the run; None = the recipe's.
    """

    def __init__(self, settings: Mapping[str, Any], *, seed: int | None) -> None:
        self.note = ""
        self._found: dict[str, Any] = {}
        task = settings.get("task") or {}
        try:
            if task.get("name") == "testbed":
                self._found = _testbed(task, settings.get("seed", 0) if seed is None else seed)
            elif isinstance(task.get("source"), str) and Path(task["source"]).exists():
                self._found = _rows(task)
            else:
                self.note = "Prompts are not shown: their data set is no local file or folder (task.source)."
        except (FastRLError, OSError, ImportError) as error:
            self.note = f"Prompts are not shown: {error}"

    def of(self, prompt_id: str) -> dict[str, Any] | None:
        """text, answer and images (data URIs with their size) of a prompt; None if it is not known."""
        row = self._found.get(prompt_id)
        if row is None:
            return None
        pictures = [row.image] if hasattr(row, "image") else [picture.decode() for picture in row.images]
        text = row.question if hasattr(row, "question") else row.problem
        return {"text": text, "answer": row.answer, "images": [_embedded(picture) for picture in pictures]}


def _testbed(task: Mapping[str, Any], seed: int) -> dict[str, Any]:
    from fastrl.data.testbed import problems

    return {problem.id: problem for problem in problems("train", int(task.get("train_prompts") or 0), seed)}


def _rows(task: Mapping[str, Any]) -> dict[str, Any]:
    from fastrl.data.readers import load

    rows = load(
        task["name"],
        source=task["source"],
        split=task.get("train_split", "train"),
        columns=task.get("columns"),
    )
    return {row.id: row for row in rows}


def _embedded(image: "Image") -> dict[str, Any]:
    image = image.copy()
    image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    buffer = BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    source = f"data:image/png;base64,{b64encode(buffer.getvalue()).decode('ascii')}"
    return {"source": source, "width": image.width, "height": image.height}
