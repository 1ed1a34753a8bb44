"""What FastRL logs reaches every tracker: a short run with each, then the tracker's own files are read back."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastrl.config import FastRLConfig

PROJECT = "fastrl-test"

pytestmark = pytest.mark.timeout(300)


def read_tensorboard(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def read_wandb(folder: Path) -> dict:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.finish()  # as at the end of the process: what is still in memory is written
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: dict = {}
    for content in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for key, value in row.items():
            found.setdefault(key, {})[row.get("train/global_step")] = value
    return found


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of a log of LevelDB's format, in blocks of 32 KiB, behind a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = -position % 32768
        if left and left < 7:  # no room for a header: zeros up to the next block
            position += left
            continue
        length, kind = struct.unpack("<4xHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def read_trackio(folder: Path) -> dict:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs(PROJECT)
    found: dict = {}
    for row in SQLiteStorage.get_logs(PROJECT, run):
        for key, value in row.items():
            found.setdefault(key, {})[row.get("train/global_step")] = value  # it also logs the machine
    return found


def read_mlflow(folder: Path) -> dict:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {
        key: {m.step: m.value for m in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }


TRACKERS = {
    "tensorboard": (read_tensorboard, "train/"),
    "wandb": (read_wandb, "train/"),
    "trackio": (read_trackio, "train/"),
    "mlflow": (read_mlflow, ""),
}
"""How each is read, and what transformers puts in front of a key."""


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Every tracker writes below the folder of the test and asks no server."""
    for name, value in {
        "TENSORBOARD_LOGGING_DIR": tmp_path / "tensorboard",
        "WANDB_MODE": "offline",
        "WANDB_DIR": tmp_path,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_metric_is_in_the_trackers_own_files(tracker, offline):
    pytest.importorskip(tracker, reason=f"no {tracker} here: make test-trackers")
    from trl_support import ScriptedFast, text_dataset, train

    trainer, _ = train(
        ScriptedFast,
        offline / "run",
        dataset=text_dataset(4),
        trainer_kwargs={"fastrl": FastRLConfig()},
        max_steps=-1,
        num_train_epochs=2,
        report_to=tracker,
        project=PROJECT,
        trackio_static_space_id=False,  # or trackio uploads the run when it ends
    )
    logged = {row["step"]: row for row in trainer.state.log_history if "fastrl/rollouts" in row}
    assert list(logged) == [1, 2, 3, 4]
    read, prefix = TRACKERS[tracker]
    found = read(offline)
    keys = [key for key in logged[1] if key.startswith("fastrl/")]
    assert len(keys) > 30
    for key in keys:
        expected = {step: row[key] for step, row in logged.items() if row[key] is not None}
        assert expected, key
        values = {step: value for step, value in found[prefix + key].items() if value is not None}
        assert values == pytest.approx(expected, rel=1e-6), key
