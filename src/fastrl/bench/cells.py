"""Cells of a benchmark: one method, one seed, one JSON file. A finished cell is never run again."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.bench.catalogue import with_rollouts
from fastrl.bench.files import write_json
from fastrl.bench.recipe import Recipe
from fastrl.bench.recording import Progress
from fastrl.bench.run import versions
from fastrl.bench.source import digest_of_testbed, source_digest
from fastrl.bench.summary import summarize_run
from fastrl.bench.tasks import TestbedTask
from fastrl.bench.training import STAGES, Method, train_method, warm_up, with_seed
from fastrl.types import ConfigError


def run_cell(
    folder: Path, recipe: Recipe, method: Method, *, seed: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Return one cell, from its file if it is finished, else by training.

    Args:
        folder: Holds <method>-seed<seed>.json per finished cell, and a folder of rows of the same name.
        recipe, method, seed: What to train; FastRL's own choices are seeded too.

    Returns:
        settings, versions, summary (see `summarize_run`), `steps` (one [step_s, sampled, trained] row
        per step) and `evaluations` (rows of evaluations.jsonl).

    Raises:
        ConfigError: the file there was made with other settings.
    """
    path = cell_path(folder, method.key, seed)
    finished = check_cell(path, recipe, method, seed)
    if finished is not None:
        return finished
    rows = path.with_suffix("")
    shutil.rmtree(rows, ignore_errors=True)  # of a run that was interrupted
    started = versions()
    run = train_method(recipe, with_seed(method, seed), seed=seed, folder=rows, progress=progress)
    cell = {
        "settings": cell_settings(recipe, method, seed),
        "versions": started,
        "summary": summarize_run(run),
        "steps": [tidy_step(row) for row in run.metrics],
        "evaluations": run.evaluations,
    }
    write_json(path, cell)
    return cell


def run_cells(
    folder: Path,
    recipe: Recipe,
    methods: Sequence[Method],
    *,
    num_seeds: int,
    progress: Callable[[], Progress],
) -> dict[str, list[dict[str, Any]]]:
    """Return the cells of every method by its key, one per seed, from files or by training.

    Args:
        progress: Makes one for each cell.
    """
    warm_up(recipe)
    cells: dict[str, list[dict[str, Any]]] = {method.key: [] for method in methods}
    for seed in range(num_seeds):  # seeds outside: a drift of the machine falls on all methods alike
        for method in methods:
            print(f"seed {seed}, {method.label}", flush=True)
            cells[method.key].append(run_cell(folder, recipe, method, seed=seed, progress=progress()))
    return cells


def cell_path(folder: Path, key: str, seed: int) -> Path:
    """The file of a cell, by the key of its method."""
    return folder / f"{key}-seed{seed}.json"


def check_cell(path: Path, recipe: Recipe, method: Method, seed: int) -> dict[str, Any] | None:
    """Return a finished cell, None if there is none.

    Raises:
        ConfigError: the file there was made with other settings.
    """
    if not path.exists():
        return None
    cell: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings = cell_settings(recipe, method, seed)
    changed = [key for key in settings if cell["settings"].get(key) != settings[key]]
    if changed:
        raise ConfigError(
            f"{path} was made with other settings ({', '.join(changed)}), so it does not belong to this "
            "benchmark. Move it away to run it again, or choose another --out."
        )
    return cell


def cell_settings(recipe: Recipe, method: Method, seed: int) -> dict[str, Any]:
    """What a cell's result depends on, but for the machine, as JSON values."""
    method = with_seed(method, seed)
    resolved = recipe.replace(**method.trainer, seed=seed).to_dict()
    resolved["fastrl"] = None if method.fastrl is None else method.fastrl.to_dict()
    resolved["packages"] = versions()["packages"]
    resolved["source"] = source_digest()
    if isinstance(recipe.task, TestbedTask):
        resolved["testbed"] = digest_of_testbed(recipe.task, seed)
    return json.loads(json.dumps(resolved))


STEP_COLUMNS = {
    "step": "step",
    "train_s": "train_s",
    "cpu_s": "cpu_s",
    "step_s": "step_s",
    "learning_rate": "learning_rate",
    "num_rollouts": "fastrl/num_rollouts/mean",
    "generated_rows": "fastrl/rollouts",
    "trained_rows": "fastrl/trained/rows",
    "trained_tokens": "fastrl/trained/tokens",
    "kept_frac": "fastrl/kept/frac",
    "frac_zero_variance": "fastrl/frac_zero_variance",
    "completion_length": "completions/mean_length",
    "entropy": "entropy",
    "reward": "reward",
    **{f"stage_{stage}": f"fastrl/time/{stage}_s" for stage in STAGES},
}
"""Columns of a step's row, and the keys of the trainer's log that they come from."""


def tidy_step(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a step from the trainer's log; None for what it did not log."""
    return {column: row.get(key) for column, key in STEP_COLUMNS.items()}


def curve(
    cell: Mapping[str, Any], accuracy: str = "greedy", clock: str = "train_s"
) -> list[tuple[float, float]]:
    """(seconds of training, held-out accuracy) pairs of a cell; `clock` is train_s, or cpu_s for the processor's."""
    return [(row[clock], row[accuracy]) for row in cell["evaluations"]]


def stock_with(recipe: Recipe, num_rollouts: int) -> Method:
    """Stock TRL with another fixed number of rollouts and the same number of prompts per step."""
    return Method(
        key=f"grpo-g{num_rollouts}",
        label=f"stock, G = {num_rollouts}",
        trainer=with_rollouts(recipe, num_rollouts),
    )
