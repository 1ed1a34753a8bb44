"""What is wrong with the rows of a data set: found before a GPU is rented, with row and reason.

A row passes or has faults. `checked` is what exporters and trainers read through: it stops at the first set of bad
rows, or leaves them out and says so.
"""

import io
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from PIL import Image

from fastrl.data.rows import IMAGE, Fault, Picture, Row
from fastrl.rewards.grading import grade
from fastrl.types import ConfigError

NUM_SHOWN = 10
"""Rows of one kind of fault that are listed; all are counted."""
MIN_SIDE = 8  # pixels; below, no processor finds a patch, and nobody a figure
MAX_PIXELS = 64_000_000  # an 8k scan; decoding takes 3 bytes each, times loader workers
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16", "I")

TokenCount = Callable[[Row], int]


@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """The longest prompt that a run takes.

    Args:
        max_tokens: Tokens of a prompt, images included.
        count: Row -> its tokens; see `fastrl.data.prompts.token_count`.
        of: What is counted: all "tokens", or "image tokens" alone.
    """

    max_tokens: int
    count: TokenCount
    of: str = "tokens"


@dataclass
class Report:
    """Totals of a check, and the first rows of each kind of fault.

    Args:
        num_rows, num_good: Rows seen, and those without a fault.
        counts: Kind of fault -> rows that have it.
        examples: Kind of fault -> the first "id: reason" lines.
    """

    num_rows: int = 0
    num_good: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: Row, faults: list[Fault]) -> None:
        """Count one row."""
        self.num_rows += 1
        self.num_good += not faults
        self.counts.update({fault.kind for fault in faults})
        for fault in faults:
            if len(self.examples[fault.kind]) < NUM_SHOWN:
                self.examples[fault.kind].append(f"{row.id or f'row {self.num_rows}'}: {fault.reason}")

    def __str__(self) -> str:
        lines = [f"{self.num_good:,} of {self.num_rows:,} rows are good"]
        for kind, count in self.counts.most_common():
            lines.append(f"{kind}: {count:,}")
            lines += [f"  {line}" for line in self.examples[kind]]
            if count > len(self.examples[kind]):
                lines.append(f"  ... and {count - len(self.examples[kind]):,} more")
        return "\n".join(lines)


def examine(
    rows: Iterable[Row], report: Report, limit: TokenLimit | None = None
) -> Iterator[tuple[Row, bool]]:
    """Yield each row with whether it is good, and count it in `report`.

    Args:
        rows: Of one split: ids must be unique among them.
        report: Filled on the way.
        limit: Longest prompt; None = any.
    """
    seen: set[str] = set()
    for row in rows:
        faults = faults_of(row, limit)
        if row.id in seen:
            faults.append(
                Fault("id twice", "another row has this id. Ids must be unique, since samplers count by them")
            )
        seen.add(row.id)
        report.add(row, faults)
        yield row, not faults


def checked(
    rows: Iterable[Row],
    *,
    keep_good: bool = False,
    limit: int | None = None,
    tokens: TokenLimit | None = None,
    report: Report | None = None,
) -> list[Row]:
    """Return the good rows.

    Args:
        rows: Of one split.
        keep_good: Leave out bad rows; False = any bad row is an error.
        limit: Take the first so many good rows; what follows is not examined.
        tokens: Longest prompt; None = any.
        report: Filled on the way, for callers that show it.

    Raises:
        ConfigError: bad rows without `keep_good`, or no good row; with the totals and first ten of each kind.
    """
    report = Report() if report is None else report
    good: list[Row] = []
    for row, is_good in examine(rows, report, tokens):
        if is_good:
            good.append(row)
        if limit is not None and len(good) >= limit:
            break
    if report.num_good < report.num_rows and not keep_good:
        raise ConfigError(
            f"{report}\nMend these rows, or leave them out with --keep-good (task.keep_good: true in a recipe)."
        )
    if not good:
        raise ConfigError(f"No row is left: nothing to train or test on. {report}")
    if report.num_good < report.num_rows:
        warnings.warn(f"Rows left out. {report}", stacklevel=2)
    return good


