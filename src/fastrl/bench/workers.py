"""Train the cells of a comparison, one after another or in several processes; one that fails loses no other."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fastrl.bench.cells import cell_path, run_cell
from fastrl.bench.recipe import Recipe
from fastrl.bench.tasks import TestbedTask
from fastrl.bench.training import Method, warm_up


@dataclass(frozen=True, kw_only=True)
class Train:
    """One cell to train.

    Args:
        folder: Of the cells of its loss.
        loss, recipe, method, seed: What to train.
        like: The method whose mean G_t it takes, if it does.
    """

    folder: Path
    loss: str
    recipe: Recipe
    method: Method
    seed: int
    like: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.loss, self.method.key, self.seed

    @property
    def path(self) -> Path:
        return cell_path(self.folder, self.method.key, self.seed)

    @property
    def failed_path(self) -> Path:
        return self.path.with_suffix(".failed.txt")

    def with_trainer(self, trainer: Mapping[str, Any]) -> "Train":
        """The same cell with other trainer keys of its method."""
        return replace(self, method=replace(self.method, trainer={**self.method.trainer, **trainer}))


@dataclass(frozen=True, kw_only=True)
class Done:
    """A cell that has ended: `content` of its file, or the `error` that ended it; `is_old`: it was there before."""

    cell: Train
    content: dict[str, Any] | None = None
    error: str | None = None
    is_old: bool = False


def train_all(cells: Sequence[Train], *, jobs: int, recipe: Recipe, note: Callable[[Done], None]) -> None:
    """Train every cell that has no file yet.

    Args:
        cells: In the order in which they begin.
        jobs: Processes; 1 = this one.
        recipe: What a process warms up with before its first measured step.
        note: Told, in this thread, about every cell that has ended.
    """
    todo = [cell for cell in cells if not cell.path.exists()]
    for cell in cells:
        if cell.path.exists():
            note(Done(cell=cell, content=train_cell(cell), is_old=True))
    if not todo:
        return
    if jobs == 1:
        prepare(recipe)
        for cell in todo:
            note(_ended(cell, train_cell))
        return
    workers: SimpleQueue[_Worker] = SimpleQueue()
    for _ in range(jobs):
        workers.put(_Worker(recipe))
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        futures = [threads.submit(_on_a_worker, cell, workers) for cell in todo]
        try:
            for future in as_completed(futures):
                note(future.result())
        finally:  # after Ctrl-C nothing new begins
            threads.shutdown(wait=False, cancel_futures=True)
            for _ in range(jobs):
                workers.get().close()


def prepare(recipe: Recipe) -> None:
    """What a process does once, before its first cell."""
    if isinstance(recipe.task, TestbedTask):
        warm_up(recipe)


def train_cell(cell: Train) -> dict[str, Any]:
    """Train a cell and write its file."""
    return run_cell(cell.folder, cell.recipe, cell.method, seed=cell.seed)


class _Worker:
    """One process that trains cells; a new one is started where it died."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        context = get_context("spawn")  # a fork of a process that has used torch's threads may hang
        return ProcessPoolExecutor(1, mp_context=context, initializer=prepare, initargs=(self._recipe,))

    def train(self, cell: Train) -> dict[str, Any]:
        try:
            return self._pool.submit(train_cell, cell).result()
        except BrokenProcessPool:
            self._pool = self._start()
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _on_a_worker(cell: Train, workers: "SimpleQueue[_Worker]") -> Done:
    worker = workers.get()
    try:
        return _ended(cell, worker.train)
    finally:
        workers.put(worker)


def _ended(cell: Train, train: Callable[[Train], dict[str, Any]]) -> Done:
    """Train a cell; whatever it raises is its own failure, written beside where its file would be."""
    try:
        content = train(cell)
    except Exception as error:
        cell.folder.mkdir(parents=True, exist_ok=True)
        cell.failed_path.write_text(traceback.format_exc(), encoding="utf-8")
        return Done(cell=cell, error=f"{type(error).__name__}: {error}")
    cell.failed_path.unlink(missing_ok=True)
    return Done(cell=cell, content=content)
