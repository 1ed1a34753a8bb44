"""Everything that a page shows, as one dictionary: the JSON twin. The page is rendered from it and from nothing else.

    {format, title, written, finished, every, published, parts: [{id, folder, title, kind, finished, looks, sections,
    results}]}

A section has an id, a title and blocks; a block is {kind: cards | figures | table | text | lines | settings | groups}
with its content. What was not recorded is a block of kind text that says so.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fastrl.report import published
from fastrl.report.page import figures, findings, tables
from fastrl.report.page.comparison import read_comparison
from fastrl.report.page.groups import sample_groups
from fastrl.report.page.read import kind_of, plain
from fastrl.report.page.run_folder import read_run

FORMAT = 1
Run = dict[str, Any]
Block = dict[str, Any]


def build_twin(
    folders: Sequence[Path],
    *,
    num_groups: int = 12,
    every: float | None = None,
    written: datetime | None = None,
) -> dict[str, Any]:
    """Read runs and build the twin: strict JSON, without NaN.

    Args:
        folders: Of fastrl train or fastrl compare, in the order of the page.
        num_groups: Groups to show of each.
        every: Seconds after which a page that is not finished loads itself again; None = never.
        written: When; None = now.

    Raises:
        ConfigError: no such folder, a folder of another kind, or a file that cannot be read.
    """
    parts = [_part(place, folder, num_groups) for place, folder in enumerate(folders, start=1)]
    finished = all(part["finished"] for part in parts)
    twin = {
        "format": FORMAT,
        "title": "FastRL report: " + ", ".join(_names(parts)),
        "written": (written or datetime.now(UTC)).isoformat(timespec="seconds"),
        "fastrl": _version(),
        "finished": finished,
        "every": None if finished else every,
        "published": {
            "source": published.SOURCE, "mark": published.MARK, "pairs": [vars(pair) for pair in published.PAIRS],
            "tau": published.TAU, "ablation": published.ABLATION,
            "step_s": {" ".join(key): value for key, value in published.STEP_S.items()},
        },
        "parts": parts,
    }  # fmt: skip
    return plain(twin)


def _names(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Titles of the parts; those that several bear come with their folders."""
    times = Counter(part["title"] for part in parts)
    return [
        part["title"] if times[part["title"]] == 1 else f"{part['title']} ({part['folder']})"
        for part in parts
    ]


def _version() -> str:
    try:
        return metadata.version("fastrl-grpo")
    except metadata.PackageNotFoundError:
        return "not installed"


def _part(place: int, folder: Path, num_groups: int) -> dict[str, Any]:
    run = read_comparison(folder) if kind_of(folder) == "compare" else read_run(folder)
    sections = [
        _section("headline", "Headline", _headline(run)),
        _section("setup", "Setup", _setup(run)),
        _section("curves", "Learning curves", _curves(run)),
        _section("budget", "Rollouts per step, and tau (the paper's Figure 3)", _budget(run)),
        _section("clock", "Tokens, entropy and accuracy over time (the paper's Figure 6)", _clock(run)),
        _section("losses", "Accuracy, time and speed", [_table(tables.losses_table(run), "No results yet.")]),
        _section("ablation", "Ablations and peers", _each(run, tables.ablation_table, "No results yet.")),
        _section("stages", "Where the time goes", _stages(run)),
        _section("statistics", "Statistics", _statistics(run)),
        _section("reliability", "Reliability", _reliability(run)),
        _section(
            "groups",
            "Groups: what pruning does",
            [{"kind": "groups", **sample_groups(folder, run, num_groups)}],
        ),
    ]
    return {
        "id": f"part-{place}",
        "folder": str(folder),
        "title": str(run["recipe"]),
        "kind": run["kind"],
        "finished": run["finished"],
        "looks": [{"label": method["label"], "look": look} for look, method in enumerate(run["methods"])],
        "sections": sections,
        "results": run["tables"],
    }


def _section(name: str, title: str, blocks: list[Block]) -> dict[str, Any]:
    return {"id": name, "title": title, "blocks": blocks or [_text("Nothing was written yet.")]}


