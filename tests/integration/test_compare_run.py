"""`fastrl compare` for real: two processes, killed in the middle, started again; the same numbers as in one go."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SETTINGS = (
    "task.train_prompts=8", "task.held_out_prompts=8", "task.evaluate_every=2", "task.pass_k=2", "task.pass_prompts=4",
    "per_device_train_batch_size=8", "num_generations=4", "num_train_epochs=2",
)  # fmt: skip


def start(out: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fastrl.cli", "compare", str(ROOT / "recipes/testbed/study.yaml"), "--methods", "grpo",
        "unbiased", "fixed_g", "--seeds", "2", "--jobs", "2", "--set", *SETTINGS, "--out", str(out),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def cells(out: Path) -> dict[str, Any]:
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in (out / "cells" / "grpo").glob("*.json")
    }


def test_killed_and_started_again_it_gives_the_same(tmp_path: Path):
    output = finish(start(tmp_path / "whole"))
    assert "6 of 6 cells, 0 failed" in output
    killed = start(tmp_path / "killed")
    deadline = time.monotonic() + 200
    while not cells(tmp_path / "killed") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before = cells(tmp_path / "killed")
    assert 1 <= len(before) < 6
    finish(start(tmp_path / "killed"))
    whole, again = cells(tmp_path / "whole"), cells(tmp_path / "killed")
    assert {name: again[name] for name in before} == before, "a finished cell was run again"
    assert whole.keys() == again.keys()
    seconds = {"train_s", "cpu_s", "step_s"}
    for name, cell in whole.items():
        for key in ("steps", "evaluations"):
            for one, other in zip(cell[key], again[name][key], strict=True):
                same = {k for k in one if k not in seconds and not k.startswith("stage_")}
                assert {k: one[k] for k in same} == {k: other[k] for k in same}, name
    tables = [
        json.loads((tmp_path / out / "compare.json").read_text())["tables"]["grpo"]
        for out in ("whole", "killed")
    ]
    for key in ("final", "difference", "kept_share", "num_rollouts", "rollouts", "tokens"):
        assert [table["unbiased"][key] for table in tables[:1]] == [
            table["unbiased"][key] for table in tables[1:]
        ]
