"""`fastrl doctor`: is this installation, this machine and this recipe in order, and if not, what to do?"""

import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from fastrl.types import ConfigError

if TYPE_CHECKING:
    from fastrl.bench.recipe import Recipe

# Tried together; `trl` is the one whose methods are overridden, so its minor version must match.
TRIED = {
    "numpy": "2.4.6",
    "torch": "2.13.0",
    "trl": "1.16.0",
    "transformers": "5.24.0",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "pillow": "13.0.0",
    "matplotlib": "3.11.2",
}
TRIED_VERL = "0.9.1"
EXTRA = {"matplotlib": "report"}
PYTHONS = ((3, 11), (3, 13))


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding: status ok | note | problem, and the remedy where there is something to mend."""

    name: str
    status: str
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(recipe: str | Path | None = None) -> list[Check]:
    """Run all checks. Nothing is installed, changed or downloaded."""
    checks = [_python(), *_packages(), _torchvision()]
    if _has("torch"):
        checks += _cpu()
    if _has("trl"):
        checks.append(_signatures())
        if recipe is not None:
            checks += list(_recipe(recipe))
    if _has("verl"):
        checks.append(_verl())
    return checks


def _python() -> Check:
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    in_range = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    return Check(
        name="python",
        status="ok" if in_range else "problem",
        detail=platform.python_version(),
        remedy="" if in_range else f"Use Python {low} to {high}.",
    )


def _packages() -> Iterator[Check]:
    for name, tried in TRIED.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            extra = EXTRA.get(name, "trl")
            yield Check(
                name=name,
                status="problem" if extra == "trl" else "note",
                detail="not installed",
                remedy=f'pip install "fastrl-grpo[{extra}]"',
            )
            continue
        same = found.partition("+")[0] == tried
        other_trl = name == "trl" and found.split(".")[:2] != tried.split(".")[:2]
        yield Check(
            name=name,
            status="problem" if other_trl else "ok" if same else "note",
            detail=found if same else f"{found}; tried with {tried}",
            remedy='pip install "trl>=1.16,<1.17": FastRL overrides methods of TRL' if other_trl else "",
        )


def _torchvision() -> Check:
    if not _has("torchvision"):
        return Check(name="torchvision", status="ok", detail="not installed, and not needed")
    version = metadata.version("torchvision")
    if not _has("torch"):
        return Check(name="torchvision", status="note", detail=f"{version}, without torch")
    import torch

    remedy = "Not needed: pip uninstall torchvision. Or install both from the same index as torch."
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        return Check(
            name="torchvision",
            status="problem",
            detail=f"{version} does not load beside torch {torch.__version__} ({error}); image processors fail with it",
            remedy=remedy,
        )
    return Check(
        name="torchvision",
        status="note",
        detail=f"{version} loads; the testbed's numbers were taken without it (another image processor)",
    )


def _signatures() -> Check:
    from fastrl.integrations.trl import signature_problems

    problems = signature_problems()
    return Check(
        name="TRL's methods",
        status="problem" if problems else "ok",
        detail="; ".join(problems) or "those that FastRL overrides have the expected parameters",
        remedy='pip install "trl>=1.16,<1.17"' if problems else "",
    )


def _verl() -> Check:
    """Would `+fastrl.*` on verl's own command line be heard? verl logs a plug-in that fails at debug level only."""
    try:
        importlib.import_module("verl")
    except (ImportError, RuntimeError, OSError) as error:
        return Check(name="verl", status="problem", detail=f"cannot be imported: {error}")
    if importlib.util.find_spec("verl.trainer.ray_trainer") is not None:
        return Check(
            name="verl",
            status="ok",
            detail="EasyR1: start training with python -m fastrl.integrations.easyr1",
        )
    version = metadata.version("verl")
    in_place = "fastrl.integrations._verl_plugin" in sys.modules
    if version.split(".")[:2] != TRIED_VERL.split(".")[:2]:
        return Check(
            name="verl",
            status="problem",
            detail=f"{version}; tried with {TRIED_VERL}",
            remedy=f'pip install "verl=={TRIED_VERL}": FastRL overrides methods of verl',
        )
    if in_place:
        return Check(name="verl", status="ok", detail=f"{version}; it has loaded FastRL's plug-in")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    return Check(
        name="verl",
        status="problem",
        detail=f"{version} has NOT loaded the plug-in (VERL_USE_EXTERNAL_PLUGINS={policy}): +fastrl.* on the command "
        "line of verl.trainer.main_ppo would be ignored in silence",
        remedy="Start training with python -m fastrl.integrations.verl; or unset VERL_USE_EXTERNAL_PLUGINS and install "
        "FastRL again.",
    )


