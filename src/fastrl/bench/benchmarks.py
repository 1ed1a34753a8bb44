"""The benchmarks of `fastrl eval`: rows of the in-domain sets, and lmms-eval's tasks for the others."""

import io
from collections.abc import Mapping
from dataclasses import dataclass

from fastrl.config import did_you_mean
from fastrl.data.check import checked
from fastrl.data.readers import load
from fastrl.data.rows import IMAGE, Picture, Row
from fastrl.types import ConfigError


@dataclass(frozen=True)
class InDomain:
    """A set that our own grading scores: a reader of `fastrl.data` and the split to test on."""

    reader: str
    split: str = "test"


@dataclass(frozen=True)
class OutOfDomain:
    """A set that lmms-eval runs: the name of its task."""

    task: str


BENCHMARKS: Mapping[str, InDomain | OutOfDomain] = {
    "testbed": InDomain("testbed"),
    "geometry3k": InDomain("geometry3k"),
    "geoqa8k": InDomain("geoqa8k-r1v"),
    "math": InDomain("math"),
    "mathverse": OutOfDomain("mathverse_testmini"),
    "mathvision": OutOfDomain("mathvision_test"),
    "mathvista": OutOfDomain("mathvista_testmini_format"),
    "wemath": OutOfDomain("wemath_testmini_reasoning"),
}
TESTBED_ROWS = 400
"""Held-out problems of the testbed, if no limit is given: those of the quickstart recipe."""


def find(name: str) -> InDomain | OutOfDomain:
    """Return a benchmark.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(
            f"benchmark {name!r} is unknown.{did_you_mean(name, BENCHMARKS)} All: {', '.join(BENCHMARKS)}."
        )
    return BENCHMARKS[name]


def rows_of(
    benchmark: InDomain, *, source: str | None = None, limit: int | None = None, keep_good: bool = False
) -> list[Row]:
    """Return the rows of an in-domain set.

    Args:
        benchmark: Which.
        source: Where it lies; None = the published copy on the hub.
        limit: The first so many; None = all.
        keep_good: Leave out rows that do not pass the check; False = they are an error.
    """
    if benchmark.reader == "testbed":
        return _testbed(limit or TESTBED_ROWS)
    return checked(load(benchmark.reader, source, benchmark.split), keep_good=keep_good, limit=limit)


def _testbed(num: int) -> list[Row]:
    from fastrl.data.testbed import problems

    rows = []
    for problem in problems("held_out", num, 0):
        data = io.BytesIO()
        problem.image.save(data, "PNG")
        rows.append(
            Row(
                id=problem.id,
                problem=IMAGE + problem.question,
                answer=problem.answer,
                images=(Picture(data=data.getvalue()),),
                source="testbed",
            )
        )
    return rows
