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

from fastrl.bench.files import write_json
from fastrl.bench.recipe import Recipe
from fastrl.bench.recording import Progress
from fastrl.bench.summary import summarize_runs
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
    name = str(recipe.trainer.get("loss_type", "dapo")).upper()
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

    Args:
        recipe: What to train.
        methods: Default: those of the recipe. The first one without FastRL is what others are
            compared with.
        out: Folder of this run; default runs/<recipe>-<UTC time>. It must not hold anything yet.
        progress: Told about every step and evaluation.

    Raises:
        ConfigError: started with several processes, settings that TRL rejects, or a folder in use.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: this version trains in one process. Start it without "
            "a launcher."
        )
    chosen = list(methods if methods is not None else methods_of(recipe))
    for method in chosen:
        recipe.replace(**method.trainer).grpo_config("unused")  # all settings are checked before any training
    folder = _make_folder(recipe, out)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False), encoding="utf-8")
    write_json(folder / "versions.json", versions())
    warm_up(recipe)
    runs = [
        train_method(recipe, method, seed=recipe.seed, folder=folder / method.key, progress=progress)
        for method in chosen
    ]
    summary = {"recipe": recipe.name, **summarize_runs(runs)}
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


def _make_folder(recipe: Recipe, out: str | Path | None) -> Path:
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{recipe.name}-{stamp}"
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is in use: a run needs a folder of its own, or results of two runs would mix. Choose "
            "another --out, or remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
