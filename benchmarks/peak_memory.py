"""Peak memory of a run, as the operating system counts it: FastRL against stock TRL at the same G.

    python benchmarks/peak_memory.py

Every run is a process of its own, because a process never gives its peak back. Three models: the testbed's (1.4 M
parameters, images), a random Qwen2 of 51 M, and a random vision-language model of 45 M with 625 image tokens.
Writes runs/bench/peak_memory.json and prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.files import write_json
from fastrl.bench.run import versions
from fastrl.bench.settings import ALL_ROLLOUTS

SOME_KEPT = {"budget": "fixed", "pruner": "random", "keep_share": 0.4}
METHODS: dict[str, dict[str, Any] | None] = {
    "stock TRL": None,
    "FastRL, nothing pruned": {"budget": "fixed", "pruner": "none"},
    "FastRL, all rollouts, prompts shared": ALL_ROLLOUTS,
    "FastRL, tau 0.8, prompts shared": {"budget": "fixed"},
    "FastRL, 40% kept": SOME_KEPT,
    "FastRL, 40% kept, shrink": {**SOME_KEPT, "micro_batches": "shrink"},
}
MODELS = ("testbed", "51M", "45M, images")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(name: str, method: str, seed: int) -> None:
    """Train for some steps and print the peak, and what the process held when training began."""
    from fastrl import FastRLConfig

    settings = METHODS[method]
    config = None if settings is None else FastRLConfig(**settings)
    with tempfile.TemporaryDirectory() as folder:
        run = dict(zip(MODELS, (testbed, text, images), strict=True))[name]
        before, after = run(config, Path(folder), seed)
    print(json.dumps({"model": name, "method": method, "before_mb": before, "peak_mb": after}))


def testbed(config: Any, folder: Path, seed: int) -> tuple[float, float]:
    from fastrl.bench.recipe import read_recipe
    from fastrl.bench.training import Method, train_method

    recipe = read_recipe(Path("recipes/testbed/quickstart.yaml"), ["max_steps=4"])
    before = peak_mb()
    train_method(recipe, Method(key="m", label="m", fastrl=config), seed=seed, folder=folder, evaluate=False)
    return before, peak_mb()


def text(config: Any, folder: Path, seed: int) -> tuple[float, float]:
    from workload import ScriptedLengths, arguments, binary_reward, model, prompts, quiet, tokenizer

    from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer

    quiet()

    class Stock(ScriptedLengths, TimedGRPOTrainer):
        spread = 0.6

    class Fast(ScriptedLengths, FastGRPOTrainer):
        spread = 0.6

    settings = {"max_steps": 2, "num_generations": 8, "per_device_train_batch_size": 16, "seed": seed}
    trainer = (Stock if config is None else Fast)(
        model=model(512, 12), reward_funcs=binary_reward, processing_class=tokenizer(),
        args=arguments(folder, gradient_accumulation_steps=2, **settings), train_dataset=prompts(16),
        **({} if config is None else {"fastrl": config}),
    )  # fmt: skip
    return around_training(trainer)


def images(config: Any, folder: Path, seed: int) -> tuple[float, float]:
    from shared_prompt import large_trainer
    from transformers import set_seed

    set_seed(seed)
    return around_training(large_trainer(folder, config, max_steps=1))


def around_training(trainer: Any) -> tuple[float, float]:
    before = peak_mb()
    trainer.train()
    return before, peak_mb()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/peak_memory.json"))
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], args.worker[1], int(args.worker[2]))
        return
    # Freed memory goes back to the system at once: a peak is then what was in use, not what the allocator kept.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment.pop("MALLOC_MMAP_MAX_", None)
    found = []
    for seed in range(args.repeats):
        for name in args.models:
            for method in METHODS:
                command = [sys.executable, __file__, "--worker", name, method, str(seed)]
                done = subprocess.run(
                    command, check=True, env=environment, timeout=600, capture_output=True, text=True
                )
                found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, {"runs": found, "versions": versions()})
    print(
        "| model | method | peak, MB (range) | of stock | above the start, MB | of stock |\n|---|---|---|---|---|---|"
    )
    for name in args.models:
        base: tuple[float, float] | None = None
        for method in METHODS:
            runs = [run for run in found if run["model"] == name and run["method"] == method]
            peaks = [run["peak_mb"] for run in runs]
            peak = float(np.median(peaks))
            above = float(np.median([run["peak_mb"] - run["before_mb"] for run in runs]))
            base = base or (peak, above)
            print(
                f"| {name} | {method} | {peak:.0f} ({min(peaks):.0f} - {max(peaks):.0f}) | {peak / base[0]:.2f} | "
                f"{above:.0f} | {above / base[1]:.2f} |"
            )


if __name__ == "__main__":
    main()