def faults_of(row: Row, limit: TokenLimit | None = None) -> list[Fault]:
    """Return what is wrong with one row by itself; every image is decoded."""
    if row.fault is not None:
        return [row.fault]
    faults = [*_text_faults(row), *_answer_faults(row)]
    broken = [fault for picture in row.images for fault in _image_faults(picture)]
    marks = row.problem.count(IMAGE)
    if marks != len(row.images):
        faults.append(
            Fault(
                "image marks",
                f"{marks} {IMAGE} marks for {len(row.images)} images. Each image needs one mark",
            )
        )
    if limit is not None and not broken and not faults:
        found = limit.count(row)
        if found > limit.max_tokens:
            faults.append(
                Fault(
                    "prompt too long",
                    f"{found:,} {limit.of}, {limit.max_tokens:,} fit. Shrink images (max_pixels) or leave it out",
                )
            )
    return faults + broken


def _text_faults(row: Row) -> Iterator[Fault]:
    if not row.id.strip():
        yield Fault("id missing", "no id. Give each problem a stable key, such as its number")
    if not row.problem.replace(IMAGE, "").strip():
        yield Fault("problem empty", "nothing is asked. Fill in the problem's text")
    for name in ("id", "problem", "answer"):
        try:
            getattr(row, name).encode()
        except UnicodeEncodeError as error:
            yield Fault(
                "text not UTF-8", f"{name}: {error.reason} at character {error.start}. Save it as UTF-8"
            )


def _answer_faults(row: Row) -> Iterator[Fault]:
    if not row.answer.strip():
        yield Fault("answer empty", "no answer to grade by")
    elif row.choices and row.answer not in row.choices:
        yield Fault(
            "answer no choice",
            f"{row.answer!r:.80} is none of {len(row.choices)} choices ({', '.join(row.choices)[:120]})",
        )
    elif grade(None, row.answer).value is None:
        yield Fault(
            "answer unreadable", f"{row.answer!r:.80} is no answer that grading can read, so no reward exists"
        )


def _image_faults(picture: Picture) -> list[Fault]:
    try:
        data = picture.read()
    except OSError as error:
        return [Fault("image missing", f"{picture.path}: {error.strerror or error}")]
    name = "an image" if picture.path is None else str(picture.path)
    if not data:
        return [Fault("image empty", f"{name} has no bytes")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # size is judged below
            with Image.open(io.BytesIO(data)) as image:
                return [replace(fault, reason=f"{name} {fault.reason}") for fault in _look_at(image)]
    # Decoders raise what they like on broken files; Pillow documents OSError, SyntaxError and ValueError.
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError) as error:
        kind = "image too large" if isinstance(error, Image.DecompressionBombError) else "image unreadable"
        return [Fault(kind, f"{name} cannot be decoded ({error})")]


def _look_at(image: Image.Image) -> Iterator[Fault]:
    width, height = image.size
    if width * height > MAX_PIXELS:
        yield Fault(
            "image too large",
            f"has {width} x {height} pixels; {MAX_PIXELS:,} are the most. Shrink it before training",
        )
        return  # not decoded
    if min(width, height) < MIN_SIDE:
        yield Fault("image too small", f"has {width} x {height} pixels; a side has {MIN_SIDE} at least")
    if getattr(image, "n_frames", 1) > 1:
        yield Fault("image animated", f"has {image.n_frames} frames; one is meant. Save the right one")  # type: ignore[attr-defined]
    if image.mode not in _MODES:
        yield Fault(
            "image mode", f"is {image.mode}, whose colours processors change silently. Save it as RGB"
        )
    image.load()
    extrema = image.convert("RGB").getextrema()
    if all(low == high for low, high in extrema):  # type: ignore[misc]
        yield Fault("image blank", "has one colour only: nothing can be seen on it")
