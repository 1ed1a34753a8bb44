"""What the command line shows: progress while a recipe runs, and one table at the end."""

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

STAGES = {
    "generation": "generation",
    "rewards": "rewards",
    "old_ref": "old + reference log-probs",
    "select": "selection",
    "update": "update",
    "rest": "rest",
}
_PLAIN_EVERY = 4
"""Without a terminal there is no bar: a line is printed every so many steps instead."""


class RunProgress:
    """A bar with reward, G_t, kept share, seconds per step and accuracy; plain lines without a terminal.

    The bar is also left out where TQDM_DISABLE is set; NO_COLOR is respected.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        disabled = os.environ.get("TQDM_DISABLE", "").lower() in ("1", "true", "yes")
        self._has_bar = self.console.is_terminal and not disabled
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._label, self._num_steps, self._accuracy = "", 0, ""
        self._step_s: list[float] = []

    def start(self, label: str, num_steps: int) -> None:
        self._label, self._num_steps, self._accuracy, self._step_s = label, num_steps, "", []
        if self._has_bar:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
                console=self.console,
                auto_refresh=False,  # no thread of its own beside the training that is measured
            )
            self._bar.start()
            self._task = self._bar.add_task(label, total=num_steps, state="")
        else:
            self._say(f"{label}: {num_steps} steps")

    def step(self, row: Mapping[str, Any]) -> None:
        self._step_s.append(row["step_s"])
        state = describe_step(row, statistics.median(self._step_s))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=row["step"], state=state + self._accuracy, refresh=True)
        elif row["step"] % _PLAIN_EVERY == 0 or row["step"] == self._num_steps:
            self._say(f"{self._label}: step {row['step']}/{self._num_steps}  {state}")

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._accuracy = f"  held-out {row['greedy']:.1%}"
        if self._bar is None:
            self._say(
                f"{self._label}: step {row['step']}/{self._num_steps}  held-out {row['greedy']:.1%} greedy, "
                f"{row['sampled']:.1%} sampled, after {row['train_s']:.1f} s"
            )

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class CellProgress:
    """A line for every cell that a comparison trains, as it ends, with the time that the rest will take."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._started_at = time.monotonic()
        self._num_trained = 0

    def __call__(self, done: Any, num_done: int, num: int) -> None:
        """Take a cell (`fastrl.bench.workers.Done`), the cells that have ended, and all of them."""
        if done.is_old:
            return
        self._num_trained += 1
        left_s = (time.monotonic() - self._started_at) / self._num_trained * (num - num_done)
        loss, method, seed = done.cell.key
        if done.error is not None:
            said = f"failed: {done.error.splitlines()[0]}"
        else:
            summary = done.content["summary"]
            accuracy = summary["accuracy"]["greedy"]["after"] if summary["accuracy"] else float("nan")
            said = f"{accuracy:.1%} greedy, {summary['train_s']:.1f} s of training"
        self.console.print(
            f"[{num_done}/{num}] {loss}, {method}, seed {seed}: {said}  about {left_s / 60:.0f} min left",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def describe_step(row: Mapping[str, Any], step_s: float) -> str:
    """One line on a step: reward, G_t, kept share, seconds per step. What is not logged is left out."""
    parts = []
    if "reward" in row:
        reward = row["reward"]  # None where no rollout of the step could be scored
        parts.append("reward -" if reward is None else f"reward {reward:.3f}")
    if "fastrl/num_rollouts/mean" in row:
        parts.append(f"G {row['fastrl/num_rollouts/mean']:.0f}")
    if "fastrl/kept/frac" in row:
        parts.append(f"kept {row['fastrl/kept/frac']:.0%}")
    parts.append(f"{step_s:.2f} s/step")
    return "  ".join(parts)


def run_table(summary: Mapping[str, Any]) -> Table:
    """Build the table of a run from the content of its summary.json: measures down, methods across."""
    methods = summary["methods"]
    table = Table(title=f"{summary['recipe']}, seed {summary['seed']}", title_justify="left")
    table.add_column("", no_wrap=True)
    for method in methods:
        table.add_column(method["label"], justify="right")

    def row(name: str, values: list[str], *, end: bool = False) -> None:
        table.add_row(name, *values, end_section=end)

    for kind, name in (("greedy", "greedy"), ("sampled", "sampled at T = 1")):
        values = [_before_after(method["accuracy"].get(kind)) for method in methods]
        row(f"held-out accuracy, {name}", values, end=kind == "sampled")
    row("wall clock of training", [f"{m['train_s']:.1f} s" for m in methods])
    row("processor time of training", [f"{m['cpu_s']:.1f} s" for m in methods])
    row("per step (median)", [f"{m['step_s']:.2f} s" for m in methods])
    target = summary["target"]
    reach = "the baseline's final accuracy" if target is None else f"{target:.1%} (the baseline's final)"
    row(f"time to {reach}", [_or_dash(m["time_to_target_s"], "{:.1f} s") for m in methods])
    row("speed-up to that accuracy", [_or_dash(m["speedup_to_target"], "{:.2f}x") for m in methods])
    row("speed-up to equal steps", [_or_dash(m["speedup_equal_steps"], "{:.2f}x") for m in methods], end=True)
    row("rollouts generated", [f"{m['rollouts']['generated']:,.0f}" for m in methods])
    row("rollouts trained on", [f"{m['rollouts']['trained']:,.0f}" for m in methods], end=True)
    for stage, name in STAGES.items():
        values = [f"{m['stage_frac'][stage]:.0%}  {m['stage_s'][stage]:5.1f} s" for m in methods]
        row(f"time in {name}", values)
    return table


def doctor_table(checks: list[dict[str, str]]) -> Table:
    """Build the table of `fastrl doctor`: one row per check, with its remedy below where it has one."""
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        status = check["status"]
        table.add_row(f"[{styles[status]}]{status}[/]", check["name"], _plain(check["detail"]))
        if check["remedy"]:
            table.add_row("", "", _plain(f"-> {check['remedy']}"))
    return table


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _before_after(accuracy: Mapping[str, float] | None) -> str:
    return "-" if accuracy is None else f"{accuracy['before']:.1%} -> {accuracy['after']:.1%}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
