"""What a page says in words and plain tables: the setup, the headline, statistics, and what to distrust."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.report.estimates import points
from fastrl.report.page.read import dig, number
from fastrl.report.page.tables import (
    DASH,
    centre,
    fastrl_key,
    interval,
    label,
    percent,
    ratio_text,
    seconds,
    table,
)


def setup_table(run: Mapping[str, Any]) -> dict[str, Any]:
    """Where and with what a run was made."""
    settings, versions = run["settings"], run["versions"]
    task = settings.get("task") or {}
    machine = versions.get("machine") or {}
    packages = dig(versions, "packages") or {}
    model = task.get("model") or ("the tiny model of the testbed" if task.get("name") == "testbed" else None)
    prompts = [f"{task[key]:,} {name}" for key, name in _PROMPTS.items() if isinstance(task.get(key), int)]
    cpu = machine.get("cpu") and f"{machine['cpu']}, {machine.get('num_cpus') or '?'} logical CPUs"
    facts = {
        "recipe": run["recipe"],
        "model and task": _joined([model, task.get("name")]),
        "data": _joined([task.get("source"), *prompts]),
        "losses": ", ".join(loss.upper() for loss in run["losses"]),
        "methods": "; ".join(method["label"] for method in run["methods"]),
        "seeds": f"{len(run['seeds'])}: {', '.join(run['seeds'])}" if run["seeds"] else "",
        "hardware": _joined([cpu, machine.get("accelerator") or "no accelerator", machine.get("system")])
        if machine
        else "",
        "versions": _joined([f"Python {versions['python']}" if versions.get("python") else None,
                             *(f"{name} {version}" for name, version in packages.items())]),
        "environment": _joined([f"{key}={value}" for key, value in (versions.get("environment") or {}).items()
                                if value is not None]),
        "command": " ".join(map(str, versions.get("command") or [])),
        "started": versions.get("started") or "",
        "clock": "processor seconds of training, all threads" if run["clock"] == "processor"
        else "wall clock of training; evaluations are not counted",
    }  # fmt: skip
    rows = [[name, str(value) or "not recorded"] for name, value in facts.items()]
    return table("setup", "What was run, where and with what", ["", ""], rows)


_PROMPTS = {"train_prompts": "training prompts", "held_out_prompts": "held-out prompts"}


def _joined(parts: Sequence[Any]) -> str:
    return ", ".join(str(part) for part in parts if part)


def settings_rows(run: Mapping[str, Any]) -> list[list[str]]:
    """All settings, one a row, nested keys joined by a point."""

    def flat(content: Mapping[str, Any], prefix: str) -> list[list[str]]:
        rows = []
        for key, value in content.items():
            if isinstance(value, Mapping) and value:
                rows += flat(value, f"{prefix}{key}.")
            else:
                rows.append([f"{prefix}{key}", "null" if value is None else str(value)])
        return rows

    return flat(run["settings"], "")


def headline(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """The few figures that one would quote, with what must be quoted beside them.

    Returns:
        loss, sentence, cards [{name, value, detail}], and caveats.
    """
    key, base = fastrl_key(run), run["baseline"]
    ours, theirs = dig(run, "tables", loss, key or ""), dig(run, "tables", loss, base or "")
    cards, name = [], label(run, key)
    rules = (("to_final_greedy", "to the baseline's final accuracy"), ("equal_updates", "for equal updates"))
    for rule, what in rules:
        ratio = dig(ours, "speed", rule)
        if ratio is not None:
            value = number(dig(ratio, "ratio"))
            cards.append(
                {
                    "name": f"speed-up {what}",
                    "value": DASH if value is None else f"{value:.2f}x",
                    "detail": _ratio_detail(ratio),
                }
            )
    for kind in ("greedy", "sampled"):
        mine, other = dig(ours, "final", kind), dig(theirs, "final", kind)
        if mine is not None:
            beside = f"{label(run, base)}: {centre(other)}" if other else ""
            text, _, bounds = centre(mine).partition(" [")
            spread = f"95 % interval over seeds {bounds.strip(']')}" if bounds else ""
            detail = "; ".join(part for part in (spread, beside) if part)
            cards.append({"name": f"final accuracy, {kind}", "value": text, "detail": detail})
    share = number(dig(ours, "kept_share"))
    if share is not None:
        cards.append({"name": "rollouts trained on", "value": f"{share:.0%}", "detail": "of those generated"})
    return {"loss": loss, "method": name, "cards": cards, "caveats": _caveats(run, loss, key)}


def _ratio_detail(ratio: Mapping[str, Any]) -> str:
    pairs, never = (int(number(ratio.get(key)) or 0) for key in ("num_pairs", "num_never"))
    bounds = interval(ratio, lambda value: f"{value:.2f}").strip(" []")
    parts = [f"95 % interval over seeds {bounds}" if bounds else "no interval: too few seeds"]
    parts.append(f"{pairs} of {pairs + never} seeds" + (f", {never} never reached it" if never else ""))
    return "; ".join(parts)


def _caveats(run: Mapping[str, Any], loss: str, key: str | None) -> list[str]:
    found = []
    num = number(dig(run, "tables", loss, key or "", "num_seeds"))
    if num is not None and num < 3:
        who = "One seed is" if num < 2 else "Two seeds are"
        found.append(f"{who} an anecdote: differences between seeds are as large as many effects.")
    if not run["finished"]:
        found.append("The run is not finished: figures will change.")
    for check in run["equal_updates"]:
        if check.get("loss") == loss:
            found.append(_equal_updates_text(check))
    machine = dig(run, "versions", "machine")
    if machine and not machine.get("accelerator"):
        found.append("Ran on a CPU only.")
    return found


def _equal_updates_text(check: Mapping[str, Any]) -> str:
    what = (
        f"{_plain(check.get('num_updates'))} updates of {_plain(check.get('prompts_per_update'))} prompts at learning "
        f"rate {_plain(check.get('learning_rate'))}"
    )
    if check.get("ok") and check.get("num_updates") is None:
        return "Equal-update check: no cell is finished yet."
    if check.get("ok"):
        return f"Equal-update check passed: all methods took {what}."
    unequal = "; ".join(map(str, check.get("unequal") or [])) or "Compare with care"
    return f"Equal-update check FAILED: not all methods took {what}. {unequal}."


def _plain(value: Any) -> str:
    known = number(value)
    return DASH if known is None else f"{known:g}"


def statistics_table(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Mean, interquartile mean, intervals, paired differences and areas over seeds."""
    rows = []
    for method in run["methods"]:
        result = dig(run, "tables", loss, method["key"])
        for kind in ("greedy", "sampled", "pass_at_k"):
            estimate = dig(result, "final", kind)
            if estimate is None:
                continue
            difference, area = dig(result, "difference", kind), dig(result, "area", kind)
            rows.append(
                [
                    method["label"], kind.replace("pass_at_k", "pass@k"),
                    str(len(estimate.get("values") or []) or result.get("num_seeds") or DASH),
                    percent(estimate.get("mean")), percent(estimate.get("iqm")),
                    interval(estimate, percent).strip(" []") or DASH,
                    f"{percent(estimate.get('min'))} - {percent(estimate.get('max'))}",
                    _points(difference), percent(dig(area, "mean")) + interval(area, percent),
                ]
            )  # fmt: skip
    return table(
        "statistics", f"Final accuracy over seeds, {loss.upper()}",
        ["method", "accuracy", "seeds", "mean", "IQM", "its 95 % interval", "range", "paired difference, points",
         "area over the baseline's time"],
        rows,
        "IQM: the mean of the middle half. Difference: to the baseline, seed by seed. Area: mean accuracy over the "
        "seconds that the baseline trained.",
    )  # fmt: skip


