"""Figures, drawn from the files of run folders. Matplotlib without a display; SVG and PNG."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles tell them apart in print.
COLOURS = ("#4D4D4D", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
LINES = ("--", "-", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("s", "o", "^", "D", "v", "P")
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "fastrl",
}


def draw_run(folder: str | Path) -> list[Path]:
    """Draw figure.svg and figure.png of a run folder: accuracy over time, G_t and used rollouts per step."""
    folder = Path(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    runs = [
        {
            **method,
            "metrics": read_rows(folder / method["folder"] / "metrics.jsonl"),
            "evaluations": read_rows(folder / method["folder"] / "evaluations.jsonl"),
        }
        for method in summary["methods"]
    ]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9.6, 4.4), layout="constrained")
        grid = figure.add_gridspec(2, 2, width_ratios=[1.25, 1])
        _accuracy(figure.add_subplot(grid[:, 0]), runs, summary)
        budget = figure.add_subplot(grid[0, 1])
        _steps(budget, runs, "fastrl/num_rollouts/mean")
        budget.set(title="Rollouts sampled per prompt, $G_t$", ylabel="rollouts per prompt")
        budget.tick_params(labelbottom=False)
        used = figure.add_subplot(grid[1, 1], sharex=budget)
        _steps(used, runs, "fastrl/trained/rows")
        used.set(title="Rollouts used for the update", xlabel="step", ylabel="rollouts per step")
        return save(figure, folder / "figure")


def _accuracy(axes: Axes, runs: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    for index, run in enumerate(runs):
        seconds = [row["train_s"] for row in run["evaluations"]]
        greedy = [100 * row["greedy"] for row in run["evaluations"]]
        axes.plot(
            seconds,
            greedy,
            label=run["label"],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            **look(index),
        )
    target = summary["target"]
    if target is not None:
        name = f"final accuracy of the baseline ({target:.1%})"
        axes.axhline(100 * target, color="#999999", linewidth=1, zorder=1, label=name)
        for index, run in enumerate(runs):
            if run["time_to_target_s"] is not None:
                axes.plot(
                    run["time_to_target_s"], 100 * target, marker="|", markersize=14, markeredgewidth=1.8,
                    color=look(index)["color"], linestyle="none",
                )  # fmt: skip
    ratios = [run["speedup_to_target"] for run in runs if run["speedup_to_target"] is not None]
    is_sooner = len(ratios) > 1 and ratios[-1] > 1
    title = f"The baseline's final accuracy, {ratios[-1]:.2f}x sooner" if is_sooner else "Accuracy"
    axes.set(title=title, xlabel="seconds of training", ylabel="held-out accuracy, greedy (%)")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def _steps(axes: Axes, runs: Sequence[Mapping[str, Any]], key: str) -> None:
    for index, run in enumerate(runs):
        rows = [row for row in run["metrics"] if key in row]
        axes.step(
            [row["step"] for row in rows], [row[key] for row in rows],
            where="mid", label=run["label"], zorder=10 - index, **look(index),
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def look(index: int) -> dict[str, Any]:
    """Colour and line of the n-th method, the same in every figure."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[index % len(LINES)],
        "linewidth": 1.8,
    }


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as .svg and .png next to each other and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(".svg"), path.with_suffix(".png")]
    figure.savefig(files[0], metadata={"Date": None})
    figure.savefig(files[1], dpi=160)
    plt.close(figure)
    return files


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file; none if the file is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
