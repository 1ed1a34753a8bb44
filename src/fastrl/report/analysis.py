"""`fastrl analyze` on one screen, and as a figure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table


def analysis_table(result: Mapping[str, Any]) -> Table:
    """Build the table of `fastrl.bench.analyze.analyze`: a row per setting."""
    run, stages = result["run"], result["stages"]
    problems = "; ".join(f"{kind}: {count}" for kind, count in run["problems"].items() if count)
    budgets = "; ".join(
        f"{name} {values[0]:g} -> {values[-1]:.3g} (mean {sum(values) / len(values):.3g})"
        for name, values in result["budgets"].items()
        if values
    )
    seconds = ", ".join(f"{name} {value:g} s" for name, value in stages.items())
    lines = [
        f"G_t that budgets would ask for, seeing this run's rollouts: {budgets}.",
        f"Speed-up of a step at {seconds}: time proportional to rollouts, G unchanged. Measure your own stages "
        "(fastrl/time/*) and give them with --stages.",
    ]
    table = Table(
        title=f"{run['steps']:,} steps, {run['groups']:,} groups of mostly {run['rollouts_per_prompt']}, "
        f"{run['rollouts']:,} rollouts, {run['tokens']:,} tokens; {run['frac_zero_variance']:.0%} of the groups "
        f"without signal, {run['frac_unscorable']:.1%} of the rollouts unscorable",
        caption="\n".join([*lines, f"Met in the log: {problems}."] if problems else lines),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("setting", no_wrap=True)
    for name in ("trained on", "of the tokens", "speed-up", "hours saved of 24"):
        table.add_column(name, justify="right")
    for name, values in result["settings"].items():
        saved = 24 * (1 - 1 / values["speedup"])
        table.add_row(
            name,
            f"{values['kept_share']:.0%}",
            f"{values['tokens_share']:.0%}",
            f"{values['speedup']:.2f}x",
            f"{saved:.1f}",
        )
    return table


def draw_analysis(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw kept shares against tau, and G_t of budgets over steps; as .svg and .png."""
    import matplotlib.pyplot as plt

    from fastrl.report.plots import STYLE, look, save

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
        for index, kind in enumerate(("mdap", "unbiased")):
            points = [
                (float(name.rpartition(" ")[2]), values["kept_share"])
                for name, values in result["settings"].items()
                if name.startswith(f"{kind}, tau")
            ]
            if points:
                taus, shares = zip(*sorted(points), strict=True)
                left.plot(taus, [100 * share for share in shares], marker="o", label=kind, **look(index))
        left.set(title="Rollouts that are trained on", xlabel="tau", ylabel="share (%)", ylim=(0, 105))
        left.legend()
        for index, (name, values) in enumerate(result["budgets"].items()):
            right.plot(range(1, len(values) + 1), values, label=name, **look(index))
        right.set(title="G that a budget would ask for", xlabel="step of the log")
        right.set_ylim(bottom=0)
        right.legend(loc="lower left")
        return save(figure, path)
