"""A run that is killed twenty times ends where the uninterrupted one ends, bit for bit (promise R3)."""

import json
import random
import time

import pytest
import torch
from launch import kill, run, start
from safetensors.torch import load_file

from fastrl.integrations.trl import STATE_FILE
from fastrl.trace import read_rollouts

NUM_KILLS, STEPS, NUM_PROMPTS = 20, 32, 16
pytestmark = [pytest.mark.trl, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one_process", "two_processes"])
def uninterrupted(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run("killed_run.py", str(folder), num_processes=request.param, log=folder / "log", limit_s=120)
    return request.param, folder


def whole_checkpoints(folder):
    return len(list(folder.glob(f"checkpoint-*/{STATE_FILE}")))


def last_saved(folder):
    return max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)


def kill_at(folder, step, delay_s, num_processes):
    """Start or go on, and send SIGKILL after the folder of a checkpoint appears: often while it is written."""
    process = start("killed_run.py", str(folder), num_processes=num_processes, log=folder / "log")
    deadline = time.monotonic() + 120
    while last_saved(folder) < step and process.poll() is None:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.0005)
    time.sleep(delay_s)
    kill(process)


def test_killed_twenty_times(uninterrupted, tmp_path):
    num_processes, whole = uninterrupted
    chance = random.Random(num_processes)
    steps = sorted(chance.sample(range(1, STEPS), NUM_KILLS))
    half_written = 0
    for step in steps:
        kill_at(tmp_path, step, chance.choice([0.0, 0.002, 0.005, 0.01, 0.03]), num_processes)
        half_written += len(list(tmp_path.glob("checkpoint-*"))) - whole_checkpoints(tmp_path)
    run("killed_run.py", str(tmp_path), num_processes=num_processes, log=tmp_path / "log", limit_s=120)
    assert half_written > 0, "some kills must have hit a save"
    assert_same_run(tmp_path, whole)


def test_terminated_while_saving(uninterrupted, tmp_path):
    num_processes, whole = uninterrupted
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match=r"killed_run.py .* terminated"):
        run("killed_run.py", str(tmp_path), "terminated", num_processes=num_processes, log=log, limit_s=120)
    assert (tmp_path / "checkpoint-7").is_dir()
    assert not (tmp_path / "checkpoint-7" / STATE_FILE).exists(), "half a checkpoint must not look whole"
    run("killed_run.py", str(tmp_path), num_processes=num_processes, log=log, limit_s=120)
    assert "FastRL: resumed at step 6" in log.read_text(encoding="utf-8")
    assert_same_run(tmp_path, whole)


def assert_same_run(folder, whole):
    found, expected = load_file(folder / "end.safetensors"), load_file(whole / "end.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected), "other parameters"
    records = "fastrl/rollouts.jsonl"
    assert (folder / records).read_bytes() == (whole / records).read_bytes(), (
        "other prompts, G_t or selections"
    )
    ids = [group.prompt_id for group in read_rollouts(folder / "fastrl")]
    for epoch in (ids[:NUM_PROMPTS], ids[NUM_PROMPTS:]):
        assert sorted(epoch, key=int) == [str(i) for i in range(NUM_PROMPTS)], "each prompt once per epoch"
    lines = (folder / "fastrl/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
