"""GeoQA8K-R1V (leonardPKU/GEOQA_8K_R1V): columns `image`, `problem`, `solution`, the answer inside <answer> tags."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastrl.data.readers.tables import folder_of, picture, rows, text
from fastrl.data.rows import Row, with_marks

NAME = "geoqa8k-r1v"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def read(source: str, split: str, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read one split; the source is a file, a folder or a hub name. R1-V's own JSONL with `answer` is read too."""
    folder = folder_of(source)

    def make(key: str, values: Mapping[str, Any]) -> Row:
        image = picture(values.get("image"), folder)
        images = () if image is None else (image,)
        return Row(
            id=key,
            problem=with_marks(text(values.get("problem")), len(images)),
            answer=_answer(text(values.get("solution", values.get("answer")))),
            images=images,
            source=NAME,
        )

    return rows(NAME, source, split, make)


def _answer(solution: str) -> str:
    """What the last <answer> tags hold; a solution without tags is the answer itself."""
    found = _ANSWER.findall(solution)
    return (found[-1] if found else solution).strip()
