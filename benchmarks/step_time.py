"""Time of a training step: FastRL at tau 0.8 and a fixed G against stock TRL, both with G = 8.

    python benchmarks/step_time.py

Both train from the same checkpoint in one process, in ABBA order, so that a drift of the machine falls
on both alike. Writes runs/bench/step_time.json and prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fastrl import FastRLConfig
from fastrl.bench.files import write_json
from fastrl.bench.recipe import read_recipe
from fastrl.bench.run import versions
from fastrl.bench.training import STAGES, Method, MethodRun, train_method
from fastrl.report.console import STAGES as STAGE_NAMES

STOCK = Method(key="grpo", label="stock TRL GRPO")
FAST = Method(key="fastrl", label="FastRL, tau 0.8, fixed G", fastrl=FastRLConfig(budget="fixed"))


def block(run: MethodRun, num_warm_up: int) -> dict[str, Any]:
    """Seconds of the steps of one run, the first ones left out, in total and by stage."""
    rows = run.metrics[num_warm_up:]
    step_s = [row["step_s"] for row in rows]
    stage_s = {stage: float(np.mean([row[f"fastrl/time/{stage}_s"] for row in rows])) for stage in STAGES}
    stage_s["rest"] = float(np.mean(step_s)) - sum(stage_s.values())
    cpu_s = (rows[-1]["cpu_s"] - run.metrics[num_warm_up - 1]["cpu_s"]) / len(rows)
    kept = float(np.mean([row["fastrl/trained/rows"] / row["fastrl/rollouts"] for row in rows]))
    return {
        "method": run.method.key,
        "step_s": step_s,
        "cpu_s": cpu_s,
        "stage_s": stage_s,
        "trained_frac": kept,
    }


def median_step(blocks: list[dict[str, Any]], key: str) -> float:
    return float(np.median([second for b in blocks if b["method"] == key for second in b["step_s"]]))


def mean(blocks: list[dict[str, Any]], key: str, value: str, stage: str | None = None) -> float:
    values = [b[value] if stage is None else b[value][stage] for b in blocks if b["method"] == key]
    return float(np.mean(values))


def report(repeats: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of medians: over everything, and per ABBA repeat for the spread."""
    blocks = [b for repeat in repeats for b in repeat]
    ratios = [median_step(repeat, "grpo") / median_step(repeat, "fastrl") for repeat in repeats]
    return {
        "ratio": median_step(blocks, "grpo") / median_step(blocks, "fastrl"),
        "ratio_by_repeat": ratios,
        "cpu_ratio": mean(blocks, "grpo", "cpu_s") / mean(blocks, "fastrl", "cpu_s"),
        "median_step_s": {key: median_step(blocks, key) for key in ("grpo", "fastrl")},
        "cpu_s": {key: mean(blocks, key, "cpu_s") for key in ("grpo", "fastrl")},
        "trained_frac": {key: mean(blocks, key, "trained_frac") for key in ("grpo", "fastrl")},
        "stage_s": {
            key: {stage: mean(blocks, key, "stage_s", stage) for stage in (*STAGES, "rest")}
            for key in ("grpo", "fastrl")
        },
    }


def markdown(result: dict[str, Any]) -> str:
    lines = [f"| seconds per step | {STOCK.label} | {FAST.label} | ratio |", "|---|---|---|---|"]

    def row(name: str, pair: dict[str, float]) -> None:
        ratio = f"{pair['grpo'] / pair['fastrl']:.2f}" if min(pair.values()) >= 5e-4 else "-"
        lines.append(f"| {name} | {pair['grpo']:.3f} | {pair['fastrl']:.3f} | {ratio} |")

    row("total (median)", result["median_step_s"])
    row("processor time, all threads (mean)", result["cpu_s"])
    for stage, name in STAGE_NAMES.items():
        row(f"{name} (mean)", {key: seconds[stage] for key, seconds in result["stage_s"].items()})
    spread = result["ratio_by_repeat"]
    lines += [
        "",
        f"Ratio of medians {result['ratio']:.2f} ({min(spread):.2f} - {max(spread):.2f} over {len(spread)} ABBA "
        f"repeats); processor time {result['cpu_ratio']:.2f}; {result['trained_frac']['fastrl']:.0%} of the "
        "rollouts are trained on.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/testbed/quickstart.yaml"))
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes of the recipe")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of each run that are left out")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/step_time.json"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    recipe = read_recipe(args.recipe, [*args.set, f"max_steps={args.steps}"])
    repeats: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            runs = [
                train_method(
                    recipe, method, seed=recipe.seed, folder=Path(folder, f"{repeat}-{turn}"), evaluate=False
                )
                for turn, method in enumerate((STOCK, FAST, FAST, STOCK))
            ]
            repeats.append([block(run, args.warm_up) for run in runs])
            print(f"repeat {repeat + 1}/{args.repeats}: {report(repeats[-1:])['ratio']:.2f}", flush=True)
    result = {**report(repeats), "repeats": repeats, "recipe": recipe.to_dict(), "versions": versions()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, result)
    print(markdown(result))


if __name__ == "__main__":
    main()
