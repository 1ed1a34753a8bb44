"""Time to stock GRPO's final held-out accuracy: FastRL against stock TRL with G = 8, 4 and 2, over seeds.

    python benchmarks/time_to_accuracy.py

Each cell (method, seed) is a JSON file under runs/bench/time_to_accuracy; a finished one is never run again,
so the benchmark can be stopped and started. Prints markdown, draws docs/img/time_to_accuracy.{svg,png}.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.cells import curve, run_cells, stock_with
from fastrl.bench.recipe import Recipe, read_recipe
from fastrl.bench.stats import NUM_LAST, Speedup, final_accuracy, paired_speedup, time_to_accuracy
from fastrl.bench.training import Method
from fastrl.report.console import RunProgress

Cells = dict[str, list[dict[str, Any]]]


def methods_of(recipe: Recipe) -> list[Method]:
    """Stock TRL with the recipe's own G first: the others are compared with it."""
    fast = Method(key="fastrl", label="FastRL", fastrl=recipe.fastrl)
    return [
        stock_with(recipe, int(recipe.trainer["num_generations"])),
        fast,
        *(stock_with(recipe, g) for g in (4, 2)),
    ]


def compare(
    cells: Cells, baseline: str, accuracy: str
) -> tuple[dict[str, list[float | None]], dict[str, Speedup]]:
    """Per method: seconds to the target of each seed, and the paired speed-up over the baseline."""
    targets = [final_accuracy(curve(cell, accuracy)) for cell in cells[baseline]]
    times = {
        key: [
            time_to_accuracy(curve(cell, accuracy), target) for cell, target in zip(row, targets, strict=True)
        ]
        for key, row in cells.items()
    }
    speedups = {
        key: paired_speedup(times[baseline], times[key], rng=np.random.default_rng(0)) for key in cells
    }
    return times, speedups


def markdown(methods: list[Method], cells: Cells, accuracy: str) -> str:
    baseline = methods[0].key
    times, speedups = compare(cells, baseline, accuracy)
    lines = [
        "| method | final accuracy (range) | s / step | s to target | speed-up [95 %] | never | equal steps "
        "| rollouts sampled / trained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        row = cells[method.key]
        final = [final_accuracy(curve(cell, accuracy)) for cell in row]
        reached = [second for second in times[method.key] if second is not None]
        speedup = speedups[method.key]
        train_s = np.array([cell["summary"]["train_s"] for cell in row])
        equal = np.exp(np.mean(np.log([c["summary"]["train_s"] for c in cells[baseline]] / train_s)))
        rollouts = {
            key: np.mean([cell["summary"]["rollouts"][key] for cell in row])
            for key in ("generated", "trained")
        }
        ratio = "-" if not speedup.num_pairs else f"{speedup.ratio:.2f}"
        if speedup.num_pairs > 1 and method.key != baseline:
            ratio += f" [{speedup.low:.2f}, {speedup.high:.2f}]"
        seconds = f"{np.median(reached):.1f}" if reached else "-"
        lines.append(
            f"| {method.label} | {np.mean(final):.1%} ({min(final):.1%} - {max(final):.1%}) "
            f"| {np.median([cell['summary']['step_s'] for cell in row]):.2f} "
            f"| {seconds} | {ratio} "
            f"| {speedup.num_never} of {len(row)} | {equal:.2f} "
            f"| {rollouts['generated']:,.0f} / {rollouts['trained']:,.0f} |"
        )
    num_seeds, num = len(cells[baseline]), cells[baseline][0]["evaluations"][0]["num"]
    lines += [
        "",
        f"Held-out {accuracy} accuracy on {num} problems, {num_seeds} seeds. Target, per seed: the mean of the last "
        f"{NUM_LAST} evaluations of {methods[0].label}. Speed-up: geometric mean over seeds of the paired ratio, "
        "with a bootstrap interval over seeds. Never: seeds left out of it because the target was not reached.",
    ]
    return "\n".join(lines)


def draw(methods: list[Method], cells: Cells, path: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    from fastrl.report.plots import STYLE, look, save

    times, speedups = compare(cells, methods[0].key, "greedy")
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.6, 3.8), layout="constrained", width_ratios=[1.6, 1]
        )
        for index, method in enumerate(methods):
            curves = [np.array(curve(cell)).T for cell in cells[method.key]]
            for seconds, accuracy in curves:
                left.plot(seconds, 100 * accuracy, color=look(index)["color"], linewidth=0.6, alpha=0.35)
            seconds, accuracy = np.mean(curves, axis=0)  # the same steps in every seed
            left.plot(seconds, 100 * accuracy, label=method.label, **look(index))
        left.set(
            title="Held-out accuracy, mean of seeds",
            xlabel="seconds of training",
            ylabel="accuracy, greedy (%)",
        )
        left.set_xlim(left=0)
        left.legend(loc="lower right")
        base = times[methods[0].key]
        for index, method in enumerate(methods[1:], start=1):
            ratios = [b / m for b, m in zip(base, times[method.key], strict=True) if b and m]
            right.plot(
                ratios,
                [index] * len(ratios),
                "o",
                markersize=5,
                alpha=0.45,
                color=look(index)["color"],
                mew=0,
            )
            s = speedups[method.key]
            if s.num_pairs > 1:
                right.plot([s.low, s.high], [index, index], color=look(index)["color"], linewidth=2)
            right.plot(
                [s.ratio], [index], "|", color=look(index)["color"], markersize=16, markeredgewidth=2.5
            )
        right.axvline(1, color="#999999", linewidth=1)
        right.set_yticks(range(1, len(methods)), [method.label for method in methods[1:]])
        right.set_ylim(len(methods) - 0.5, 0.5)
        right.set_xlim(left=0)
        right.grid(axis="y", visible=False)
        right.set(
            title=f"Against {methods[0].label}",
            xlabel="speed-up to its final accuracy\n(dots: seeds; bar: 95 % interval)",
        )
        return save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=Path("recipes/testbed/quickstart.yaml"))
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes of the recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/time_to_accuracy"))
    parser.add_argument("--figure", type=Path, default=Path("docs/img/time_to_accuracy"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    recipe = read_recipe(args.recipe, args.set)
    methods = methods_of(recipe)
    cells = run_cells(args.out, recipe, methods, num_seeds=args.seeds, progress=RunProgress)
    for accuracy in ("greedy", "sampled"):
        print(markdown(methods, cells, accuracy), end="\n\n")
    print("Figure:", ", ".join(str(file) for file in draw(methods, cells, args.figure)))


if __name__ == "__main__":
    main()
