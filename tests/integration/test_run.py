"""A recipe of two steps from end to end, as a user runs it (in a process of its own), and its numbers."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("trl")

from fastrl import FastRLConfig
from fastrl.bench import cells
from fastrl.bench.recipe import Recipe, parse_recipe
from fastrl.bench.run import run_recipe
from fastrl.bench.summary import summarize_runs
from fastrl.bench.training import Method, MethodRun
from fastrl.types import ConfigError

pytestmark = pytest.mark.trl

RECIPE = """
task: {train_prompts: 2, held_out_prompts: 4, evaluate_every: 1, num_threads: 1}
seed: 0
num_train_epochs: 2          # one step per epoch
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 16
learning_rate: 1.0e-4
temperature: 1.0
top_k: 0
beta: 0.0
loss_type: grpo
gradient_checkpointing: false
bf16: false
"""
STAGES = ("generation", "rewards", "old_ref", "select", "update", "rest")


def start(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder and what was printed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    result = start("-m", "fastrl.cli", "train", "tiny.yaml", "--set", "fastrl.tau=0.7", folder=folder)
    assert result.returncode == 0, result.stderr
    (run,) = (folder / "runs").iterdir()
    return run, result.stdout


def test_the_run_folder_is_complete_and_named(done: tuple[Path, str]):
    folder, printed = done
    assert f"run folder: runs/{folder.name}" in printed
    assert {path.name for path in folder.iterdir()} >= {
        "recipe.yaml", "versions.json", "summary.json", "figure.svg", "figure.png", "grpo", "fastrl",
    }  # fmt: skip
    resolved = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert resolved["fastrl"]["tau"] == 0.7
    assert resolved["learning_rate"] == 1e-4
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    assert versions["packages"]["trl"].startswith("1.16")


def test_both_methods_start_from_the_same_place(done: tuple[Path, str]):
    folder, _ = done
    stock, fast = (rows(folder / name / "evaluations.jsonl") for name in ("grpo", "fastrl"))
    assert [row["step"] for row in stock] == [row["step"] for row in fast] == [0, 1, 2]
    assert stock[0] == fast[0]
    stock, fast = (rows(folder / name / "metrics.jsonl") for name in ("grpo", "fastrl"))
    assert [row["step"] for row in stock] == [row["step"] for row in fast] == [1, 2]
    assert stock[0]["reward"] == fast[0]["reward"]


def test_times_add_up(done: tuple[Path, str]):
    summary = json.loads((done[0] / "summary.json").read_text(encoding="utf-8"))
    for method in summary["methods"]:
        assert tuple(method["stage_s"]) == STAGES
        assert sum(method["stage_frac"].values()) == pytest.approx(1.0, abs=0.02)
        assert method["stage_s"]["generation"] > 0
        assert method["stage_s"]["update"] > 0
        assert method["rollouts"]["generated"] == 16
    stock, fast = summary["methods"]
    assert stock["rollouts"]["trained"] == 16
    assert 0 < fast["rollouts"]["trained"] <= 16
    assert fast["speedup_equal_steps"] == pytest.approx(stock["train_s"] / fast["train_s"])


def test_the_table_has_all_rows(done: tuple[Path, str]):
    for text in (
        "held-out accuracy, greedy", "held-out accuracy, sampled", "wall clock of training",
        "speed-up to that accuracy", "speed-up to equal steps", "rollouts generated", "rollouts trained on",
        "time in generation", "time in rewards", "time in old + reference log-probs", "time in selection",
        "time in update", "time in rest", "stock TRL GRPO", "GRPO + FastRL",
    ):  # fmt: skip
        assert text in done[1], text


def test_progress_is_plain_lines_without_a_terminal(done: tuple[Path, str]):
    assert "GRPO + FastRL: step 2/2  reward" in done[1]
    assert "kept" in done[1]
    assert "\x1b" not in done[1]


def test_the_figure_is_valid(done: tuple[Path, str]):
    image_module = pytest.importorskip("PIL.Image")
    with image_module.open(done[0] / "figure.png") as image:
        image.load()
        assert image.width > 1000
    assert ET.parse(done[0] / "figure.svg").getroot().tag.endswith("svg")


SAME = """
import sys
from pathlib import Path
from fastrl.bench.recipe import read_recipe
from fastrl.bench.training import Method, train_method
recipe = read_recipe("tiny.yaml")
for evaluate in (True, False):
    run = train_method(recipe, Method(key="grpo", label="stock"), seed=5, folder=Path(f"same-{evaluate}"),
                       evaluate=evaluate)
    print([(row["loss"], row["grad_norm"], row["reward"]) for row in run.metrics])