def _table(content: dict[str, Any], missing: str) -> Block:
    """A table, or one line on why there is none."""
    if not content["rows"]:
        return _text(f"{content['caption']}: {missing}")
    return {"kind": "table", "table": content}


def _figures(drawn: list[dict[str, Any]], missing: str, *, legend: bool = True) -> list[Block]:
    """Figures side by side; of those without a point only their names."""
    full = [figure for figure in drawn if figure["series"]]
    blocks: list[Block] = [{"kind": "figures", "figures": full, "legend": legend}] if full else []
    empty = [figure["title"] for figure in drawn if not figure["series"]]
    return blocks + ([_text(f"{'; '.join(empty)}: {missing}")] if empty else [])


def _text(text: str) -> Block:
    return {"kind": "text", "text": text}


def _heading(run: Run, loss: str) -> list[Block]:
    return [{"kind": "heading", "text": loss.upper()}] if len(run["losses"]) > 1 else []


def _each(run: Run, make: Any, missing: str) -> list[Block]:
    return [_table(make(run, loss), missing) for loss in run["losses"]]


def _headline(run: Run) -> list[Block]:
    blocks: list[Block] = []
    for loss in run["losses"]:
        found = findings.headline(run, loss)
        blocks += _heading(run, loss)
        if found["cards"]:
            blocks.append({"kind": "cards", **found})
        else:
            blocks.append(_text("No headline: no method with FastRL has results yet."))
        if run["kind"] == "compare":
            titles = {
                "to_final_greedy": "Speed-up to the baseline's final accuracy, greedy",
                "equal_updates": "Speed-up for equal updates",
            }
            drawn = [figures.intervals(run, loss, rule, title) for rule, title in titles.items()]
            blocks += _figures(drawn, "no ratio yet.", legend=False)
        blocks.append({"kind": "lines", "lines": found["caveats"]})
    return blocks


def _setup(run: Run) -> list[Block]:
    return [
        {"kind": "table", "table": findings.setup_table(run)},
        {"kind": "settings", "rows": findings.settings_rows(run)},
    ]


def _curves(run: Run) -> list[Block]:
    blocks: list[Block] = []
    for loss in run["losses"]:
        blocks += _heading(run, loss)
        for kind in figures.ACCURACY:
            blocks += _figures(figures.curves(run, loss, kind), "no evaluation was recorded.")
    return blocks


def _budget(run: Run) -> list[Block]:
    blocks: list[Block] = []
    for loss in run["losses"]:
        blocks += _heading(run, loss) + _figures(figures.steps(run, loss), "no step was recorded.")
        points = tables.tau_points(run, loss)
        blocks += _figures(
            figures.tau_sweep(points), "no two methods of this run differ in tau alone.", legend=False
        )
        if points:
            blocks.append({"kind": "table", "table": tables.tau_table(run, loss, points)})
    return blocks


def _clock(run: Run) -> list[Block]:
    blocks: list[Block] = []
    for loss in run["losses"]:
        blocks += _heading(run, loss) + _figures(figures.clocked(run, loss), "not recorded.")
    return blocks


def _stages(run: Run) -> list[Block]:
    blocks: list[Block] = []
    for loss in run["losses"]:
        blocks += _heading(run, loss)
        blocks += _figures([figures.stages(run, loss)], "no stage was timed.", legend=False)
        blocks.append(_table(tables.stage_table(run, loss), "No results yet."))
    return blocks


def _statistics(run: Run) -> list[Block]:
    makers = (findings.speed_table, findings.statistics_table, findings.spent_table)
    blocks = [_table(make(run, loss), "No results yet.") for loss in run["losses"] for make in makers]
    if run["aggregate"]:
        blocks.insert(0, _table(findings.aggregate_table(run), "No results yet."))
    return blocks


def _reliability(run: Run) -> list[Block]:
    return [
        _table(findings.equal_updates_table(run), "It needs two finished methods, and there are none yet."),
        _table(findings.reliability_table(run), "No step was recorded."),
        {"kind": "lines", "lines": [*findings.failed_cells(run), *run["problems"]]},
    ]
