"""Record a training run: the clock of training alone, a row per step, a row per evaluation."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback


class Progress(Protocol):
    """What a runner tells while it works. Rows are those of metrics.jsonl and evaluations.jsonl."""

    def start(self, label: str, num_steps: int) -> None: ...
    def step(self, row: Mapping[str, Any]) -> None: ...
    def evaluated(self, row: Mapping[str, Any]) -> None: ...
    def finish(self) -> None: ...


class Silent:
    """Tells nothing."""

    def start(self, label: str, num_steps: int) -> None: ...
    def step(self, row: Mapping[str, Any]) -> None: ...
    def evaluated(self, row: Mapping[str, Any]) -> None: ...
    def finish(self) -> None: ...


class Stopwatch:
    """Seconds on a clock while it ran."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._total = self.seconds
        self._since = None

    @property
    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else self._clock() - self._since)


class Recorder(TrainerCallback):
    """Collect a row per step and per evaluation; the clock stands still while the model is evaluated.

    TRL's own evaluations (`eval_strategy`) become rows of validations.jsonl.

    Evaluation leaves random state and training mode untouched (see `fastrl.testbed.evaluate`), so a
    run with evaluations is the run without them.

    Args:
        evaluate: (model, whether this is the last time) -> row of accuracies; None where `evaluate_every` is.
        evaluate_every: Steps between evaluations; 0 = before and after only; None = never.
        label: Names the run to the progress.
        folder: Rows are appended to metrics.jsonl and evaluations.jsonl there; None = not written.
    """

    def __init__(
        self, label: str, evaluate: Any, evaluate_every: int | None, folder: Path | None, progress: Progress
    ) -> None:
        self.label = label
        self.evaluate = evaluate
        self.evaluate_every = evaluate_every
        self.folder = folder
        self.progress = progress
        self.clock = Stopwatch()
        self.cpu_clock = Stopwatch(time.process_time)
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.start(self.label, state.max_steps)
        self._evaluate(state, kwargs["model"])
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = state.global_step >= state.max_steps
        every = self.evaluate_every
        if every is not None and (is_last or (every and state.global_step % every == 0)):
            self.clock.stop()
            self.cpu_clock.stop()
            self._evaluate(state, kwargs["model"], is_last=is_last)
            self._start()
        if control.should_evaluate:  # by the trainer itself, next
            self.clock.stop()
            self.cpu_clock.stop()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "train_runtime" in logs:  # the summary after the last step
            return
        train_s = self.clock.seconds
        if any(key.startswith("eval_") for key in logs):
            self._append("validations.jsonl", {"step": state.global_step, "train_s": train_s, **logs})
            return
        before = self.metrics[-1]["train_s"] if self.metrics else 0.0
        row = {
            "step": state.global_step,
            "train_s": train_s,
            "step_s": train_s - before,
            "cpu_s": self.cpu_clock.seconds,
            **logs,
        }
        self.metrics.append(row)
        self._append("metrics.jsonl", row)
        self.progress.step(row)

    def _start(self) -> None:
        self.clock.start()
        self.cpu_clock.start()

    def _evaluate(self, state: Any, model: Any, *, is_last: bool = False) -> None:
        if self.evaluate_every is None:
            return
        times = {"train_s": self.clock.seconds, "cpu_s": self.cpu_clock.seconds}
        row = {"step": state.global_step, **times, **self.evaluate(model, is_last)}
        self.evaluations.append(row)
        self._append("evaluations.jsonl", row)
        self.progress.evaluated(row)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if self.folder is not None:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
