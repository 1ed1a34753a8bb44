"""Figures of a page as data: what is on the axes, and the points. `draw` draws them; the JSON twin holds them.

A figure: id, title, x and y (names of the axes), kind (line, step, points, stack, interval), series, line (a horizontal
or vertical mark) and summary (what it shows, in words). A series: method, label, look (index of colour and line), x, y,
and `seeds`, the single runs whose mean it is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastrl.report.page.read import dig, number
from fastrl.report.page.rows import STAGES, mean

ACCURACY = {"greedy": "greedy", "sampled": "sampled at T = 1"}
STAGE_NAMES = {
    "generation": "generation",
    "rewards": "rewards",
    "old_ref": "old + reference log-probs",
    "select": "selection",
    "update": "update",
    "rest": "rest",
}
_MOST_WITH_SEEDS = 6
"""Methods in a figure up to which single seeds are drawn too: with more nothing could be told apart."""


def clock_of(run: Mapping[str, Any]) -> tuple[str, str]:
    """Column and name of the seconds that this run's tables count."""
    if run["clock"] == "processor":
        return "cpu_s", "processor seconds of training"
    return "train_s", "seconds of training"


def curves(run: Mapping[str, Any], loss: str, kind: str) -> list[dict[str, Any]]:
    """Held-out accuracy against steps, rollouts generated, tokens trained and seconds."""
    clock, seconds = clock_of(run)
    axes = {
        "step": "steps",
        "generated_rows": "rollouts generated",
        "trained_tokens": "tokens trained on",
        clock: seconds,
    }
    finals = dig(run, "tables", loss, run["baseline"] or "", "final", kind)
    target = number(dig(finals, "mean"))
    line = None if target is None else {"y": 100 * target, "label": "the baseline's final accuracy"}
    return [
        _figure(
            f"curve-{kind}-{column}", f"Accuracy, {ACCURACY[kind]}, against {name}", name,
            f"held-out accuracy, {kind} (%)", "line",
            _series(run, run["evaluations"].get(loss), column, lambda row: _percent(row[kind])), line=line,
        )
        for column, name in axes.items()
    ]  # fmt: skip


def steps(run: Mapping[str, Any], loss: str) -> list[dict[str, Any]]:
    """Figure 3 (a) and (b) of the paper: G_t, and the rollouts of an update, at each step."""
    rows = run["steps"].get(loss)
    return [
        _figure(
            "step-budget", "(a) Rollouts sampled per prompt, G_t", "step", "rollouts per prompt", "step",
            _series(run, rows, "step", lambda row: row["num_rollouts"]),
        ),
        _figure(
            "step-used", "(b) Rollouts used for the update", "step", "rollouts per step", "step",
            _series(run, rows, "step", lambda row: row["trained_rows"]),
        ),
    ]  # fmt: skip


def clocked(run: Mapping[str, Any], loss: str) -> list[dict[str, Any]]:
    """Figure 6 of the paper: tokens, entropy and accuracy against the clock."""
    clock, seconds = clock_of(run)
    rows = run["steps"].get(loss)
    return [
        _figure(
            "clock-tokens", "(a) Tokens trained on in a step", seconds, "tokens per step", "line",
            _series(run, rows, clock, lambda row: row["trained_tokens"]),
        ),
        _figure(
            "clock-entropy", "(b) Entropy of the policy", seconds, "nats per token", "line",
            _series(run, rows, clock, lambda row: row["entropy"]),
        ),
        _figure(
            "clock-accuracy", "(c) Accuracy, greedy", seconds, "held-out accuracy, greedy (%)", "line",
            _series(run, run["evaluations"].get(loss), clock, lambda row: _percent(row["greedy"])),
        ),
    ]  # fmt: skip


