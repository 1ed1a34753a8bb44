"""The one row that every data set becomes, and what can be wrong with it.

Readers yield rows, `check` examines them, exporters and trainers take them. A row costs nothing to hold: its
images are paths, or bytes that are not decoded.
"""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE = "<image>"
"""Stands in a problem where an image belongs, once per image, as in the hub's Geometry3K."""


@dataclass(frozen=True)
class Fault:
    """One reason why a row cannot be used.

    Args:
        kind: Faults of one kind are counted together, such as "image unreadable".
        reason: What was found in this row, and what is asked for.
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Picture:
    """An image as it lies on disk or in a table: a file, or the bytes of one.

    Args:
        path: File to read when the image is needed; only a name where there are bytes.
        data: Bytes of an image file.
    """

    path: Path | None = None
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the image file.

        Raises:
            OSError: the file is not there or cannot be read.
        """
        if self.data is not None:
            return self.data
        if self.path is None:
            raise FileNotFoundError("an image without a path and without bytes")
        return self.path.read_bytes()

    def decode(self) -> "Image":
        """Return the image in RGB.

        Raises:
            OSError: the file is not there, or no image.
        """
        from PIL import Image

        return Image.open(BytesIO(self.read())).convert("RGB")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem.

    Args:
        id: Stable key in its data set, never the text: the original number, else split and position. "" = the data
            has none, which the check reports.
        problem: What is asked, with one `<image>` per image where it belongs.
        answer: The right answer as text; of a multiple choice its text, not its letter.
        images: In the order of the `<image>` marks.
        source: Name of the data set.
        choices: Texts of the choices A, B, ..., where the data has some.
        fault: What the reader could not read; such a row never passes the check and is never exported.
    """

    id: str
    problem: str
    answer: str
    images: tuple[Picture, ...] = ()
    source: str
    choices: tuple[str, ...] | None = None
    fault: Fault | None = None


def with_marks(problem: str, num_images: int) -> str:
    """Put the `<image>` marks in front of a problem that has none; one that has some is left as it is."""
    return problem if IMAGE in problem else IMAGE * num_images + problem
