"""The example of the README is what a newcomer pastes first: it must run as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_readme_example_trains(tmp_path, monkeypatch):
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    code = block.group(1).replace("num_train_epochs=2", "max_steps=2")
    assert "max_steps=2" in code, "the test shortens the run by this argument"
    names: dict = {}
    with pytest.warns(UserWarning, match="G_t stays at 8"):  # two steps are less than an epoch
        exec(compile(code, str(README), "exec"), names)
    assert names["trainer"].state.global_step == 2
    assert names["trainer"].fastrl.config.tau == 0.8


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
