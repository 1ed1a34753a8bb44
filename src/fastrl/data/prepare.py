"""`fastrl data`: read, check, and write for an engine; one split after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastrl.data.check import Report, TokenLimit, checked, examine
from fastrl.data.export import write
from fastrl.data.prompts import read_template, token_count
from fastrl.data.readers import READERS, load
from fastrl.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `fastrl data` is asked for.

    Args:
        name: Data set, one of `READERS`.
        check: Look at every row and write nothing.
        to: trl, verl or easyr1.
        out: Folder to write to; needed with `to`.
        source, columns, splits: As for `fastrl.data.readers.load`; no splits = those of the data set.
        keep_good: Leave out bad rows.
        limit: First good rows of each split.
        prompt, system: Template and system message.
        max_prompt_tokens, model, max_pixels: See `fastrl.data.prompts.token_count`.
    """

    name: str
    check: bool = False
    to: str | None = None
    out: Path | None = None
    source: str | None = None
    columns: Sequence[str] = ()
    splits: Sequence[str] = ()
    keep_good: bool = False
    limit: int | None = None
    prompt: str | None = None
    system: str | None = None
    max_prompt_tokens: int | None = None
    model: str | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.check == (self.to is not None):
            raise ConfigError("fastrl data: give either --check, or --to with --out.")
        if (self.to is None) != (self.out is None):
            raise ConfigError(
                "fastrl data: --to and --out belong together: an engine, and a folder to write to."
            )
        if self.to == "easyr1" and (self.prompt or self.system):
            raise ConfigError(
                "fastrl data --to easyr1: EasyR1 adds the prompt while it trains. Give the template to EasyR1 as "
                "data.format_prompt=FILE.jinja, and leave out --prompt and --system."
            )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One split that was checked, and written if that was asked for."""

    split: str
    report: Report
    file: Path | None


def prepare(request: Request) -> Iterator[Prepared]:
    """Check and write the splits of a data set.

    Raises:
        ConfigError: see `fastrl.data.readers.load` and `fastrl.data.check.checked`; a check raises after the last
            split, so that all faults are seen.
    """
    template = read_template(request.prompt) if request.prompt is not None else None
    tokens = None
    if request.max_prompt_tokens is not None:
        count = token_count(
            request.model, template=template, system=request.system, max_pixels=request.max_pixels
        )
        of = "image tokens" if request.model is None else "tokens"
        tokens = TokenLimit(max_tokens=request.max_prompt_tokens, count=count, of=of)
    columns = parse_columns(request.columns)
    reader = READERS.get(request.name)
    num_bad = 0
    for split in request.splits or (reader.splits if reader else ("train",)):
        rows = load(request.name, request.source, split, columns)
        report, file = Report(), None
        if request.to is None or request.out is None:
            for _ in examine(rows, report, tokens):
                pass
        else:
            file = request.out / f"{split}.parquet"
            good = checked(
                rows, keep_good=request.keep_good, limit=request.limit, tokens=tokens, report=report
            )
            request.out.mkdir(parents=True, exist_ok=True)
            write(good, request.to, file, template=template, system=request.system, split=split)
        num_bad += report.num_rows - report.num_good
        yield Prepared(split=split, report=report, file=file)
    if request.check and num_bad and not request.keep_good:
        raise ConfigError(f"{num_bad} rows have faults. Mend them, or leave them out with --keep-good.")


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """Read `ours=theirs` pairs.

    Raises:
        ConfigError: a pair without =.
    """
    found = {}
    for pair in pairs:
        ours, sign, theirs = pair.partition("=")
        if not sign or not ours or not theirs:
            raise ConfigError(f"--columns {pair!r}: write ours=theirs, such as problem=question.")
        found[ours] = theirs
    return found