def tau_sweep(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figure 3 (c) of the paper: accuracy and speed against tau.

    Args:
        points: Rows of `tables.tau_points`: tau, accuracy and speed with their intervals.
    """
    drawn = []
    for place, (name, title, axis, scale) in enumerate(
        (
            ("accuracy", "(c) Final accuracy, greedy, against tau", "held-out accuracy, greedy (%)", 100),
            ("speed", "(c) Speed-up against tau", "speed-up at equal updates", 1),
        )
    ):
        known = [point for point in points if number(dig(point, name, "mean")) is not None]
        series = {
            "method": "tau", "label": title, "look": place + 1, "seeds": [],
            "x": [point["tau"] for point in known],
            "y": [scale * point[name]["mean"] for point in known],
            "low": [_scaled(point[name].get("low"), scale) for point in known],
            "high": [_scaled(point[name].get("high"), scale) for point in known],
        }  # fmt: skip
        drawn.append(_figure(f"tau-{name}", title, "tau", axis, "points", [series] if known else []))
    return drawn


def stages(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Seconds per step by stage, one bar per method."""
    results = run["tables"].get(loss, {})
    labels = {method["key"]: method["label"] for method in run["methods"]}
    timed = {key: dig(result, "stage_s") for key, result in results.items() if dig(result, "stage_s")}
    series = []
    for place, stage in enumerate(STAGES):
        values = [number(seconds.get(stage)) or 0.0 for seconds in timed.values()]
        if any(values):
            series.append(
                {
                    "method": stage, "label": STAGE_NAMES[stage], "look": place, "seeds": [],
                    "x": values, "y": [labels.get(key, key) for key in timed],
                }
            )  # fmt: skip
    return _figure("stages", "Seconds of a step by stage", "seconds per step", "", "stack", series)


def intervals(run: Mapping[str, Any], loss: str, rule: str, title: str) -> dict[str, Any]:
    """Speed-ups of all methods with their intervals over seeds, the baseline at 1.

    Args:
        rule: equal_updates, to_final_greedy or to_final_sampled.
    """
    series = []
    for place, method in enumerate(run["methods"]):
        speed = dig(run, "tables", loss, method["key"], "speed", rule)
        ratio = number(dig(speed, "ratio"))
        if ratio is not None and method["key"] != run["baseline"]:
            series.append(
                {
                    "method": method["key"], "label": method["label"], "look": place, "seeds": [],
                    "x": [ratio], "y": [method["label"]],
                    "low": [number(dig(speed, "low"))], "high": [number(dig(speed, "high"))],
                }
            )  # fmt: skip
    line = {"x": 1.0, "label": "the baseline"}
    return _figure(f"speed-{rule}", title, "speed-up (x)", "", "interval", series, line=line)


def _series(
    run: Mapping[str, Any],
    by_method: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]] | None,
    column: str,
    value: Callable[[Mapping[str, Any]], float | None],
) -> list[dict[str, Any]]:
    """One series per method: the mean over seeds of x and of y at each step, and the seeds themselves."""
    by_method = by_method or {}
    with_seeds = len(by_method) <= _MOST_WITH_SEEDS
    series = []
    for place, method in enumerate(run["methods"]):
        points = {
            seed: [(row["step"], row[column], y) for row in rows if (y := value(row)) is not None]
            for seed, rows in by_method.get(method["key"], {}).items()
        }
        points = {
            seed: [point for point in found if point[0] is not None and point[1] is not None]
            for seed, found in points.items()
        }
        means = _mean_curve([found for found in points.values() if found])
        if means:
            seeds = [
                {"seed": seed, "x": [p[1] for p in found], "y": [p[2] for p in found]}
                for seed, found in points.items()
                if found and with_seeds and len(points) > 1
            ]
            x, heights = [point[0] for point in means], [point[1] for point in means]
            series.append(
                {
                    "method": method["key"],
                    "label": method["label"],
                    "look": place,
                    "x": x,
                    "y": heights,
                    "seeds": seeds,
                }
            )
    return series


def _mean_curve(points: Sequence[Sequence[tuple[float, float, float]]]) -> list[tuple[float, float]]:
    """(mean x, mean y) at each step that every seed has."""
    if not points:
        return []
    by_step = [{step: (x, y) for step, x, y in found} for found in points]
    shared = [step for step in by_step[0] if all(step in found for found in by_step)]
    return [
        (
            mean([found[step][0] for found in by_step]) or 0.0,
            mean([found[step][1] for found in by_step]) or 0.0,
        )
        for step in shared
    ]


def _figure(
    name: str,
    title: str,
    x: str,
    y: str,
    kind: str,
    series: list[dict[str, Any]],
    line: dict[str, Any] | None = None,
) -> dict[str, Any]:
    figure = {"id": name, "title": title, "x": x, "y": y, "kind": kind, "series": series, "line": line}
    return {**figure, "summary": _summary(figure)}


def _summary(figure: Mapping[str, Any]) -> str:
    """What a figure shows, for those who do not see it."""
    if not figure["series"]:
        return f"{figure['title']}: nothing was recorded."
    if figure["kind"] == "stack":
        shown = [
            f"{label}: "
            + ", ".join(f"{series['label']} {series['x'][row]:.3g} s" for series in figure["series"])
            for row, label in enumerate(figure["series"][0]["y"])
        ]
    elif figure["kind"] == "interval":
        shown = [f"{series['label']} {series['x'][0]:.2f}x" for series in figure["series"]]
    else:
        shown = [
            f"{series['label']} from {series['y'][0]:.4g} at {series['x'][0]:.4g} to {series['y'][-1]:.4g} at "
            f"{series['x'][-1]:.4g}"
            for series in figure["series"]
        ]
    axes = f", {figure['y']} over {figure['x']}" if figure["y"] else f", {figure['x']}"
    return f"{figure['title']}{axes}. {'; '.join(shown)}."


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _scaled(value: Any, scale: float) -> float | None:
    known = number(value)
    return None if known is None else scale * known