def _cpu() -> Iterator[Check]:
    import torch

    if torch.accelerator.is_available():
        yield Check(name="accelerator", status="ok", detail=str(torch.accelerator.current_accelerator()))
        return
    yield Check(name="accelerator", status="ok", detail="none: training runs on the CPU")
    threads, cpus = torch.get_num_threads(), len(_usable_cpus())
    yield Check(
        name="threads",
        status="ok" if threads <= cpus else "problem",
        detail=f"torch uses {threads}, this process may use {cpus} CPUs",
        remedy="" if threads <= cpus else f"Set OMP_NUM_THREADS={cpus}, or task.num_threads in the recipe.",
    )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > 0.5 * cpus
    yield Check(
        name="load",
        status="note" if busy else "ok",
        detail=f"{load:.1f} on average over the last minute",
        remedy="Other work slows training and makes its times unfit for comparison." if busy else "",
    )
    passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    yield Check(
        name="OMP_WAIT_POLICY",
        status="ok" if passive else "note",
        detail="passive"
        if passive
        else "not passive: waiting threads spin, up to 3x slower on a busy machine",
        remedy="" if passive else "export OMP_WAIT_POLICY=passive (`fastrl train` does it by itself)",
    )
    if platform.libc_ver()[0] == "glibc":
        # Read by the C library when a process starts: a running one cannot set it for itself.
        kept = os.environ.get("MALLOC_MMAP_MAX_") == "0"
        yield Check(
            name="MALLOC_MMAP_MAX_",
            status="ok" if kept else "note",
            detail="0"
            if kept
            else "not 0: large activations are mapped anew in every step, about 10 % slower",
            remedy="" if kept else "export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000",
        )
    found = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in _cpu_flags()]
    yield Check(
        name="bf16 products",
        status="ok" if found else "note",
        detail=", ".join(found) if found else "neither AMX nor AVX-512 bf16: matrix products stay in float32",
    )


def _recipe(path: str | Path) -> Iterator[Check]:
    from fastrl.bench.recipe import read_recipe

    try:
        recipe = read_recipe(path)
        yield from _batches(recipe)
    except ConfigError as error:
        yield Check(name="recipe", status="problem", detail=str(error), remedy="Mend the recipe.")


def _batches(recipe: "Recipe") -> Iterator[Check]:
    from fastrl.bench.plan import batches, count_rows

    started = int(os.environ.get("WORLD_SIZE", "1"))
    meant = getattr(recipe.task, "processes", None) or started
    yield Check(
        name="processes",
        status="ok" if meant == started else "note",
        detail=f"{started} here, the recipe is written for {meant}",
        remedy=""
        if meant == started
        else f"accelerate launch --num_processes {meant} -m fastrl.cli train ...",
    )
    yield _shared_prompts(recipe)
    shape, num_train = batches(recipe, meant), count_rows(recipe)["train"]
    yield Check(
        name="batch",
        status="ok",
        detail=f"{shape.rows_per_round} rollouts per generation = {shape.prompts} prompts x {shape.num_rollouts}",
    )
    rounds, left_over = divmod(num_train, shape.prompts)
    if not rounds:
        yield Check(
            name="prompts",
            status="problem",
            detail=f"{num_train} training prompts do not fill one generation of {shape.prompts}",
            remedy="Raise task.train_prompts, or lower per_device_train_batch_size or steps_per_generation.",
        )
        return
    yield Check(
        name="prompts",
        status="note" if left_over else "ok",
        detail=f"{num_train} training prompts, {shape.prompts} per generation, {rounds} generations per epoch",
        remedy=f"{left_over} prompts are left out of every epoch: choose a multiple of {shape.prompts}."
        if left_over
        else "",
    )


def _shared_prompts(recipe: "Recipe") -> Check:
    """Is a prompt computed once per group? Read from the model's configuration; nothing is loaded."""
    from transformers import AutoConfig

    from fastrl.bench.tasks import DataTask
    from fastrl.integrations.trl import SHARED_PREFILL_MODELS, SHARED_PREFIX_MODELS
    from fastrl.testbed import checkpoint_path

    name, task = "share_prompt", recipe.task
    if recipe.fastrl.share_prompt == "off":
        return Check(name=name, status="note", detail="off: prompts are computed once per rollout")
    model = task.model if isinstance(task, DataTask) else str(checkpoint_path(task.problems))
    try:
        kind = AutoConfig.from_pretrained(model, local_files_only=True).model_type
    except (OSError, ValueError):
        return Check(
            name=name, status="note", detail=f"{model} is not on this machine: it shows when training starts"
        )
    if recipe.trainer.get("use_vllm"):
        sampling = "left to vLLM's prefix cache"
    else:
        sampling = "once per group" if kind in SHARED_PREFILL_MODELS else "once per rollout"
    training = "once per micro-batch" if kind in SHARED_PREFIX_MODELS else "once per survivor"
    unknown = [what for what in (sampling, training) if what in ("once per rollout", "once per survivor")]
    why = f": models of the type {kind} were not compared with the ordinary path" if unknown else ""
    return Check(
        name=name,
        status="note" if unknown else "ok",
        detail=f"a prompt of {kind} is computed in generation {sampling}, in log-probs and update {training}{why}",
    )


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_flags() -> list[str]:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []
