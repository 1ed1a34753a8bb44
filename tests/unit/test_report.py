"""`fastrl report`: what the twin holds, that hostile text stays text, and files that are not whole."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report_folders import TAUS, accuracy, compare_folder, train_folder, write_trace

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from fastrl import FastRLConfig, cli
from fastrl.report import published
from fastrl.report.page.comparison import read_comparison
from fastrl.report.page.draw import draw, look
from fastrl.report.page.groups import MOST_CHARACTERS, Place, choose, index, shown_text
from fastrl.report.page.live import Report, follow
from fastrl.report.page.read import cells_are_done, read_lines
from fastrl.report.page.tables import tau_points, tau_table
from fastrl.report.page.twin import build_twin
from fastrl.similarity import jaccard_distances
from fastrl.types import ConfigError

HOSTILE = [
    "<script>window.hacked = 1</script>",
    '"><img src=x onerror="window.hacked = 1">',
    "</pre></bdi></script><svg onload='window.hacked = 1'>",
    "a\u202eb\u0007c {{ 7 * 7 }}",
    "<style>*{display:none}</style>",
    "</title><meta http-equiv=refresh content=0>",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_folder(tmp_path_factory.mktemp("train") / "run", texts=HOSTILE)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_folder(tmp_path_factory.mktemp("compare") / "out")


@pytest.fixture(scope="module")
def compared(comparison: Path) -> dict[str, Any]:
    return build_twin([comparison])["parts"][0]


@pytest.fixture(scope="module")
def page(run: Path, comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    report = Report(runs=[run, comparison], out=tmp_path_factory.mktemp("page") / "both.html")
    report.write()
    return report.out.read_text(encoding="utf-8")


def blocks(part: dict[str, Any], section: str, kind: str) -> list[dict[str, Any]]:
    (found,) = [s for s in part["sections"] if s["id"] == section]
    return [block for block in found["blocks"] if block["kind"] == kind]


def tables(part: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {block["table"]["caption"]: block["table"] for block in blocks(part, section, "table")}


def figures(part: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [figure for block in blocks(part, section, "figures") for figure in block["figures"]]


# --- the twin -----------------------------------------------------------------------------------


def test_a_comparison_is_told_with_its_intervals_and_its_seeds(compared: dict[str, Any]):
    cards = blocks(compared, "headline", "cards")[0]
    speed = next(card for card in cards["cards"] if "final accuracy" in card["name"])
    assert cards["method"] == "FastRL, fastrl"
    assert speed["value"] == "2.20x"
    assert "95 % interval over seeds 1.90 - 2.80" in speed["detail"]
    assert "1 never reached it" in speed["detail"]
    caveats = [line for block in blocks(compared, "headline", "lines") for line in block["lines"]]
    assert any("check passed: all methods took 8 updates of 2 prompts" in line for line in caveats)
    assert any("check FAILED" in line and "cppo, seed 1: 7 updates" in line for line in caveats)
    assert "Ran on a CPU only." in caveats


def test_curves_are_means_over_seeds_beside_the_seeds(compared: dict[str, Any]):
    curves = {figure["id"]: figure for figure in figures(compared, "curves")[:8]}
    seconds = curves["curve-sampled-cpu_s"]
    assert seconds["x"] == "processor seconds of training", "the clock of the tables"
    stock = seconds["series"][0]
    assert [seed["seed"] for seed in stock["seeds"]] == ["0", "1", "2"]
    assert stock["y"] == pytest.approx([100 * (accuracy(step, 8) - 0.06) for step in (2, 4, 6, 8)])
    assert stock["x"] == pytest.approx([step * 1.1 for step in (2, 4, 6, 8)])
    assert {"curve-greedy-step", "curve-greedy-generated_rows", "curve-greedy-trained_tokens"} < set(curves)


def test_the_tau_sweep_takes_methods_that_differ_in_tau_alone(compared: dict[str, Any]):
    drawn = {figure["id"]: figure for figure in figures(compared, "budget")[:4]}
    assert drawn["tau-accuracy"]["series"][0]["x"] == list(TAUS), "CPPO has a tau too, but differs in more"
    assert drawn["tau-speed"]["series"][0]["low"] == pytest.approx([1.3, 1.6, 1.9])
    (sweep,) = [table for name, table in tables(compared, "budget").items() if "GRPO" in name]
    assert [row[0] for row in sweep["rows"]] == ["0", "0.2", "0.4", "0.5", "0.6", "0.8", "1"]


def test_equal_taus_are_no_sweep_and_none_of_them_is_lost(comparison: Path):
    run = read_comparison(comparison)
    with_two = [method for method in run["methods"] if method["key"] in ("tau0.2", "tau0.5")]
    for method in with_two:
        method["fastrl"]["tau"] = 0.0
    points = tau_points(run, "grpo")
    assert [point["tau"] for point in points] == [0.0, 0.0, 0.8]
    taus = [row[0] for row in tau_table(run, "grpo", points)["rows"]]
    assert taus == ["0", "0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert tau_points({**run, "methods": with_two}, "grpo") == [], "one tau of two methods is no sweep"


def test_runs_of_one_recipe_are_told_apart_by_their_folders(run: Path, comparison: Path):
    assert build_twin([run, comparison])["title"] == "FastRL report: made-up, made-up matrix"
    twice = build_twin([comparison, run, comparison])["title"]
    assert twice == f"FastRL report: made-up matrix ({comparison}), made-up, made-up matrix ({comparison})"


def test_figure_3_and_6_and_the_stages_are_there(compared: dict[str, Any]):
    assert [f["id"] for f in figures(compared, "budget")[:2]] == ["step-budget", "step-used"]
    assert [f["id"] for f in figures(compared, "clock")[:3]] == [
        "clock-tokens",
        "clock-entropy",
        "clock-accuracy",
    ]
    bars = figures(compared, "stages")[0]
    assert [series["label"] for series in bars["series"]][-1] == "rest"
    assert len(bars["series"][0]["y"]) == 5
    assert "old + reference log-probs 0.5 s" in bars["summary"]


def test_published_figures_have_columns_of_their_own(compared: dict[str, Any], page: str):
    losses = tables(compared, "losses").popitem()[1]
    theirs = [column["published"] for column in losses["columns"]]
    assert theirs == sorted(theirs), "ours first, theirs beside them"
    row = losses["rows"][1]
    assert row[0] == "GRPO: FastRL, fastrl"
    assert [cell for cell, is_theirs in zip(row, theirs, strict=True) if is_theirs][:3] == [
        "55.90",
        "13.87",
        "2.14x",
    ]
    assert published.MARK in page
    head = next(line for line in page.splitlines() if 'scope="colgroup" class="published"' in line)
    assert published.MARK in head


def test_a_loss_without_published_figures_has_no_column_for_them(compared: dict[str, Any]):
    by_name = tables(compared, "ablation")
    (grpo,) = [table for name, table in by_name.items() if "GRPO" in name]
    (dapo,) = [table for name, table in by_name.items() if "DAPO" in name]
    assert any(column["published"] for column in grpo["columns"])
    assert not any(column["published"] for column in dapo["columns"])
    assert next(row for row in grpo["rows"] if row[0] == "CPPO")[-3:] == ["CPPO", "51.68", "1.60x"]
    assert any(row[0] == "GRESO (not run here)" for row in grpo["rows"])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "FastRL"),
        ({"budget": "fixed"}, "FastRL without ARS"),
        ({"pruner": "none"}, "FastRL without MDAP"),
        ({"pruner": "random", "keep_share": 0.25, "budget": "fixed"}, "random pruning, 75 %"),
        ({"pruner": "top_advantage", "refill": "kept", "budget": "fixed"}, "CPPO"),
        ({"pruner": "none", "budget": "greso", "refill": "signal"}, "GRESO"),
        ({"trace": True, "seed": 3}, "FastRL"),
        ({"tau": 0.5}, None),
        ({"weighting": 1.0, "representative": "random", "align": "dummy"}, None),
    ],
)
def test_a_row_of_the_published_ablation_is_known_by_its_settings(settings: dict[str, Any], name: str | None):
    assert published.ablation_name(FastRLConfig(**settings).to_dict()) == name
    assert published.ablation_name(None) == "GRPO"
    assert published.ablation_name(None, {"num_generations": 4}) is None


def test_published_figures_agree_with_each_other():
    for pair in published.PAIRS:
        assert pair.base[2] / pair.fastrl[2] == pytest.approx(pair.speed, abs=0.03), pair
    assert np.mean([pair.speed for pair in published.PAIRS]) == pytest.approx(2.07, abs=0.01)
    for step in published.STEP_S.values():
        assert step["update"] + step["old_ref"] + step["generation"] < step["total"]


def test_statistics_and_failures_are_told(compared: dict[str, Any]):
    statistics = tables(compared, "statistics")
    assert statistics["Over all losses"]["rows"][0][:2] == ["stock TRL", "90.0 % [85.0 - 95.0 %]"]
    accuracies = statistics["Final accuracy over seeds, GRPO"]["rows"]
    assert accuracies[3][:5] == ["FastRL, tau0.2", "greedy", "3", "90.0 %", "90.0 %"]
    assert accuracies[3][-2] == "-1.0 [-2.0, +1.0]"
    lines = blocks(compared, "reliability", "lines")[0]["lines"]
    assert lines[0] == "29 of 30 cells are finished, 1 failed."
    assert lines[1] == "Failed: GRPO, CPPO, seed 1: out of <memory>"
    assert compared["finished"]


def test_a_run_is_told_like_a_comparison_of_one_seed(run: Path):
    part = build_twin([run])["parts"][0]
    cards = blocks(part, "headline", "cards")[0]
    assert {card["name"]: card["value"] for card in cards["cards"]}["speed-up for equal updates"] == "2.00x"
    assert any("anecdote" in line for line in blocks(part, "headline", "lines")[0]["lines"])
    setup = dict(row for row in tables(part, "setup").popitem()[1]["rows"])
    assert setup["hardware"] == "A <CPU> & more, 2 logical CPUs, no accelerator, Linux x86_64"
    assert setup["command"] == "fastrl train recipe.yaml"
    rows = tables(part, "reliability")["What went wrong, or could not be used"]["rows"]
    assert rows[1][:6] == ["GRPO: GRPO + FastRL", "1", "8", "1", "12.5 %", "50.0 %"]
    results = part["results"]["grpo"]["fastrl"]
    assert results["stage_s"]["rest"] == pytest.approx(1 - 5 / 8)
    assert results["tokens"] == {"generated": 8 * 160, "trained": 8 * 40}
    assert results["final"]["greedy"]["mean"] == pytest.approx(np.mean([accuracy(s, 8) for s in (4, 6, 8)]))


# --- groups -------------------------------------------------------------------------------------


def test_a_group_shows_what_pruning_did(run: Path):
    (group,) = blocks(build_twin([run])["parts"][0], "groups", "groups")[0]["groups"]
    assert (group["step"], group["num_kept"], group["num_rollouts"]) == (1, 3, 6)
    assert [rollout["keep"] for rollout in group["rollouts"]] == [True, False, True, False, True, False]
    assert [found["members"] for found in group["classes"]] == [[0, 1, 2], [4, 5], [3]]
    expected = jaccard_distances([[ord(c) for c in text] for text in HOSTILE[:3]])
    assert np.array(group["classes"][0]["distances"]) == pytest.approx(expected, abs=1e-4)
    assert group["rollouts"][1]["fate"] == f"rollout 0 stands for it, at distance {expected[1, 0]:.2f}"
    assert group["rollouts"][0]["fate"] == "stands for itself and 1 more"
    assert group["rollouts"][3]["fate"] == "has no reward"
    assert group["rollouts"][0]["text"] == HOSTILE[0]


def test_groups_come_evenly_from_all_steps_and_those_with_a_choice_first(tmp_path: Path):
    write_trace(tmp_path, ["ab", "ac", "b", "c"], num_groups=9)
    places = index(tmp_path / "trainer" / "fastrl" / "rollouts.jsonl")
    assert [place.step for place in choose(places, 3)] == [0, 4, 8]
    dull = {"start": 0, "end": 1, "num_different": 1, "has_signal": True}
    many = [Place(step=0, group=group, num_dropped=int(group == 5), **dull) for group in range(8)]
    assert [place.group for place in choose(many, 1)] == [5]
    assert len(choose(many, 8)) == 8
    assert choose([], 3) == []


def test_half_a_record_at_the_end_is_left_out(tmp_path: Path):
    write_trace(tmp_path, ["ab", "ac", "b", "c"], num_groups=3)
    file = tmp_path / "trainer" / "fastrl" / "rollouts.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    assert [place.step for place in index(file)] == [0, 1]


def test_a_long_text_is_cut_and_its_length_is_named(tmp_path: Path):
    long = "x" * 1_000_000
    folder = train_folder(tmp_path / "run", texts=[long, "b", "c", "d"])
    report = Report(runs=[folder], out=tmp_path / "page.html")
    report.write()
    page = report.out.read_text(encoding="utf-8")
    assert "the first 8,000 of 1,000,000 characters" in page
    assert "x" * (MOST_CHARACTERS + 1) not in page
    assert shown_text("short") == {
        "text": "short", "num_characters": 5, "is_cut": False, "num_direction_marks": 0,
    }  # fmt: skip


def test_control_characters_become_pictures_and_marks_of_direction_are_counted():
    found = shown_text("a\x00b\x1b[31m\u202ec\ud800\n\t")
    assert found["text"] == "a\u2400b\u241b[31m\u202ec?\n\t"
    assert found["num_direction_marks"] == 1


# --- the page -----------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Collects tags, attributes and ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_nothing_hostile_becomes_a_tag_or_a_handler(read: Reader, page: str):
    assert read.tags.count("script") == 1
    assert read.tags.count("style") == 1
    assert read.tags.count("title") == 1
    assert not [name for _, name, _ in read.attributes if name.startswith("on") or name == "style"]
    assert "&lt;script&gt;window.hacked = 1&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page
    assert "refresh" not in [
        value for tag, name, value in read.attributes if (tag, name) == ("meta", "http-equiv")
    ]


def test_nothing_comes_from_outside(read: Reader, page: str):
    assert "http:" not in page
    assert "https:" not in page
    assert "//" not in re.sub(r"data:image/png;base64,[\w+/=]+|<script>.*?</script>", "", page, flags=re.S)
    for _, name, value in read.attributes:
        if name in ("src", "href"):
            assert value.startswith(("#", "data:image/png;base64,")) or value == "both.json", value
    policy = next(value for tag, name, value in read.attributes if "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_ids_are_unique_and_every_reference_has_its_target(read: Reader):
    ids = [value for _, name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    refers = ("aria-labelledby", "for")
    wanted = {value for _, name, value in read.attributes if name in refers}
    wanted |= {value[1:] for _, name, value in read.attributes if name == "href" and value.startswith("#")}
    wanted |= {
        value[5:-1] for _, name, value in read.attributes if name == "clip-path" and value.startswith("url(#")
    }
    assert wanted <= set(ids)


def test_the_page_can_be_read_by_those_who_do_not_see_it(read: Reader):
    assert {"main", "nav", "header", "footer", "h1", "h2", "h3"} <= set(read.tags)
    assert ("html", "lang", "en") in read.attributes
    assert read.tags.count("figure") > 40
    labels = [value for tag, name, value in read.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == read.tags.count("figure")
    assert all(labels)
    assert read.tags.count("caption") == read.tags.count("table")


def test_every_run_has_its_part(read: Reader, page: str):
    ids = {value for _, name, value in read.attributes if name == "id"}
    for part in ("part-1", "part-2"):
        for section in ("headline", "setup", "curves", "budget", "clock", "losses", "ablation", "stages",
                        "statistics", "reliability", "groups"):  # fmt: skip
            assert f"{part}-{section}" in ids
    assert "No rollouts were recorded: train with fastrl.trace: true" in page, "the comparison has none"


def test_the_twin_is_strict_json_and_lies_beside_the_page(tmp_path: Path):
    folder = train_folder(tmp_path / "run")
    with (folder / "grpo" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "train_s": NaN, "loss": Infinity}\n')
    report = Report(runs=[folder], out=tmp_path / "deep" / "page.html")
    assert report.write()
    twin = json.loads(report.twin_path.read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    rows = tables(twin["parts"][0], "reliability")["What went wrong, or could not be used"]["rows"]
    assert rows[0][-1] == "1", "a step with a figure that is not finite"


def test_many_methods_look_different():
    looks = [(str(style["color"]), str(style["linestyle"])) for style in map(look, range(36))]
    assert len(set(looks)) == 36


def test_labels_are_text_in_a_figure_too():
    series = [{"method": "a", "label": "$\\frac{", "look": 0, "x": [1.0], "y": ["<b>&$x_1$"], "seeds": []}]
    figure = {
        "kind": "stack",
        "title": "",
        "x": "s",
        "y": "",
        "line": None,
        "summary": '"<i>',
        "series": series,
    }
    svg = draw(figure, "p")
    assert "&lt;b&gt;&amp;$x_1$" in svg
    assert "$\\frac{" in svg
    assert 'aria-label="&quot;&lt;i&gt;"' in svg


# --- files that are missing, or being written ---------------------------------------------------


def test_a_run_that_has_just_begun_is_a_page(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("loss_type: grpo\n", encoding="utf-8")
    report = Report(runs=[folder], out=tmp_path / "page.html")
    assert not report.write()
    page = report.out.read_text(encoding="utf-8")
    for line in ("No headline", "no evaluation was recorded", "no step was recorded", "No results yet"):
        assert line in page


def test_an_unfinished_run_is_drawn_up_to_its_last_whole_line(tmp_path: Path):
    folder = train_folder(tmp_path / "run", finished=False)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (folder / "fastrl" / name).open("a", encoding="utf-8") as file:
            file.write('{"step": 9, "train_s": 9.')
    part = build_twin([folder])["parts"][0]
    assert not part["finished"]
    assert figures(part, "budget")[0]["series"][1]["x"] == list(range(1, 9))
    assert blocks(part, "reliability", "lines")[0]["lines"] == [], "a last half line is no fault"
    assert "speed-up for equal updates" not in json.dumps(blocks(part, "headline", "cards"))
    assert "FAILED" not in json.dumps(part), "no two methods are done: nothing can be unequal yet"


def test_a_bad_line_in_the_middle_is_counted(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe{\n[1]\n{"step": 2}\n')
    problems: list[str] = []
    assert read_lines(path, problems) == [{"step": 1}, {"step": 2}]
    assert problems == [f"metrics.jsonl of {tmp_path.name}: 2 lines are no JSON objects and were left out."]


def test_a_comparison_with_little_in_it_says_what_is_missing(tmp_path: Path):
    folder = compare_folder(tmp_path / "out")
    content = json.loads((folder / "compare.json").read_text("utf-8"))
    content |= {"tables": {"grpo": {"grpo": {"final": None}}}, "equal_updates": None, "settings": None}
    content["cells"] = {"planned": 30, "finished": 1, "failed": None}
    for key in ("methods", "seeds", "aggregate", "versions"):
        del content[key]
    (folder / "compare.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "steps.parquet").write_bytes(b"PAR1 half")
    (folder / "evaluations.parquet").unlink()
    report = Report(runs=[folder], out=tmp_path / "page.html")
    assert not report.write()
    page = report.out.read_text(encoding="utf-8")
    assert "steps.parquet could not be read" in page
    assert "evaluations.parquet is not there" in page
    assert "no evaluation was recorded" in page


def test_a_comparison_that_has_just_begun_is_a_page(tmp_path: Path):
    (tmp_path / "out" / "cells").mkdir(parents=True)
    report = Report(runs=[tmp_path / "out"], out=tmp_path / "page.html", every=5)
    assert report.step() == (True, False)
    twin = json.loads(report.twin_path.read_text("utf-8"))
    assert all(section["blocks"] for section in twin["parts"][0]["sections"])
    assert "Nothing was written yet." in report.out.read_text("utf-8")
    assert report.step() == (False, False)


def test_reliability_of_a_comparison_is_read_from_the_logs_of_its_cells(tmp_path: Path):
    folder = compare_folder(tmp_path / "out")
    logged = train_folder(tmp_path / "run") / "fastrl" / "metrics.jsonl"
    cell = folder / "cells" / "grpo" / "tau0.2-seed1"
    cell.mkdir(parents=True)
    (cell / "metrics.jsonl").write_bytes(logged.read_bytes())
    rows = tables(build_twin([folder])["parts"][0], "reliability")["What went wrong, or could not be used"][
        "rows"
    ]
    assert rows[1][3:6] == ["1", "12.5 %", "50.0 %"]


@pytest.mark.parametrize(
    ("cells", "done"),
    [
        (None, False),
        ({"planned": 3, "finished": 3, "ended": False}, False),
        ({"planned": 3, "finished": 2, "failed": [{"loss": "grpo", "seed": 0}], "ended": True}, True),
    ],
)
def test_a_comparison_is_done_when_it_says_so(cells: dict[str, Any] | None, done: bool):
    assert cells_are_done(cells) is done


# --- following a run ----------------------------------------------------------------------------


def test_live_writes_when_something_has_changed_until_the_run_is_finished(tmp_path: Path):
    folder = train_folder(tmp_path / "run", finished=False)
    report = Report(runs=[folder], out=tmp_path / "page.html", every=5)
    assert report.step() == (True, False)
    assert '<meta http-equiv="refresh" content="5">' in report.out.read_text("utf-8").replace("5.0", "5")
    assert report.step() == (False, False)
    with (folder / "fastrl" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "train_s": 9.0, "fastrl/num_rollouts/mean": 7.0}\n')
    assert report.step() == (True, False)
    assert report.step() == (False, False)
    (folder / "summary.json").write_text('{"recipe": "made-up", "methods": []}', encoding="utf-8")
    assert report.step() == (True, True)
    page = report.out.read_text("utf-8")
    assert 'http-equiv="refresh"' not in page
    assert "data-every" not in page


def test_following_ends_with_the_run_or_with_ctrl_c(tmp_path: Path):
    folder = train_folder(tmp_path / "run", finished=False)
    report = Report(runs=[folder], out=tmp_path / "page.html", every=5)
    told: list[str] = []
    waits: list[float] = []

    def finish(seconds: float) -> None:
        waits.append(seconds)
        (folder / "summary.json").write_text("{}", encoding="utf-8")

    follow(report, told.append, sleep=finish)
    assert waits == [5]
    assert [line.rpartition(": ")[2] for line in told] == ["written", "written, finished"]

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (folder / "summary.json").unlink()
    follow(report, told.append, sleep=interrupt)
    assert "the run goes on" in told[-1]


# --- the command --------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastrl", "report", *arguments])
    return cli.main()


def test_the_command_writes_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path, capsys):
    out = tmp_path / "page.html"
    assert command(monkeypatch, str(run), "-o", str(out), "--groups", "0") == 0
    assert "Groups were left out" in out.read_text(encoding="utf-8")
    assert f"data: {out.with_suffix('.json')}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere"], "no such folder"),
        (["{tmp}"], "neither a run of fastrl train"),
        ([], "no run"),
        (["{run}", "-o", "page.pdf"], "Use page.html"),
        (["{run}", "--groups", "-1"], "at least 0"),
        (["{run}", "--live", "--every", "0"], "between 1 and 86400"),
    ],
)
def test_a_users_error_names_value_rule_and_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path, capsys, arguments: list[str], message: str
):
    assert command(monkeypatch, *(a.format(tmp=tmp_path, run=run) for a in arguments)) == 2
    assert message in capsys.readouterr().err


def test_files_that_were_changed_are_named(tmp_path: Path):
    folder = train_folder(tmp_path / "run")
    (folder / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"summary\.json: not JSON"):
        build_twin([folder])
    other = compare_folder(tmp_path / "out")
    (other / "compare.json").write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(ConfigError, match="format 2, this FastRL reads 1"):
        build_twin([other])


def test_a_page_needs_neither_torch_nor_transformers(run: Path, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from fastrl.report.page.live import Report; "
        f"Report(runs=[Path({str(run)!r})], out=Path({str(tmp_path / 'page.html')!r})).write(); "
        "assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