"""


def test_evaluation_changes_nothing_in_training(tmp_path: Path):
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
    result = start("-W", "ignore", "-c", SAME, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    with_evaluation, without = result.stdout.splitlines()[-2:]
    assert with_evaluation == without


def test_a_folder_in_use_is_refused(tmp_path: Path):
    (tmp_path / "something").touch()
    with pytest.raises(ConfigError, match="in use"):
        run_recipe(tiny(), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["something"]


def test_several_processes_share_one_named_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes need one folder: name it with --out"):
        run_recipe(tiny())


def test_a_recipe_for_four_processes_is_not_run_by_one(tmp_path: Path):
    recipe = parse_recipe({"task": {"name": "math", "model": "x", "processes": 4}}, name="four")
    with pytest.raises(ConfigError, match=r"written for 4 processes and was started with 1.*0\.25 times"):
        run_recipe(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_are_refused_before_anything_is_trained(tmp_path: Path):
    bad = Method(key="odd", label="odd", trainer={"num_generations": 3})
    with pytest.raises(ConfigError, match="divisible"):
        run_recipe(tiny(), methods=[Method(key="grpo", label="stock"), bad], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def tiny() -> Recipe:
    return parse_recipe(yaml.safe_load(RECIPE), name="tiny")


# From here on nothing is trained: runs are made up, so that every number is known.


def made_up(
    key: str, *, step_s: float, accuracy: list[float], fastrl: FastRLConfig | None = None
) -> MethodRun:
    """One evaluation before training and one after each step."""
    metrics = [
        {
            "step": k + 1,
            "step_s": step_s,
            "train_s": step_s * (k + 1),
            "cpu_s": step_s * (k + 1),
            "fastrl/rollouts": 8.0,
            "fastrl/trained/rows": 8.0 if fastrl is None else 2.0,
            "fastrl/time/generation_s": 0.25 * step_s,
            "fastrl/time/update_s": 0.5 * step_s,
        }
        for k in range(len(accuracy) - 1)
    ]
    evaluations = [
        {"step": k, "train_s": step_s * k, "greedy": value, "sampled": value / 2, "num": 4}
        for k, value in enumerate(accuracy)
    ]
    method = Method(key=key, label=key, fastrl=fastrl)
    return MethodRun(method=method, seed=0, folder=Path(key), metrics=metrics, evaluations=evaluations)


def test_speed_ups_are_those_of_the_definition():
    stock = made_up("grpo", step_s=4.0, accuracy=[0.0, 0.5, 0.5, 0.8])  # final: 0.6, first reached at 9.33 s
    fast = made_up("fastrl", step_s=2.0, accuracy=[0.0, 0.6, 0.6, 0.9], fastrl=FastRLConfig())  # at 2 s
    summary = summarize_runs([stock, fast])
    assert summary["target"] == pytest.approx(0.6)
    base, other = summary["methods"]
    assert (base["speedup_to_target"], base["speedup_equal_steps"]) == (1.0, 1.0)
    assert base["time_to_target_s"] == pytest.approx(8 + 4 / 3)
    assert other["time_to_target_s"] == pytest.approx(2.0)
    assert other["speedup_to_target"] == pytest.approx((8 + 4 / 3) / 2)
    assert other["speedup_equal_steps"] == pytest.approx(2.0)
    assert other["rollouts"] == {"generated": 24.0, "trained": 6.0}
    assert other["accuracy"]["greedy"] == {"before": 0.0, "after": pytest.approx(0.7)}
    assert other["stage_frac"] == pytest.approx(
        {"generation": 0.25, "rewards": 0, "old_ref": 0, "select": 0, "update": 0.5, "rest": 0.25}
    )


def test_a_target_that_is_never_reached_has_no_speed_up():
    stock = made_up("grpo", step_s=4.0, accuracy=[0.0, 0.8, 0.8, 0.8])
    fast = made_up("fastrl", step_s=2.0, accuracy=[0.0, 0.1, 0.2, 0.3], fastrl=FastRLConfig())
    other = summarize_runs([stock, fast])["methods"][1]
    assert other["time_to_target_s"] is None
    assert other["speedup_to_target"] is None
    assert other["speedup_equal_steps"] == pytest.approx(2.0)


def test_without_a_baseline_there_is_nothing_to_compare_with():
    fast = made_up("fastrl", step_s=2.0, accuracy=[0.0, 0.1], fastrl=FastRLConfig())
    summary = summarize_runs([fast])
    assert summary["target"] is None
    assert summary["methods"][0]["speedup_equal_steps"] is None


def test_a_finished_cell_is_never_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls = []

    def train(recipe: Recipe, method: Method, **kwargs: Any) -> MethodRun:
        calls.append(method.fastrl)
        return made_up(method.key, step_s=1.0, accuracy=[0.0, 0.5])

    monkeypatch.setattr(cells, "train_method", train)
    method = Method(key="fastrl", label="FastRL", fastrl=FastRLConfig())
    first = cells.run_cell(tmp_path, tiny(), method, seed=3)
    assert cells.run_cell(tmp_path, tiny(), method, seed=3) == first
    assert calls == [FastRLConfig(seed=3)]
    assert cells.curve(first) == [(0.0, 0.0), (1.0, 0.5)]
    with pytest.raises(ConfigError, match=r"other settings \(learning_rate\)"):
        cells.run_cell(tmp_path, tiny().replace(learning_rate=0.5), method, seed=3)
    assert len(calls) == 1


def test_a_smaller_group_keeps_the_prompts_per_step():
    method = cells.stock_with(tiny(), 2)
    assert method.trainer == {"num_generations": 2, "per_device_train_batch_size": 4}
    with pytest.raises(ConfigError, match="no whole counterpart"):
        cells.stock_with(tiny().replace(per_device_train_batch_size=6, num_generations=4), 3)
