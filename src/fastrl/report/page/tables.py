"""Tables of a page as data: columns, rows of text, a note. Published figures stand in columns of their own.

A table: id, caption, columns ({name, published}), rows, note. Numbers behind the text are in the twin's `results`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastrl.report import published
from fastrl.report.page.read import dig, number

DASH = "-"


def table(
    name: str,
    caption: str,
    columns: Sequence[str | tuple[str, bool]],
    rows: Sequence[Sequence[str]],
    note: str = "",
) -> dict[str, Any]:
    """Build a table; a column given as (name, True) holds published figures, and goes if it has none."""
    named = [column if isinstance(column, tuple) else (column, False) for column in columns]
    held = [i for i, (_, theirs) in enumerate(named) if not theirs or any(row[i] != DASH for row in rows)]
    named, rows = [named[i] for i in held], [[row[i] for i in held] for row in rows]
    return {
        "id": name,
        "caption": caption,
        "columns": [{"name": column, "published": is_published} for column, is_published in named],
        "rows": [list(row) for row in rows],
        "note": note,
    }


def fastrl_key(run: Mapping[str, Any]) -> str | None:
    """The method that stands for FastRL: the key `fastrl`, else the first with settings of FastRL."""
    keys = [m["key"] for m in run["methods"] if m["fastrl"] is not None and m["key"] != run["baseline"]]
    return "fastrl" if "fastrl" in keys else next(iter(keys), None)


def losses_table(run: Mapping[str, Any]) -> dict[str, Any]:
    """Tables 1 and 2 of the paper: each loss without and with FastRL: accuracy, time, speed."""
    rows = []
    for loss in run["losses"]:
        for key, side in ((run["baseline"], "base"), (fastrl_key(run), "fastrl")):
            result = dig(run, "tables", loss, key or "")
            if result is None:
                continue
            pairs = {data: _pair(data, loss) for data in ("Geo3K, 7B", "GeoQA, 7B")}
            rows.append(
                [
                    f"{loss.upper()}: {label(run, key)}", final(result, "greedy"), final(result, "sampled"),
                    seconds(dig(result, "train_s", "mean")), speed(result, "equal_updates"),
                    speed(result, "to_final_greedy"),
                    *(cell for pair in pairs.values() for cell in _published_side(pair, side)),
                ]
            )  # fmt: skip
    theirs = [
        (f"{data}: {what}", True) for data in ("Geo3K", "GeoQA") for what in ("in-domain %", "hours", "speed")
    ]
    others = "; ".join(
        f"{pair.data} {pair.base[0]:.2f} % to {pair.fastrl[0]:.2f} %, {pair.speed:.2f}x"
        for pair in published.PAIRS[6:]
    )
    return table(
        "losses", "Each loss without and with FastRL (the layout of the paper's Tables 1 and 2)",
        ["loss and method", "accuracy, greedy", "accuracy, sampled", _time_name(run), "speed, equal updates",
         "speed, to the final accuracy", *theirs],
        rows, f"Also published, GRPO with Qwen3-VL-8B: {others}.",
    )  # fmt: skip


def _pair(data: str, loss: str) -> published.Pair | None:
    return next((pair for pair in published.PAIRS if pair.data == data and pair.loss == loss.lower()), None)


def _published_side(pair: published.Pair | None, side: str) -> list[str]:
    if pair is None:
        return [DASH] * 3
    in_domain, _, hours = pair.base if side == "base" else pair.fastrl
    return [f"{in_domain:.2f}", f"{hours:.2f}", "1.00x" if side == "base" else f"{pair.speed:.2f}x"]


def ablation_table(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Table 5 of the paper: ablations and peers; published rows that were not run here come last."""
    rows, met = [], set()
    for method in run["methods"]:
        result = dig(run, "tables", loss, method["key"])
        if result is None:
            continue
        name = published.ablation_name(method["fastrl"], method["trainer"]) if loss == "grpo" else None
        met.add(name)
        rows.append(
            [method["label"], final(result, "greedy"), final(result, "sampled"), speed(result, "equal_updates"),
             speed(result, "to_final_greedy"), *_published_ablation(name)]
        )  # fmt: skip
    missing = [name for name in published.ABLATION if name not in met] if rows and loss == "grpo" else []
    rows += [[f"{name} (not run here)", *[DASH] * 4, *_published_ablation(name)] for name in missing]
    return table(
        "ablation", f"Ablations and peers, {loss.upper()} (the layout of the paper's Table 5)",
        ["method", "accuracy, greedy", "accuracy, sampled", "speed, equal updates", "speed, to the final accuracy",
         ("Geo3K: row", True), ("Geo3K: mean of 4 benchmarks %", True), ("Geo3K: speed", True)],
        rows,
    )  # fmt: skip


def _published_ablation(name: str | None) -> list[str]:
    if name is None:
        return [DASH] * 3
    average, ratio = published.ABLATION[name]
    return [name, f"{average:.2f}", f"{ratio:.2f}x"]


