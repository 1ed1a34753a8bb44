"""The command line: its frozen surface, its errors, its start-up, and what the doctor finds."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from fastrl import FastRLConfig, cli
from fastrl.bench import doctor
from fastrl.bench.doctor import Check
from fastrl.types import NoSignalError

COMMANDS = {
    "train": {"--with", "--set", "--out", "--dry-run", "--command"},
    "compare": {"--methods", "--losses", "--seeds", "--set", "--jobs", "--clock", "--targets", "--out"},
    "analyze": {"--settings", "--stages", "--tokenizer", "--outcome", "--steps-per-epoch", "--out"},
    "eval": {
        "--benchmarks", "--base", "--k", "--limit", "--sources", "--keep-good", "--reward", "--prompt", "--max-tokens",
        "--temperature", "--batch-size", "--engine", "--lmms-python", "--lmms-model", "--judge", "--seed", "--out",
    },
    "data": {
        "--to", "--out", "--source", "--splits", "--check", "--keep-good", "--limit", "--prompt", "--system",
        "--columns", "--max-prompt-tokens", "--model", "--max-pixels",
    },
    "simulate": {"--settings", "--seed", "--draws", "--steps", "--rollouts", "--out"},
    "diagnose": {
        "--settings", "--model", "--data", "--gram", "--prompts", "--rollouts", "--problems", "--share", "--parameters",
        "--coordinates", "--ngram", "--seed", "--out",
    },
    "report": {"--out", "--groups", "--live", "--every"},
    "config": {"--check", "--print-defaults", "--no-print-defaults"},
    "doctor": {"--recipe"},
}  # fmt: skip
"""Users' scripts hold these words: adding one is a decision, removing one breaks somebody."""

HEAVY = ("torch", "transformers", "trl", "datasets", "matplotlib", "numpy", "yaml", "rich.progress")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastrl", *arguments])
    return cli.main()


def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *command, "--help")
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_commands_and_options_are_frozen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    listed = re.search(r"\{(.*?)\}", help_of(monkeypatch, capsys))
    assert listed is not None
    assert set(listed[1].split(",")) == set(COMMANDS)
    for command, options in COMMANDS.items():
        found = set(re.findall(r"--[a-z][a-z-]*", help_of(monkeypatch, capsys, command)))
        assert found - {"--help"} == options, command


def test_the_command_line_starts_without_anything_heavy():
    code = f"import sys, fastrl.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_check_for_heavy_modules_can_fail():
    code = f"import sys, fastrl.cli, numpy; print([name for name in {HEAVY!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "['numpy']"


def test_defaults_are_the_published_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, "config", "--print-defaults") == 0
    assert yaml.safe_load(capsys.readouterr().out) == FastRLConfig().to_dict()


def test_a_checked_file_is_spelled_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    (tmp_path / "mine.yaml").write_text("tau: 0.5\n", encoding="utf-8")
    assert run(monkeypatch, "config", "--check", str(tmp_path / "mine.yaml")) == 0
    assert yaml.safe_load(capsys.readouterr().out) == FastRLConfig(tau=0.5).to_dict()


@pytest.mark.parametrize(
    ("content", "message"),
    [("taau: 0.5", "Did you mean 'tau'"), ("tau: [", "not valid YAML"), (None, "cannot be read")],
)
def test_a_users_error_is_one_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str | None,
    message: str,
):
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert run(monkeypatch, "config", "--check", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fastrl: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def raising(error: Exception):
    def call(**kwargs: object) -> None:
        raise error

    return call


def test_a_missing_extra_is_named_with_its_pip_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for module, extra in (("trl", "trl"), ("torch.nn", "trl"), ("matplotlib.pyplot", "report")):
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        monkeypatch.setattr(cli.app, "cli", raising(error))
        assert cli.main() == 2
        assert f'pip install "fastrl-grpo[{extra}]"' in capsys.readouterr().err


def test_a_run_without_signal_ends_with_its_explanation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli.app, "cli", raising(NoSignalError("10 steps in a row had nothing to learn from")))
    assert cli.main() == 2
    assert "10 steps in a row" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("ours"), ModuleNotFoundError("x", name="fastrl_typo")])
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(cli.app, "cli", raising(error))
    with pytest.raises(type(error)):
        cli.main()


def test_a_users_environment_is_not_overwritten(monkeypatch: pytest.MonkeyPatch):
    for name in cli.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(cli.app, "cli", lambda **kwargs: None)
    assert cli.main() == 0
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["GOMP_SPINCOUNT"] == "5000"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("problem", 1)])
def test_the_doctor_fails_on_a_problem_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
):
    check = Check(name="thing", status=status, detail="was [found] so", remedy="do this")
    monkeypatch.setattr(doctor, "examine", lambda recipe: [check])
    assert run(monkeypatch, "doctor") == code
    printed = capsys.readouterr().out
    assert "was [found] so" in printed
    assert "-> do this" in printed


