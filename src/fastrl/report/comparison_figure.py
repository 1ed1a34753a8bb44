"""The figure of a comparison: accuracy over time, and what each method gains over the baseline."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes

from fastrl.report.plots import STYLE, look, save

NUM_NAMED = 4
"""Methods whose curves have a colour: the baseline and the next ones. The others are grey."""
Curves = dict[str, list[np.ndarray]]


def draw_comparison(folder: Path, result: Mapping[str, Any], loss: str) -> list[Path]:
    """Draw figure-<loss>.svg and .png of a folder of `fastrl compare`.

    Args:
        folder: Holds evaluations.parquet.
        result: The content of its compare.json.
        loss: Which of its losses.
    """
    curves = _curves(folder / "evaluations.parquet", loss, result["clock"])
    methods = [method for method in result["methods"] if method["key"] in curves]
    with plt.rc_context(STYLE):
        height = max(3.8, 1.2 + 0.26 * len(methods))
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.6, height), layout="constrained", width_ratios=[1.5, 1]
        )
        _accuracy(left, methods, curves, result["clock"])
        _speed(right, methods, result["tables"][loss])
        return save(figure, folder / f"figure-{loss}")


def _curves(path: Path, loss: str, clock: str) -> Curves:
    """(2, evaluations) seconds and sampled accuracy of each seed, by method."""
    column = {"wall": "train_s", "processor": "cpu_s"}[clock]
    rows = pq.read_table(path, columns=["loss", "method", "seed", "step", column, "sampled"]).to_pylist()
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["loss"] == loss:
            of_method = found.setdefault(row["method"], {})
            of_method.setdefault(row["seed"], []).append((row[column], row["sampled"]))
    return {key: [np.array(points).T for points in seeds.values()] for key, seeds in found.items()}


def _accuracy(axes: Axes, methods: Sequence[Mapping[str, Any]], curves: Curves, clock: str) -> None:
    for place, method in reversed(list(enumerate(methods))):
        seeds = curves[method["key"]]
        seconds, accuracy = np.mean(seeds, axis=0)  # the same steps in every seed
        if place >= NUM_NAMED:
            axes.plot(seconds, 100 * accuracy, color="#C0C0C0", linewidth=1, zorder=1)
            continue
        for points in seeds:
            axes.plot(points[0], 100 * points[1], color=look(place)["color"], linewidth=0.6, alpha=0.35)
        axes.plot(seconds, 100 * accuracy, label=method["label"], zorder=10 - place, **look(place))
    unit = {"wall": "seconds of training", "processor": "processor seconds of training"}[clock]
    axes.set(title="Held-out accuracy, mean of seeds", xlabel=unit, ylabel="accuracy, sampled at T = 1 (%)")
    axes.set_xlim(left=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="lower right")


def _speed(axes: Axes, methods: Sequence[Mapping[str, Any]], table: Mapping[str, Any]) -> None:
    """For each method but the baseline: speed-up for equal updates (dot), and to the final accuracy (ring)."""
    for rule, offset in (("equal_updates", -0.16), ("to_final_sampled", 0.16)):
        for place, method in enumerate(methods[1:]):
            speed = table[method["key"]]["speed"][rule]
            if speed["ratio"] is None:
                continue
            color = look(place + 1)["color"] if place + 1 < NUM_NAMED else "#777777"
            if speed["low"] is not None:
                axes.plot([speed["low"], speed["high"]], [place + offset] * 2, color=color, linewidth=1.4)
            face = color if rule == "equal_updates" else "white"
            axes.plot(speed["ratio"], place + offset, "o", color=color, markersize=5, markerfacecolor=face)
    axes.axvline(1, color="#999999", linewidth=1)
    axes.set_yticks(range(len(methods) - 1), [method["label"] for method in methods[1:]])
    axes.set_ylim(len(methods) - 1.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    axes.set(
        title=f"Speed-up over {methods[0]['label']}",
        xlabel="ratio of times, 95 % over seeds\n(dot: equal updates;\nring: to its final accuracy)",
    )
