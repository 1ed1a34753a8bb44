"""`fastrl compare`: losses x methods x seeds of a recipe, resumable, with equal updates; its tables in one dict.

Folder: cells/<loss>/<method>-seed<k>.json (see `fastrl.bench.cells`) beside a folder of rows, or .failed.txt with the
traceback; runs.parquet, steps.parquet, evaluations.parquet (tidy); compare.json.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.catalogue import LOSSES, like, resolve, with_rollouts
from fastrl.bench.cells import cell_path, check_cell
from fastrl.bench.comparison import tables
from fastrl.bench.equal import check_done, check_planned
from fastrl.bench.files import write_json
from fastrl.bench.recipe import Recipe
from fastrl.bench.run import versions
from fastrl.bench.tidy import mean_num_rollouts, write_tidy
from fastrl.bench.training import Method
from fastrl.bench.workers import Done, Train, train_all
from fastrl.config import did_you_mean
from fastrl.types import ConfigError

FORMAT = 1
WRITE_EVERY_S = 60
"""Seconds between two versions of compare.json while cells are trained: a page may be watching."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What is compared.

    Args:
        recipe: What is trained; the losses change its trainer keys, the methods its FastRL settings.
        methods: The first is the baseline.
        losses: Names of `fastrl.bench.catalogue.LOSSES`.
        seeds: Of sampling, prompts and choices; the same for all methods.
        clock: wall, or processor: seconds that the process computed, which other work on the machine does not add to.
        targets: Accuracies whose times are compared, beside the baseline's final one.
    """

    recipe: Recipe
    methods: Sequence[Method]
    losses: Sequence[str]
    seeds: Sequence[int]
    clock: str = "wall"
    targets: Sequence[float] = (0.6, 0.8)

    @property
    def baseline(self) -> str:
        return self.methods[0].key


def plan(
    recipe: Recipe,
    *,
    methods: Sequence[str],
    losses: Sequence[str],
    num_seeds: int,
    clock: str = "wall",
    targets: Sequence[float] = (0.6, 0.8),
) -> Matrix:
    """Validate a comparison before anything is trained.

    Raises:
        ConfigError: an unknown method or loss, no seed, a method twice, one that follows a method that is left out,
            settings that TRL rejects, or methods that would not make the same updates.
    """
    if num_seeds < 1 or not methods or not losses:
        raise ConfigError(
            f"compare: {len(methods)} methods, {len(losses)} losses, {num_seeds} seeds. One of each at least."
        )
    for loss in losses:
        if loss not in LOSSES:
            raise ConfigError(
                f"--losses {loss}: no such loss.{did_you_mean(loss, LOSSES)} All: {', '.join(LOSSES)}."
            )
    chosen = [resolve(spec, recipe) for spec in methods]
    keys = [method.key for method in chosen]
    for what, names in (("--methods", keys), ("--losses", list(losses))):
        if len(set(names)) < len(names):
            raise ConfigError(f"{what} {' '.join(names)}: one is named twice. Name each once.")
    for method in chosen:
        if like(method) not in (None, *keys):
            raise ConfigError(
                f"--methods {method.key} takes its G from {like(method)}: name that method too, or leave it out."
            )
    matrix = Matrix(
        recipe=recipe, methods=chosen, losses=losses, seeds=range(num_seeds), clock=clock, targets=targets
    )
    for loss in losses:
        check_planned(with_loss(recipe, loss), chosen)
    return matrix


def compare(
    matrix: Matrix, *, out: Path, jobs: int = 1, say: Callable[[Done, int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Train what is not trained yet, and write the tables.

    Args:
        matrix: What to compare.
        out: Folder of the comparison; finished cells there are taken as they are.
        jobs: Cells at once, each in a process of its own; 1 = in this one.
        say: Told about every cell as it is done or fails: (cell, cells finished or failed, cells in all).

    Returns:
        The content of compare.json: recipe, settings, versions, methods,
        cells {planned, finished, failed, not_run, ended},
        equal_updates, and `tables` and `aggregate` of `fastrl.bench.comparison.tables`.

    Raises:
        ConfigError: cells there were made with other settings, or finished ones made unequal updates.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least one cell is trained at a time.")
    cells = _cells(matrix, out)
    for cell in cells:
        if cell.like is None:
            check_cell(cell.path, cell.recipe, cell.method, cell.seed)
    started = versions()
    done: dict[tuple[str, str, int], Done] = {}
    written_at = time.monotonic()

    def note(result: Done) -> None:
        nonlocal written_at
        done[result.cell.key] = result
        say(result, len(done), len(cells))
        if time.monotonic() - written_at > WRITE_EVERY_S:
            _write(matrix, out, cells, done, started)
            written_at = time.monotonic()

    train_all([cell for cell in cells if cell.like is None], jobs=jobs, recipe=matrix.recipe, note=note)
    followers = [_followed(cell, out) for cell in cells if cell.like is not None]
    train_all([cell for cell in followers if cell is not None], jobs=jobs, recipe=matrix.recipe, note=note)
    result = _write(matrix, out, cells, done, started, ended=True)
    check_done(result["equal_updates"])
    return result


def with_loss(recipe: Recipe, loss: str) -> Recipe:
    """The recipe with the trainer keys of a loss."""
    return recipe.replace(**LOSSES[loss])


def _cells(matrix: Matrix, out: Path) -> list[Train]:
    """All cells; seeds outside, so that a drift of the machine falls on all methods alike.

    Within a seed the order is drawn: the same neighbours in time, or on the other core, in every seed would favour
    the same methods.
    """
    cells = []
    for seed in matrix.seeds:
        of_seed = [
            Train(
                folder=out / "cells" / loss,
                loss=loss,
                recipe=with_loss(matrix.recipe, loss),
                method=method,
                seed=seed,
                like=like(method),
            )
            for loss in matrix.losses
            for method in matrix.methods
        ]
        cells += [of_seed[i] for i in np.random.default_rng(seed).permutation(len(of_seed))]
    return cells


def _followed(cell: Train, out: Path) -> Train | None:
    """A cell whose G is known now; None where the cell that it follows failed."""
    path = cell_path(cell.folder, str(cell.like), cell.seed)
    if not path.exists():
        return None
    followed = json.loads(path.read_text(encoding="utf-8"))
    num_rollouts = max(2, round(mean_num_rollouts(followed)))
    return cell.with_trainer(with_rollouts(cell.recipe, num_rollouts))


def _write(
    matrix: Matrix,
    out: Path,
    cells: Sequence[Train],
    done: dict[tuple[str, str, int], Done],
    started: dict[str, Any],
    *,
    ended: bool = False,
) -> dict[str, Any]:
    finished = {cell.key: json.loads(cell.path.read_text("utf-8")) for cell in cells if cell.path.exists()}
    errors = {key: result.error for key, result in done.items() if result.error is not None}
    waiting_for = {cell.key for cell in cells if cell.like is not None and cell.key not in finished}
    content = {
        "format": FORMAT,
        "recipe": matrix.recipe.name,
        "settings": matrix.recipe.to_dict(),
        "versions": started,
        "clock": matrix.clock,
        "targets": list(matrix.targets),
        "baseline": matrix.baseline,
        "losses": list(matrix.losses),
        "num_seeds": len(matrix.seeds),
        "seeds": list(matrix.seeds),
        "methods": [
            {
                "key": method.key,
                "label": method.label,
                "fastrl": None if method.fastrl is None else method.fastrl.to_dict(),
                "trainer": dict(method.trainer),
            }
            for method in matrix.methods
        ],
        "cells": {
            "planned": len(cells),
            "finished": len(finished),
            "failed": [
                {"loss": loss, "method": method, "seed": seed, "error": error}
                for (loss, method, seed), error in errors.items()
            ],
            "not_run": sorted(map(list, waiting_for - set(errors))),
            "ended": ended,
        },
        **tables(matrix, finished),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_tidy(out, finished)
    write_json(out / "compare.json", content)
    return content