def found(recipe: Path | None = None) -> dict[str, Check]:
    return {check.name: check for check in doctor.examine(recipe)}


def test_every_problem_has_a_remedy():
    assert all(check.remedy for check in doctor.examine() if check.status == "problem")


def test_the_doctor_knows_other_versions(monkeypatch: pytest.MonkeyPatch):
    versions = {"trl": "1.17.0", "transformers": "9.0.0", "matplotlib": None}

    def version(name: str) -> str:
        if name in versions and versions[name] is None:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions.get(name) or doctor.TRIED[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    checks = {check.name: check for check in doctor._packages()}
    assert checks["trl"].status == "problem"
    assert "trl>=1.16,<1.17" in checks["trl"].remedy
    assert checks["transformers"].status == "note"
    assert 'fastrl-grpo[report]"' in checks["matplotlib"].remedy
    assert checks["numpy"].status == "ok"


def test_the_doctor_examines_a_recipe(tmp_path: Path):
    pytest.importorskip("trl")
    recipe = tmp_path / "mine.yaml"
    batch = "bf16: false\nper_device_train_batch_size: 8\nnum_generations: 4\n"
    recipe.write_text(f"{batch}task: {{train_prompts: 5}}", encoding="utf-8")
    checks = found(recipe)
    assert checks["TRL's methods"].status == "ok"
    assert checks["batch"].detail == "8 rollouts per generation = 2 prompts x 4"
    assert checks["prompts"].status == "note"
    assert "1 prompts are left out" in checks["prompts"].remedy
    recipe.write_text(f"{batch}task: {{train_prompts: 1}}", encoding="utf-8")
    assert found(recipe)["prompts"].status == "problem"
    recipe.write_text("num_generation: 4", encoding="utf-8")
    assert "Did you mean 'num_generations'" in found(recipe)["recipe"].detail


def test_a_dry_run_prints_the_recipe_and_its_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("trl")
    recipes = Path(__file__).parents[2] / "recipes"
    monkeypatch.setenv("COLUMNS", "120")
    recipe, change = recipes / "geometry3k" / "qwen2_5_vl_7b_gspo.yaml", recipes / "methods" / "unbiased.yaml"
    assert run(monkeypatch, "train", str(recipe), "--with", str(change), "--set", "seed=7", "--dry-run") == 0
    printed = capsys.readouterr().out
    settings = yaml.safe_load(printed.partition("Plan (")[0])
    assert (settings["seed"], settings["fastrl"]["budget"], settings["algorithm"]) == (7, "discovery", "GSPO")
    assert "256 prompts x 8 = 2,048 rollouts" in printed
    assert "800 in 200 rounds" in printed
    assert "published, not counted" in printed


def test_a_step_without_any_reward_is_shown_as_such():
    from fastrl.report.console import describe_step

    assert describe_step({"reward": None, "step_s": 1.0}, 1.0).startswith("reward -")
    assert describe_step({"reward": 0.5, "step_s": 1.0}, 1.0).startswith("reward 0.500")


def test_simulate_writes_a_result_and_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    (tmp_path / "mine.yaml").write_text("budget: fixed\ntau: 0.4\n", encoding="utf-8")
    out = tmp_path / "out"
    arguments = [
        "--settings",
        str(tmp_path / "mine.yaml"),
        "--draws",
        "20",
        "--steps",
        "4",
        "--out",
        str(out),
    ]
    assert run(monkeypatch, "simulate", *arguments) == 0
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert list(result["configs"]) == ["mine"]
    assert (out / "simulation.png").stat().st_size > 10_000
    assert "mine" in capsys.readouterr().out


def test_diagnose_reads_gradients_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(4, 3))
    record = {
        "prompt": "q", "completions": [[1, 2], [1, 3], [4], [5, 6]], "rewards": [1, 0, 1, 0],
        "gram": (features @ features.T).tolist(),
    }  # fmt: skip
    (tmp_path / "gram.json").write_text(json.dumps([record]), encoding="utf-8")
    out = tmp_path / "out"
    assert (
        run(
            monkeypatch,
            "diagnose",
            "--gram",
            str(tmp_path / "gram.json"),
            "--share",
            "0.5",
            "--out",
            str(out),
        )
        == 0
    )
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["pruners"]["none"]["cosine"]["mean"] == pytest.approx(1.0)
    assert set(result["similarities"]) == {"jaccard", "centred"}, "no log-probs and no sketches in this file"
    assert (out / "diagnosis.png").stat().st_size > 10_000


def test_diagnose_wants_a_model_and_its_data_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    assert run(monkeypatch, "diagnose", "--model", "mine", "--out", str(tmp_path)) == 2
    assert "--model and --data belong together" in capsys.readouterr().err
