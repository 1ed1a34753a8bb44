"""What a run depends on, as digests: the code that trains, the problems and the model; nothing else."""

import ast
from pathlib import Path

import pytest

from fastrl.bench import source
from fastrl.bench.tasks import TestbedTask

pytestmark = pytest.mark.trl


def test_what_trains_counts_and_what_looks_does_not():
    modules = source.training_modules()
    assert {
        "fastrl.bench.training", "fastrl.bench.recording", "fastrl.integrations.trl", "fastrl.integrations._trl_prefix",
        "fastrl.method", "fastrl.pruners.mdap", "fastrl.budgets.discovery", "fastrl.rewards.functions",
        "fastrl.testbed.model", "fastrl.config",
    } <= set(modules)  # fmt: skip
    others = (
        "fastrl.report",
        "fastrl.commands",
        "fastrl.cli",
        "fastrl.bench.comparison",
        "fastrl.integrations.verl",
    )
    assert not [name for name in modules if name.startswith(others)]


def test_comments_and_docstrings_do_not_count():
    def of(text: str) -> str:
        return ast.dump(source._without_docstrings(ast.parse(text)))

    plain = "def f(x):\n    return x\n"
    assert of('"""Module."""\ndef f(x):\n    """Function."""\n    return x  # why\n') == of(plain)
    assert of("def f(x):\n    return -x\n") != of(plain)


def test_the_problems_and_the_model_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task = TestbedTask(train_prompts=8, held_out_prompts=8)
    digests = {
        source.digest_of_testbed(task, 0),
        source.digest_of_testbed(task, 1),
        source.digest_of_testbed(TestbedTask(train_prompts=9, held_out_prompts=8), 0),
    }
    assert len(digests) == 3
    for name in ("model.safetensors", source.RECORD):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr("fastrl.testbed.model.checkpoint_path", lambda problems: tmp_path)
    source.digest_of_testbed.cache_clear()
    other = source.digest_of_testbed(task, 0)
    assert other not in digests
    (tmp_path / source.RECORD).write_bytes(b"y")
    source.digest_of_testbed.cache_clear()
    assert source.digest_of_testbed(task, 0) == other, "how it was made changes no run"
    source.digest_of_testbed.cache_clear()
