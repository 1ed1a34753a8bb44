"""What `fastrl simulate` shows: two tables, and a figure of bias, error and G_t."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

_INCHES_PER_ROW = 0.3


def simulation_table(result: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a result of `bench.simulate`: gradients at a fixed policy, and runs."""
    return [_estimates(result), _dynamics(result)]


def _estimates(result: Mapping[str, Any]) -> Table:
    rates = result["success_rates"]
    table = Table(
        title=f"Pruned against full gradient at a fixed policy: {len(rates)} prompts, G = {result['num_rollouts']}, "
        f"{result['num_draws']} steps",
        caption=f"bias: with its {result['level']:.1%} interval; green where 0 is inside. step size, direction: of the "
        "mean gradient. error, cosine: of single steps. right : wrong: weight of right over wrong rollouts where "
        f"{rates[0]:.0%} and {rates[-1]:.0%} of the answers are right.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("kept", "bias", "step size", "direction", "error", "cosine", "right : wrong"):
        table.add_column(name, justify="right")
    for name, row in result["estimates"].items():
        colour = "green" if row["bias_low"] == 0 else "red"
        table.add_row(
            name,
            f"{row['kept_share']:.0%}",
            f"[{colour}]{row['bias']:.2f}[/]  {row['bias_low']:.2f} - {row['bias_high']:.2f}",
            f"{row['scale']:.2f}",
            f"{row['direction']:.3f}",
            f"{row['error']:.2f}",
            f"{row['cosine']:.2f}",
            f"{_ratio(row['push_P'][0])}  {_ratio(row['push_P'][-1])}",
        )
    return table


def _dynamics(result: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"Runs of {result['num_steps']} steps from the same policy",
        caption="G: rollouts per prompt in the first and the last step, of a policy that learns and of one that stands "
        "still. speed-up: predicted for these counts at the stage seconds of Geo3K. success: after equal steps at an "
        "equal learning rate, so a larger step size (above) learns faster for that reason alone.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for name in ("G, learning", "G, still", "kept, learning", "success", "sampled", "trained", "speed-up"):
        table.add_column(name, justify="right")
    for name, run in result["dynamics"].items():
        moving, still = run["moving"], run["still"]
        success = sum(moving["success_P"]) / len(moving["success_P"])
        table.add_row(
            name,
            _first_last(moving["num_rollouts"]),
            _first_last(still["num_rollouts"]),
            _first_last(moving["kept"]),
            f"{moving['success'][0]:.0%} -> {success:.1%}",
            f"{moving['sampled']:,}",
            f"{moving['trained']:,}",
            f"{moving['predicted_speedup']:.2f}x",
        )
    return table


def draw_simulation(result: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Draw <path>.svg and <path>.png: bias and error of each configuration, G_t of each budget."""
    import matplotlib.pyplot as plt

    from fastrl.report.plots import STYLE, save

    with plt.rc_context(STYLE):
        height = max(4.4, 1.4 + _INCHES_PER_ROW * len(result["estimates"]))
        figure = plt.figure(figsize=(11, height), layout="constrained")
        grid = figure.add_gridspec(2, 3, width_ratios=[1.1, 0.8, 1.3])
        bias = figure.add_subplot(grid[:, 0])
        _biases(bias, result)
        figure.legend(*bias.get_legend_handles_labels(), loc="outside lower left", ncols=2)
        error = figure.add_subplot(grid[:, 1], sharey=bias)
        _errors(error, result)
        moving = figure.add_subplot(grid[0, 2])
        _curves(moving, result, "moving", title="$G_t$ while the policy learns")
        figure.legend(*moving.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=8.5)
        still = figure.add_subplot(grid[1, 2], sharex=moving)
        _curves(still, result, "still", title="$G_t$ while the policy stands still")
        still.set(xlabel="step")
        return save(figure, Path(path))


def _biases(axes: Any, result: Mapping[str, Any]) -> None:
    axes.axvline(0, color="#4D4D4D", linewidth=1)
    for place, row in enumerate(result["estimates"].values()):
        axes.plot([row["bias_low"], row["bias_high"]], [place, place], color=_colour(row), linewidth=2.2)
        axes.plot(row["bias"], place, marker="o", color=_colour(row), markersize=6)
    for colour, meaning in (("#D55E00", "biased"), ("#0072B2", "no bias beyond noise")):
        axes.plot([], [], color=colour, marker="o", linewidth=2.2, label=meaning)
    axes.set_yticks(range(len(result["estimates"])), list(result["estimates"]))
    axes.set_ylim(len(result["estimates"]) - 0.4, -0.6)
    axes.set(title="Bias of the mean gradient", xlabel=f"difference / full, {result['level']:.1%} intervals")


def _errors(axes: Any, result: Mapping[str, Any]) -> None:
    for place, row in enumerate(result["estimates"].values()):
        axes.plot([0, row["error"]], [place, place], color=_colour(row), linewidth=1.2)
        axes.plot(row["error"], place, marker="s", color=_colour(row), markersize=5)
        axes.annotate(
            f"{row['kept_share']:.0%}", (row["error"], place), xytext=(7, 0), textcoords="offset points", va="center",
            fontsize=8.5, color="#4D4D4D",
        )  # fmt: skip
    axes.tick_params(labelleft=False)
    axes.margins(x=0.2)
    axes.set_xlim(left=0)
    axes.set(title="Error of one step, % kept", xlabel="RMS difference / RMS of full")


def _colour(row: Mapping[str, Any]) -> str:
    return "#0072B2" if row["bias_low"] == 0 else "#D55E00"


def _curves(axes: Any, result: Mapping[str, Any], kind: str, *, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    from fastrl.report.plots import look

    budgets = {name: config["budget"] for name, config in result["configs"].items()}
    fixed = [name for name, budget in budgets.items() if budget == "fixed"][-1:]  # one stands for all
    for index, name in enumerate([*fixed, *(n for n, budget in budgets.items() if budget != "fixed")]):
        counts = result["dynamics"][name][kind]["num_rollouts"]
        axes.step(
            range(1, len(counts) + 1), counts, where="mid", label=name, zorder=10 - index, **look(index)
        )
    axes.set(title=title, ylabel="rollouts per prompt")
    axes.set_ylim(0, 1.12 * result["num_rollouts"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _first_last(values: list[float]) -> str:
    return f"{values[0]:.3g} -> {values[-1]:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