def _points(difference: Any) -> str:
    return points({name: number(dig(difference, name)) for name in ("mean", "low", "high")})


def aggregate_table(run: Mapping[str, Any]) -> dict[str, Any]:
    """Over all losses: interquartile means with intervals stratified by loss, and the speed-up of all pairs."""
    rows = [
        [
            method["label"], *(centre(dig(run, "aggregate", method["key"], "final", kind))
                               for kind in ("greedy", "sampled")),
            ratio_text(dig(run, "aggregate", method["key"], "speed", "equal_updates")),
        ]
        for method in run["methods"]
        if method["key"] in run["aggregate"]
    ]  # fmt: skip
    columns = ["method", "accuracy, greedy", "accuracy, sampled", "speed, equal updates"]
    return table(
        "aggregate", "Over all losses", columns, rows, "IQM [95 % interval over seeds, stratified by loss]."
    )


def speed_table(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Speed-ups by every rule, with their intervals and the seeds that never got there."""
    results = run["tables"].get(loss, {})
    fixed = sorted(
        {target for result in results.values() for target in dig(result, "speed", "to_fixed") or {}}
    )
    rows = []
    for method in run["methods"]:
        result = results.get(method["key"])
        if result is None:
            continue
        times = dig(result, "train_s") or {}
        rows.append(
            [
                method["label"], f"{seconds(times.get('mean'))} ({seconds(times.get('min'))} - "
                f"{seconds(times.get('max'))})", seconds(dig(result, "step_s"), 2),
                *(ratio_text(dig(result, "speed", rule)) for rule in _RULES),
                *(ratio_text(dig(result, "speed", "to_fixed", target)) for target in fixed),
            ]
        )  # fmt: skip
    columns = [*_RULES.values(), *(f"to {percent(_float(target))}, greedy" for target in fixed)]
    return table(
        "speed", f"Time and speed-up, {loss.upper()}",
        ["method", "training, mean (range)", "a step, median", *columns], rows,
        "Speed-up: geometric mean over seeds of the baseline's time over the method's [95 % interval over seeds]; "
        "seeds in which one of them never reached the accuracy are left out of it and counted.",
    )  # fmt: skip


_RULES = {
    "equal_updates": "speed-up, equal updates",
    "to_final_greedy": "to the final accuracy, greedy",
    "to_final_sampled": "to the final accuracy, sampled",
}


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def spent_table(run: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """Rollouts and tokens generated and trained on."""
    rows = []
    for method in run["methods"]:
        result = dig(run, "tables", loss, method["key"])
        if result is None:
            continue
        counts = [
            _count(dig(result, what, side))
            for what in ("rollouts", "tokens")
            for side in ("generated", "trained")
        ]
        share, budget, entropy = (
            number(dig(result, key)) for key in ("kept_share", "num_rollouts", "entropy_final")
        )
        rows.append(
            [
                method["label"], *counts, DASH if share is None else f"{share:.0%}",
                DASH if budget is None else f"{budget:.2f}", DASH if entropy is None else f"{entropy:.3f}",
            ]
        )  # fmt: skip
    return table(
        "spent", f"Rollouts and tokens, {loss.upper()}",
        ["method", "rollouts generated", "rollouts trained on", "tokens generated", "tokens trained on", "share kept",
         "G_t, mean", "entropy at the end"],
        rows,
    )  # fmt: skip


def _count(value: Any) -> str:
    known = number(value)
    return DASH if known is None else f"{known:,.0f}"


def equal_updates_table(run: Mapping[str, Any]) -> dict[str, Any]:
    """Whether all methods of a loss took as many updates of as many prompts at the same learning rate."""
    rows = [
        [
            str(check.get("loss", DASH)).upper(), "passed" if check.get("ok") else "FAILED",
            *(_plain(check.get(key)) for key in ("num_updates", "prompts_per_update", "learning_rate")),
            "; ".join(label(run, key) for key in check.get("methods") or []),
        ]
        for check in run["equal_updates"]
    ]  # fmt: skip
    columns = ["loss", "check", "updates", "prompts per update", "learning rate", "methods"]
    return table("equal-updates", "Equal-update check", columns, rows)


def reliability_table(run: Mapping[str, Any]) -> dict[str, Any]:
    """Steps without anything to learn from, rollouts without a reward, figures that are not finite."""
    rows = []
    for loss in run["losses"]:
        for method in run["methods"]:
            seeds = dig(run, "steps", loss, method["key"]) or {}
            steps = [row for found in seeds.values() for row in found]
            if not steps:
                continue
            notes = dig(run, "notes", loss, method["key"]) or {}
            empty = notes.get("empty_steps", sum(row["trained_rows"] == 0 for row in steps))
            rows.append(
                [
                    f"{loss.upper()}: {method['label']}", str(len(seeds)), f"{len(steps):,}", f"{empty:,}",
                    *(percent(notes[key]) if number(notes.get(key)) is not None else "not recorded"
                      for key in ("unscorable", "zero_variance", "top_up")),
                    str(notes["non_finite"]) if "non_finite" in notes else "not recorded",
                ]
            )  # fmt: skip
    return table(
        "reliability", "What went wrong, or could not be used",
        ["loss and method", "seeds", "steps", "empty steps", "unscorable rollouts", "zero-variance groups",
         "rows added back (top-up)", "steps with a figure that is not finite"],
        rows,
    )  # fmt: skip


def failed_cells(run: Mapping[str, Any]) -> list[str]:
    """One line on the cells of a comparison, then one per cell that failed."""
    cells = run["cells"]
    if not cells:
        return []
    failed = cells.get("failed") or []
    planned, finished = (cells.get(key, "?") for key in ("planned", "finished"))
    lines = [f"{finished} of {planned} cells are finished, {len(failed)} failed."]
    if cells.get("not_run"):
        lines.append(f"{len(cells['not_run'])} cells wait for the method from which they take their G.")
    for cell in failed:
        where = f"{str(cell.get('loss', '?')).upper()}, {label(run, cell.get('method'))}, seed {cell.get('seed', '?')}"
        lines.append(f"Failed: {where}: {cell.get('error', 'no reason recorded')}")
    return lines
