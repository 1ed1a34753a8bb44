"""Every method on the same trainer, prompts, seeds and number of updates: accuracy, time, kept share, G_t.

    python benchmarks/methods.py headline          # stock TRL against the recommended settings, and what each part adds
    python benchmarks/methods.py grid              # weighting x tau
    python benchmarks/methods.py peers             # CPPO, PODS, GRESO, DAPO's dynamic sampling, 2-GRPO, ...
    python benchmarks/methods.py experimental      # logdet and leverage

Each cell (method, seed) is a JSON file under runs/bench/methods; a finished one is never run again, so that tables
share cells and a benchmark can be stopped and started. Prints markdown.

The quick methods of the headline train half as many updates again, so that a seed that falls a little short of stock
GRPO's final accuracy still shows when it gets there; all other columns are about as many updates as stock trains.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from time_to_accuracy import Cells, compare

from fastrl.bench.cells import curve, run_cells, stock_with
from fastrl.bench.recipe import Recipe, read_recipe
from fastrl.bench.stats import NUM_LAST, final_accuracy
from fastrl.bench.training import Method
from fastrl.report.console import RunProgress

RECIPES = Path("recipes/testbed")
PEERS = ("cppo", "pods", "greso", "dapo_dynamic", "advantage_only", "random", "two_grpo")
EXPERIMENTAL = ("logdet", "leverage")
LONGER = 1.5


def from_recipe(name: str, key: str | None = None, label: str | None = None, **fastrl: object) -> Method:
    """A method from its recipe: FastRL's settings and the trainer keys in which it differs from the quickstart."""
    base, recipe = read_recipe(RECIPES / "quickstart.yaml"), read_recipe(RECIPES / f"{name}.yaml")
    differing = {k: v for k, v in recipe.trainer.items() if base.trainer.get(k) != v}
    return Method(
        key=key or name,
        label=label or name,
        fastrl=dataclasses.replace(recipe.fastrl, **fastrl),  # type: ignore[arg-type]
        trainer=differing,
    )


def methods_of(table: str, recipe: Recipe) -> list[Method]:
    """The methods of a table; the first is what the others are compared with."""
    stock = stock_with(recipe, 8)
    if table == "headline":
        loose = from_recipe("unbiased", "unbiased-tau0.4", "unbiased + discovery, tau 0.4", tau=0.4)
        recommended = from_recipe("unbiased", "unbiased-tau0.1", "unbiased + discovery, tau 0.1")
        from_5 = from_recipe(
            "unbiased", "unbiased-from5", "unbiased + discovery from 5, tau 0.1", initial_rollouts=5
        )
        dealt = from_recipe("per_prompt", "per_prompt-none", "per_prompt, tau 0.1", refill="none")
        return [
            stock,
            *(longer(method, recipe) for method in (loose, recommended, from_5, dealt)),
            *(longer(stock_with(recipe, g), recipe) for g in (5, 4)),
            from_recipe("unbiased", "unbiased-fixed", "unbiased, G = 8, tau 0.1", budget="fixed"),
        ]
    if table == "grid":
        return [stock] + [
            from_recipe(
                "unbiased", f"w{weighting}-tau{tau}", f"weighting {weighting:g}, tau {tau:g}",
                weighting=weighting, tau=tau, budget="fixed",
            )
            for weighting in (0.0, 0.5, 1.0)
            for tau in (0.4, 0.8, 1.0)
        ]  # fmt: skip
    recommended = from_recipe("unbiased", "unbiased-tau0.1", "recommended (unbiased + discovery)")
    published = Method(key="published", label="published (mdap + ars)", fastrl=recipe.fastrl)
    names = EXPERIMENTAL if table == "experimental" else PEERS
    return [stock, longer(recommended, recipe), published, *(from_recipe(name) for name in names)]


def longer(method: Method, recipe: Recipe) -> Method:
    """The same method, trained for more updates."""
    epochs = recipe.trainer["num_train_epochs"] * LONGER
    return dataclasses.replace(method, trainer={**method.trainer, "num_train_epochs": epochs})


def markdown(methods: list[Method], cells: Cells, accuracy: str) -> str:
    """One row per method, with intervals over seeds."""
    baseline = methods[0].key
    _, speedups = compare(cells, baseline, accuracy)
    num_evaluations, num_steps = len(cells[baseline][0]["evaluations"]), len(cells[baseline][0]["steps"])
    base_s = np.array([equal_step_s(cell, num_evaluations) for cell in cells[baseline]])
    lines = [
        "| method | final accuracy (range) | s / step (processor) | speed-up [95 %] | never | equal steps | kept "
        "| G_t mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in methods:
        row = cells[method.key]
        final = [final_accuracy(curve(cell, accuracy)[:num_evaluations]) for cell in row]
        train_s = np.array([equal_step_s(cell, num_evaluations) for cell in row])
        cpu_s = [cell["summary"]["cpu_s"] / len(cell["steps"]) for cell in row]
        rollouts = [cell["summary"]["rollouts"] for cell in row]
        kept = np.mean([r["trained"] / r["generated"] for r in rollouts])
        per_prompt = np.mean([[step["num_rollouts"] for step in cell["steps"][:num_steps]] for cell in row])
        s = speedups[method.key]
        ratio = f"{s.ratio:.2f} [{s.low:.2f}, {s.high:.2f}]" if s.num_pairs > 1 else "-"
        lines.append(
            f"| {method.label} | {np.mean(final):.1%} ({min(final):.1%} - {max(final):.1%}) "
            f"| {np.median(train_s) / num_steps:.2f} ({np.median(cpu_s):.2f}) "
            f"| {'1' if method.key == baseline else ratio} | {s.num_never} of {len(row)} "
            f"| {np.exp(np.mean(np.log(base_s / train_s))):.2f} | {kept:.0%} | {per_prompt:.1f} |"
        )
    num = cells[baseline][0]["evaluations"][0]["num"]
    lines += [
        "",
        f"Held-out {accuracy} accuracy on {num} problems, {len(cells[baseline])} seeds. Speed-up: training seconds "
        f"until the final accuracy of {methods[0].label} (its last {NUM_LAST} evaluations, per seed), paired by seed, "
        "geometric mean and bootstrap interval over seeds; never: seeds that did not reach it, left out. Equal steps: "
        "seconds of the same number of updates. Processor: seconds of all threads, the steadier of the two on a busy "
        "machine.",
    ]
    return "\n".join(lines)


def equal_step_s(cell: dict[str, Any], num_evaluations: int) -> float:
    """Seconds of training until the evaluation that is the baseline's last one."""
    return float(cell["evaluations"][num_evaluations - 1]["train_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=["headline", "grid", "peers", "experimental"])
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes of the quickstart recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/methods"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    recipe = read_recipe(RECIPES / "quickstart.yaml", args.set)
    methods = methods_of(args.table, recipe)
    cells = run_cells(args.out, recipe, methods, num_seeds=args.seeds, progress=RunProgress)
    for accuracy in ("greedy", "sampled"):
        print(markdown(methods, cells, accuracy), end="\n\n")


if __name__ == "__main__":
    main()
