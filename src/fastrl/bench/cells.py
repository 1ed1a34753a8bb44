"""Cells of a benchmark: one method, one seed, one JSON file. A finished cell is never run again."""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastrl
from fastrl.bench.files import write_json
from fastrl.bench.recipe import Recipe
from fastrl.bench.recording import Progress
from fastrl.bench.run import versions
from fastrl.bench.summary import summarize_run
from fastrl.bench.training import Method, train_method, warm_up, with_seed
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
    method = with_seed(method, seed)
    name = f"{method.key}-seed{seed}"
    path = folder / f"{name}.json"
    settings = cell_settings(recipe, method, seed)
    if path.exists():
        cell = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in settings if cell["settings"].get(key) != settings[key]]
        if changed:
            raise ConfigError(
                f"{path} was made with other settings ({', '.join(changed)}), so it does not belong to this "
                "benchmark. Move it away to run it again, or choose another --out."
            )
        return cell
    shutil.rmtree(folder / name, ignore_errors=True)  # rows of a run that was interrupted
    started = versions()
    run = train_method(recipe, method, seed=seed, folder=folder / name, progress=progress)
    cell = {
        "settings": settings,
        "versions": started,
        "summary": summarize_run(run),
        "steps": [
            [row["step_s"], row.get("fastrl/num_rollouts/mean"), row.get("fastrl/trained/rows")]
            for row in run.metrics
        ],
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


def cell_settings(recipe: Recipe, method: Method, seed: int) -> dict[str, Any]:
    """What a cell's result depends on, but for the machine, as JSON values."""
    resolved = recipe.replace(**method.trainer, seed=seed).to_dict()
    resolved["fastrl"] = None if method.fastrl is None else method.fastrl.to_dict()
    resolved["packages"] = versions()["packages"]
    resolved["source"] = source_digest()
    return json.loads(json.dumps(resolved))


@functools.cache
def source_digest() -> str:
    """A digest of FastRL's own code and shipped checkpoint: cells of different code are not one benchmark."""
    root = Path(fastrl.__file__).parent
    files = [*root.rglob("*.py"), *(root / "testbed" / "checkpoint").iterdir()]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def curve(cell: dict[str, Any], accuracy: str = "greedy") -> list[tuple[float, float]]:
    """(seconds of training, held-out accuracy) pairs of a cell."""
    return [(row["train_s"], row[accuracy]) for row in cell["evaluations"]]


def stock_with(recipe: Recipe, num_rollouts: int) -> Method:
    """Stock TRL with another fixed number of rollouts and the same number of prompts per step."""
    rows, default = int(recipe.trainer["per_device_train_batch_size"]), int(recipe.trainer["num_generations"])
    if rows * num_rollouts % default:
        raise ConfigError(
            f"per_device_train_batch_size {rows} at num_generations {default} has no whole counterpart at "
            f"{num_rollouts}: rows per prompt change, prompts per step must not. Choose a multiple of {default}."
        )
    return Method(
        key=f"grpo-g{num_rollouts}",
        label=f"stock, G = {num_rollouts}",
        trainer={
            "num_generations": num_rollouts,
            "per_device_train_batch_size": rows * num_rollouts // default,
        },
    )
