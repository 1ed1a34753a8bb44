"""What `fastrl diagnose` shows: tables, and a figure of similarities and pruners against true gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {
    "class": "same advantage",
    "class_distinct": "same advantage, different texts",
    "group_distinct": "same prompt, different texts",
}
MOST_BINS, FEWEST_POINTS = 8, 5


def diagnosis_table(result: Mapping[str, Any]) -> RenderableType:
    """Build the tables of a result of `diagnose`: what was looked at, similarities, pruners."""
    parts: list[RenderableType] = [describe_groups(result["groups"])]
    if result["similarities"]:
        parts += ["", _similarity_table(result)]
    if result["pruners"]:
        parts += ["", _pruner_table(result)]
    return Group(*parts)


def describe_groups(groups: Mapping[str, int]) -> str:
    """One line on which groups could be compared and which not."""
    text = f"{groups['num']} prompts: {groups['signal']} with signal"
    for name, what in (
        ("zero_variance", "of zero variance"),
        ("unscorable", "without any reward"),
        ("cancelled", "whose gradients cancel"),
    ):
        if groups[name]:
            text += f", {groups[name]} {what}"
    left_out = groups["num"] - groups["signal"]
    return text + (" (no gradient to compare: not in the figures below)" if left_out else "")


def _similarity_table(result: Mapping[str, Any]) -> Table:
    table = Table(
        title="Similarities against cosines of true gradients",
        title_justify="left",
        caption="± one standard error over prompts. |sim - cos| is a mean; the best constant has no other information.",
        caption_justify="left",
    )
    table.add_column("pairs")
    for name in ("number", "cosine", "Spearman", "Pearson", "|sim - cos|"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, label in KINDS.items():
        pairs = result["pairs"][kind]
        table.add_row(label, f"{pairs['num']:,}", _number(pairs["mean"]), "", "", "")
        for name, by_kind in result["similarities"].items():
            found = by_kind[kind]
            correlations = [_plus_minus(found[key], "value") for key in ("spearman", "pearson")]
            table.add_row(f"  {name}", "", "", *correlations, _number(found["eps"], "{:.3f}"))
        constant = _number(pairs["spread"], "{:.3f}")
        table.add_row("  the best constant", "", "", "", "", constant, end_section=True)
    return table


def _pruner_table(result: Mapping[str, Any]) -> Table:
    table = Table(
        title="Pruned gradients against full ones",
        title_justify="left",
        caption="± one standard error over prompts. Gain: cosine above that of as many random rollouts of the same "
        "group with the same total weight; random: their error. Error: |pruned - full| / |full| of the weighted sums; "
        "bias: the same of the mean over chance.",
        caption_justify="left",
    )
    table.add_column("pruner")
    for name in ("kept", "cosine", "gain", "error", "random", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in result["pruners"].items():
        table.add_row(
            name,
            _number(score["kept_frac"], "{:.0%}"),
            _plus_minus(score["cosine"]),
            _plus_minus(score["cosine_gain"], signed=True),
            _plus_minus(score["error"]),
            _number(score["random_error"]["mean"]),
            _number(score["bias"]),
        )
    return table


def _plus_minus(figure: Mapping[str, float | None], key: str = "mean", *, signed: bool = False) -> str:
    value, se = figure[key], figure["se"]
    if value is None:
        return "-"
    return (f"{value:+.2f}" if signed else f"{value:.2f}") + ("" if se is None else f" ± {se:.2f}")


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def draw_diagnosis(result: Mapping[str, Any], path: str | Path) -> list[Path]:
    """Draw the figure of a result of `diagnose` as .svg and .png and return their paths.

    Above: true cosine over similarity, a panel per similarity. Below: cosine and error per pruner.
    """
    from fastrl.report.plots import STYLE, plt, save

    similarities, pruners = result["similarities"], result["pruners"]
    rows = [height for height, has in ((3.4, similarities), (1.2 + 0.3 * len(pruners), pruners)) if has]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(9.6, max(2.4, sum(rows))), layout="constrained")
        parts = iter(np.atleast_1d(figure.subfigures(max(1, len(rows)), 1, height_ratios=rows or [1])))
        if similarities:
            part = next(parts)
            axes = np.atleast_1d(part.subplots(1, len(similarities), sharey=True))
            for axis, (name, by_kind) in zip(axes, similarities.items(), strict=True):
                _scatter(axis, name, by_kind["class"], by_kind["class_distinct"])
            axes[0].set_ylabel("cosine of true gradients")
            part.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
        if pruners:
            part = next(parts)
            left, right = part.subplots(1, 2, sharey=True)
            _bars(left, pruners, "cosine", "Cosine with the full gradient")
            _bars(right, pruners, "error", "Relative error of the gradient sum")
            left.set_yticks(range(len(pruners)), [_label(*item) for item in pruners.items()])
            left.invert_yaxis()
            left.set_xlim(right=1.02)
            part.legend(*left.get_legend_handles_labels(), loc="outside lower center", fontsize=9)
        return save(figure, Path(path))


def _scatter(axes: "Axes", name: str, pairs: Mapping[str, Any], distinct: Mapping[str, Any]) -> None:
    """Pairs of equal advantage; those of different texts in colour, with their mean cosine in bins and Spearman."""
    from matplotlib.ticker import MaxNLocator

    from fastrl.report.plots import COLOURS, look

    for found, colour, label in (
        (pairs, COLOURS[0], "same advantage"),
        (distinct, COLOURS[1], "same advantage, different texts"),
    ):
        points = np.array(found["points"]).reshape(-1, 2)
        axes.scatter(points[:, 0], points[:, 1], s=9, alpha=0.35, linewidths=0, color=colour, label=label)
    centre, mean, se = binned(np.array(distinct["points"]).reshape(-1, 2))
    style = {**look(2), "linestyle": "-"}
    axes.errorbar(
        centre,
        mean,
        yerr=se,
        marker="o",
        markersize=4,
        label="mean in a bin, ± one standard error",
        zorder=5,
        **style,
    )
    rank, num = distinct["spearman"]["value"], distinct["num"]
    about = "" if rank is None else f"\nSpearman {rank:.2f} ({num:,} pairs)"
    axes.set_title(name + about, fontsize=9.5)
    axes.set_xlabel("similarity")
    axes.xaxis.set_major_locator(MaxNLocator(4))


def binned(points_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean x, mean y and standard error of y in 2 to 8 bins of equally many points, at least 5 each.

    Empty where there are fewer than 10 points.
    """
    num_bins = min(MOST_BINS, len(points_N2) // FEWEST_POINTS)
    if num_bins < 2:
        return np.empty(0), np.empty(0), np.empty(0)
    bins = np.array_split(points_N2[np.argsort(points_N2[:, 0], kind="stable")], num_bins)
    x, y = (np.array([part[:, axis].mean() for part in bins]) for axis in (0, 1))
    return x, y, np.array([part[:, 1].std(ddof=1) / np.sqrt(len(part)) for part in bins])


def _bars(axes: "Axes", pruners: Mapping[str, Any], key: str, title: str) -> None:
    from fastrl.report.plots import COLOURS

    rows = np.arange(len(pruners))
    own, twin = (_means(pruners, prefix + key) for prefix in ("", "random_"))
    axes.barh(rows, own[0], height=0.6, color=COLOURS[1], alpha=0.8)
    axes.errorbar(own[0], rows, xerr=own[1], fmt="none", ecolor="black", elinewidth=1, capsize=2)
    axes.errorbar(
        twin[0],
        rows,
        xerr=twin[1],
        fmt="D",
        markersize=4.5,
        color=COLOURS[2],
        label="as many rollouts at random",
    )
    axes.set_title(title)
    axes.grid(False, axis="y")


def _means(pruners: Mapping[str, Any], key: str) -> np.ndarray:
    """(2, number of pruners): means and standard errors; no interval (0) with a single group."""
    rows = [[score[key]["mean"], score[key]["se"] or 0.0] for score in pruners.values()]
    return np.array(rows, dtype=np.float64).T


def _label(name: str, score: Mapping[str, Any]) -> str:
    return f"{name} ({_number(score['kept_frac'], '{:.0%}')})"