def stage_table(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Table 7 of the paper: seconds per step by stage."""
    stages = ("total", "update", "old_ref", "generation")
    names = ("total", "update", "old + reference", "generation")
    rows = []
    for method in run["methods"]:
        result = dig(run, "tables", loss, method["key"])
        if result is None:
            continue
        ours = dict(dig(result, "stage_s") or {})
        known = [value for value in map(number, ours.values()) if value is not None]
        ours["total"] = sum(known) if known else dig(result, "step_s")
        side = {run["baseline"]: "base", fastrl_key(run): "fastrl"}.get(method["key"])
        theirs = [
            f"{published.STEP_S[data, side][stage]:.2f}" if side and loss == "grpo" else DASH
            for data in ("Geo3K", "GeoQA")
            for stage in stages
        ]
        rows.append([method["label"], *(_number(ours.get(stage), 3) for stage in stages), *theirs])
    columns = [(f"{data}: {name}, s", True) for data in ("Geo3K", "GeoQA") for name in names]
    return table(
        "stages", f"Seconds per step by stage, {loss.upper()} (the layout of the paper's Table 7)",
        ["method", *(f"{name}, s" for name in names), *columns], rows,
        "Total: the mean over steps, with rewards, selection and the rest.",
    )  # fmt: skip


def tau_points(run: Mapping[str, Any], loss: str) -> list[dict[str, Any]]:
    """Methods that differ in tau alone, by tau: of such sets that with most values of tau; [] if none has two."""
    families: dict[str, list[dict[str, Any]]] = {}
    for method in run["methods"]:
        settings = method["fastrl"]
        result = dig(run, "tables", loss, method["key"])
        if not isinstance(settings, Mapping) or result is None or number(settings.get("tau")) is None:
            continue
        rest = {key: value for key, value in settings.items() if key not in ("tau", "seed", "trace")}
        ratio = dig(result, "speed", "equal_updates") or {}
        families.setdefault(repr((sorted(rest.items(), key=str), method["trainer"])), []).append(
            {
                "tau": float(settings["tau"]), "method": method["key"],
                "accuracy": dig(result, "final", "greedy"), "speed": {**ratio, "mean": ratio.get("ratio")},
                "train_s": dig(result, "train_s", "mean"),
            }
        )  # fmt: skip
    largest = max(families.values(), key=_num_taus, default=[])
    return sorted(largest, key=lambda point: point["tau"]) if _num_taus(largest) > 1 else []


def _num_taus(points: Sequence[Mapping[str, Any]]) -> int:
    return len({point["tau"] for point in points})


def tau_table(run: Mapping[str, Any], loss: str, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Table 8 of the paper: accuracy, time and speed against tau."""
    known = published.TAU if loss == "grpo" and points else {}
    base = published.TAU[0.0]["hours"]
    ours: list[tuple[float, Mapping[str, Any] | None]] = [(point["tau"], point) for point in points]
    theirs_alone = [(tau, None) for tau in known if tau not in {point["tau"] for point in points}]
    rows = []
    for tau, point in sorted([*ours, *theirs_alone], key=lambda row: row[0]):
        theirs = known.get(tau)
        rows.append(
            [
                f"{tau:g}",
                centre(dig(point, "accuracy")),
                seconds(dig(point, "train_s")),
                ratio_text(dig(point, "speed")),
                *(
                    [DASH] * 4
                    if theirs is None
                    else [
                        f"{theirs['in_domain']:.2f}", f"{theirs['average']:.2f}", f"{theirs['hours']:.2f}",
                        f"{base / theirs['hours']:.2f}x",
                    ]
                ),
            ]
        )  # fmt: skip
    return table(
        "tau", f"The threshold tau, {loss.upper()} (the layout of the paper's Table 8)",
        ["tau", "accuracy, greedy", _time_name(run), "speed, equal updates", ("Geo3K: in-domain %", True),
         ("Geo3K: mean of 4 benchmarks %", True), ("Geo3K: hours", True), ("Geo3K: speed", True)],
        rows,
    )  # fmt: skip


def label(run: Mapping[str, Any], key: str | None) -> str:
    """What a method is called."""
    return next((method["label"] for method in run["methods"] if method["key"] == key), key or DASH)


def _time_name(run: Mapping[str, Any]) -> str:
    return "processor time" if run["clock"] == "processor" else "wall clock"


def percent(value: Any) -> str:
    """0.5 as 50.0 %."""
    known = number(value)
    return DASH if known is None else f"{100 * known:.1f} %"


def seconds(value: Any, digits: int = 1) -> str:
    """Seconds with so many decimals."""
    text = _number(value, digits)
    return text if text == DASH else f"{text} s"


def _number(value: Any, digits: int) -> str:
    known = number(value)
    return DASH if known is None else f"{known:,.{digits}f}"


def interval(estimate: Any, form: Callable[[Any], str]) -> str:
    """` [low - high]` of an estimate, or nothing where there is no interval."""
    low, high = dig(estimate, "low"), dig(estimate, "high")
    if number(low) is None or number(high) is None:
        return ""
    return f" [{form(low).removesuffix(' %')} - {form(high)}]"


def final(result: Any, kind: str) -> str:
    """Final accuracy over seeds with its interval."""
    return centre(dig(result, "final", kind))


def centre(estimate: Any) -> str:
    """The interquartile mean with its interval over seeds, or, where there is no interval, the mean."""
    bounds = interval(estimate, percent)
    iqm = dig(estimate, "iqm")
    return percent(iqm if bounds and iqm is not None else dig(estimate, "mean")) + bounds


def speed(result: Any, rule: str) -> str:
    """A speed-up with its interval, and the seeds that never got there."""
    return ratio_text(dig(result, "speed", rule))


def ratio_text(ratio: Any) -> str:
    """A speed-up as `speed` writes it."""
    value, never = number(dig(ratio, "ratio")), int(number(dig(ratio, "num_never")) or 0)
    text = DASH if value is None else f"{value:.2f}x{interval(ratio, lambda v: f'{v:.2f}')}"
    if not never:
        return text
    of = never + int(number(dig(ratio, "num_pairs")) or 0)
    return f"{text} ({never} of {of} never)"
