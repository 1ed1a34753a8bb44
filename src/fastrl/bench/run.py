"""Run a recipe: its methods one after the other from the same start, into one run folder."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from accelerate import PartialState

from fastrl.bench.files import write_json
from fastrl.bench.recipe import Recipe
from fastrl.bench.recording import Progress
from fastrl.bench.summary import summarize_runs
from fastrl.bench.tasks import TestbedTask
from fastrl.bench.training import Method, MethodRun, train_method, warm_up
from fastrl.types import ConfigError

PACKAGES = ("fastrl-grpo", "torch", "trl", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
SETTINGS = (
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """What a recipe gave.

    Args:
        folder: recipe.yaml, versions.json, summary.json, and a folder per method with
            metrics.jsonl and evaluations.jsonl.
        runs: In the order in which they ran.
        summary: The content of summary.json, see `summarize_runs`.
    """

    folder: Path
    runs: list[MethodRun]
    summary: dict[str, Any]


def methods_of(recipe: Recipe) -> list[Method]:
    """The methods that a recipe asks for: stock GRPO unless `baseline: false`, then FastRL."""
    name = recipe.algorithm or str(recipe.trainer.get("loss_type", "dapo")).upper()
    stock = Method(key="grpo", label=f"stock TRL {name}")
    fast = Method(key="fastrl", label=f"{name} + FastRL", fastrl=recipe.fastrl)
    return [stock, fast] if recipe.baseline else [fast]


def run_recipe(
    recipe: Recipe,
    *,
    methods: Sequence[Method] | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> RecipeRun:
    """Train every method of a recipe from the same start, on the same prompts and seed.

    Under a launcher (`accelerate launch`, `torchrun`), all processes call it; the main one writes.

    Args:
        recipe: What to train.
        methods: Default: those of the recipe. The first one without FastRL is what others are
            compared with.
        out: Folder of this run; default runs/<recipe>-<UTC time>. It must not hold anything yet.
        progress: Told about every step and evaluation.

    Raises:
        ConfigError: another number of processes than the recipe is written for, several processes without a folder,
            settings that TRL rejects, or a folder in use.
    """
    _check_processes(recipe, out)
    chosen = list(methods if methods is not None else methods_of(recipe))
    for method in chosen:
        recipe.replace(**method.trainer).grpo_config("unused")  # all settings are checked before any training
    folder = _folder(recipe, out)
    if is_main_process():
        _make(folder)
        text = yaml.safe_dump(recipe.to_dict(), sort_keys=False)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        write_json(folder / "versions.json", versions())
    PartialState().wait_for_everyone()  # nobody writes there before the check that the folder is free
    if isinstance(recipe.task, TestbedTask):
        warm_up(recipe)  # for clocks that are compared over a minute; a long run does not notice
    runs = [
        train_method(
            recipe, method, seed=recipe.seed, folder=folder / method.key, save=True, progress=progress
        )
        for method in chosen
    ]
    summary = {"recipe": recipe.name, **summarize_runs(runs)}
    if is_main_process():
        write_json(folder / "summary.json", summary)
    return RecipeRun(folder=folder, runs=runs, summary=summary)


def versions() -> dict[str, Any]:
    """Where and with what a run was made: packages, machine, and the settings that change its speed."""
    import torch

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": platform.python_version(),
        "packages": packages,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu_name(),
            "num_cpus": os.cpu_count(),
            "accelerator": str(torch.accelerator.current_accelerator()) if _has_accelerator() else None,
            "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        },
        "environment": {name: os.environ.get(name) for name in SETTINGS},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _has_accelerator() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def is_main_process() -> bool:
    """Whether this process writes and prints: the only one, or rank 0 under a launcher."""
    return int(os.environ.get("RANK", "0")) == 0


def _check_processes(recipe: Recipe, out: str | Path | None) -> None:
    num = int(os.environ.get("WORLD_SIZE", "1"))
    wanted = getattr(recipe.task, "processes", None)
    if wanted is not None and num != wanted:
        raise ConfigError(
            f"{recipe.name} is written for {wanted} processes and was started with {num}: every update would see "
            f"{num / wanted:g} times its rollouts. Start it with `accelerate launch --num_processes {wanted}`, or set "
            f"task.processes={num} and gradient_accumulation_steps so that the product stays the same."
        )
    if num > 1 and out is None:
        raise ConfigError(f"{num} processes need one folder: name it with --out.")


def _folder(recipe: Recipe, out: str | Path | None) -> Path:
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{recipe.name}-{stamp}"
    return Path(out)


def _make(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is in use: a run needs a folder of its own, or results of two runs would mix. Choose "
            "another --out, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
