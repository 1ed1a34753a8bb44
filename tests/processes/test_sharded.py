"""Engines that shard a model over the ranks: an emulation, and FSDP2 and ZeRO for real.

Both ranks are processes on a CPU (gloo). What an engine does differently on accelerators, such as
overlapping its collectives with the computation, is not seen here.
"""

import importlib.util
import os
import subprocess
from pathlib import Path

import launch
import pytest

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed (DS_BUILD_OPS=0 pip install deepspeed, in an environment of its own)",
)
pytestmark = [pytest.mark.trl, pytest.mark.timeout(240)]


def run(kind: str, folder: Path, *, limit_s: float) -> tuple[int | str, str]:
    """Run the worker on two processes; returns how it ended, and its output."""
    log = folder / "log"
    process = launch.start("sharded_worker.py", kind, str(folder), num_processes=2, log=log)
    try:
        ended: int | str = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        ended = "stuck"
    finally:
        launch.kill(process)
    return ended, log.read_text(encoding="utf-8")


def workers_of(folder: Path) -> list[str]:
    """Process ids that were started for a folder and still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if str(folder).encode() in arguments and int(entry.parent.name) != os.getpid():
            found.append(entry.parent.name)
    return found


def assert_done(kind: str, folder: Path, *, limit_s: float) -> str:
    ended, output = run(kind, folder, limit_s=limit_s)
    assert ended == 0, f"{kind}: {ended}\n{output[-6000:]}"
    assert (folder / "done").is_file()
    return output


def test_all_ranks_enter_the_same_modules_and_others_are_noticed(tmp_path):
    output = assert_done("emulated", tmp_path, limit_s=100)
    # Images on one rank, and a layer that one rank leaves out: both ranks notice.
    assert output.count("noticed: rank 0") == output.count("noticed: rank 1") == 2
    assert "'policy:model.vision_tower', another rank is elsewhere" in output


@pytest.mark.parametrize(
    "engine",
    [
        "fsdp2-transformers",
        pytest.param("fsdp2-accelerate", marks=pytest.mark.slow),
        pytest.param("zero2", marks=[needs_deepspeed, pytest.mark.slow]),
        pytest.param("zero3", marks=[needs_deepspeed, pytest.mark.slow]),
    ],
)
def test_a_sharded_engine_takes_the_steps_of_plain_data_parallelism(tmp_path, monkeypatch, engine):
    if engine.startswith("zero"):  # compiles a small helper the first time, which takes a minute
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert_done(engine, tmp_path, limit_s=200)


def test_fsdp2_fails_where_one_rank_alone_has_images(tmp_path):
    """The counterpart of the emulation: what FastRL's plan prevents does happen in a real engine."""
    ended, output = run("unbalanced", tmp_path, limit_s=60)
    assert ended != 0
    assert ended == "stuck" or "gloo" in output
    assert not (tmp_path / "done").exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_hang_is_ended_with_all_its_processes(tmp_path):
    ended, _ = run("stuck", tmp_path, limit_s=8)
    assert ended == "stuck"
    assert workers_of(tmp_path) == []
