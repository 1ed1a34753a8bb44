"""math-verify in a process of its own, for answers that are more than a number: within a second, in any thread.

math-verify bounds its time with signals, which work in the main thread alone; sympy can hang where no Python code can
stop it. A process can always be killed. One per process of the caller, started when it is first needed.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from functools import lru_cache

from fastrl.rewards.status import Status

SECONDS = 1.0
"""For one answer. Those that take longer count as out of time."""
_START_SECONDS = 120.0


class Engine:
    """Questions to one child process, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._owner = 0

    def compare(self, prediction: str | None, gold: str) -> Status:
        """Ask whether two answers are equal; `prediction` None asks whether the gold answer can be read."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps({"prediction": prediction, "gold": gold}) + "\n")
                process.stdin.flush()
                return Status(self._lines.get(timeout=SECONDS))
            except (
                queue.Empty,
                BrokenPipeError,
                ValueError,
            ):  # too slow, gone, or died in the middle of a line
                self._stop()
                return Status.OUT_OF_TIME

    def _running(self) -> "subprocess.Popen[str]":
        if self._owner != os.getpid():  # a fork does not inherit the reader thread
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        self._owner = os.getpid()
        lines: queue.Queue[str] = queue.Queue()
        process = subprocess.Popen(
            [sys.executable, "-m", "fastrl.rewards._grader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        try:
            ready = lines.get(timeout=_START_SECONDS)
        except queue.Empty:
            ready = ""
        if ready != "ready":
            process.kill()
            raise RuntimeError(
                "the grader for long answers does not start: `python -m fastrl.rewards._grader` says why. "
                'It needs math-verify: pip install "fastrl-grpo[trl]".'
            )
        self._process, self._lines = process, lines

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.strip())
    lines.put("")  # it has ended: whoever waits must not wait for ever


_ENGINE = Engine()


@lru_cache(maxsize=8192)
def compare(prediction: str | None, gold: str) -> Status:
    """Ask this process's engine; the same question is asked once."""
    return _ENGINE.compare(prediction, gold)
