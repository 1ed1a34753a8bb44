"""Write the page and its twin, once or whenever a file of the runs has changed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastrl.report.page.read import fingerprint, is_finished, kind_of
from fastrl.report.page.render import render
from fastrl.report.page.twin import build_twin
from fastrl.types import ConfigError


@dataclass(kw_only=True)
class Report:
    """A page of some runs.

    Args:
        runs: Folders of fastrl train or fastrl compare.
        out: The page; its twin lies beside it as .json.
        num_groups: Groups to show of each run.
        every: Seconds after which the page loads itself again as long as a run is not finished; None = never.

    Raises:
        ConfigError: no run, a folder that is none, a page that is not .html, or a number that cannot be.
    """

    runs: Sequence[Path]
    out: Path
    num_groups: int = 12
    every: float | None = None
    _seen: dict[str, tuple[int, int]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError(
                "fastrl report: no run. Give one or more folders of fastrl train or fastrl compare."
            )
        for folder in self.runs:
            kind_of(folder)
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(
                f"--out {self.out}: a report is a page, so its name ends in .html; its twin lies beside it as .json. "
                f"Use {self.out.with_suffix('.html')}."
            )
        if self.num_groups < 0:
            raise ConfigError(f"--groups {self.num_groups}: a number of groups is at least 0. 0 shows none.")
        if self.every is not None and not 1 <= self.every <= 86_400:
            raise ConfigError(f"--every {self.every}: seconds between 1 and 86400. The default is 10.")

    @property
    def twin_path(self) -> Path:
        return self.out.with_suffix(".json")

    def write(self) -> bool:
        """Write both files, each whole or not at all; return whether all runs are finished."""
        twin = build_twin(self.runs, num_groups=self.num_groups, every=self.every)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        _replace(self.twin_path, json.dumps(twin, allow_nan=False) + "\n")
        _replace(self.out, render(twin, self.twin_path.name))
        return bool(twin["finished"])

    def step(self) -> tuple[bool, bool]:
        """Write if a file has changed since the last step; return (written, finished).

        The files are looked at before they are read: what comes in between is seen by the next step.
        """
        now = {name: state for folder in self.runs for name, state in fingerprint(folder).items()}
        if now == self._seen:
            return False, all(is_finished(folder) for folder in self.runs)
        finished = self.write()
        self._seen = now
        return True, finished


def follow(
    report: Report, tell: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Step until all runs are finished, or Ctrl-C.

    Args:
        report: With `every`.
        tell: Told about each page that was written.
        sleep: Waits.
    """
    every = report.every or 10.0
    try:
        while True:
            written, finished = report.step()
            if written:
                tell(f"{report.out}: written{', finished' if finished else ''}")
            if finished:
                return
            sleep(every)
    except KeyboardInterrupt:
        tell(f"{report.out}: stopped following; the run goes on")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
