"""FastRL's file in a checkpoint of verl or EasyR1."""

import json

import pytest

from fastrl import FastRL, FastRLConfig
from fastrl.integrations._ray_state import STATE_FILE, load_state, write_state
from fastrl.types import StateError


def method(**settings) -> FastRL:
    return FastRL(FastRLConfig(budget="fixed", **settings), num_rollouts=4)


def test_a_state_comes_back(tmp_path):
    saved = method()
    saved.step = 7
    write_state(tmp_path / "global_step_7", saved)
    found = method()
    load_state(tmp_path / "global_step_7", found)
    assert found.step == 7
    assert [path.name for path in (tmp_path / "global_step_7").iterdir()] == [STATE_FILE]


def test_states_are_read_strictly(tmp_path):
    with pytest.raises(StateError, match="not saved by a run with FastRL"):
        load_state(tmp_path, method())
    path = tmp_path / STATE_FILE
    path.write_text('{"version": 1, "fast')
    with pytest.raises(StateError, match="damaged"):
        load_state(tmp_path, method())
    path.write_text(json.dumps({"version": 99}))
    with pytest.raises(StateError, match="version 99"):
        load_state(tmp_path, method())
    write_state(tmp_path, method(tau=0.5))
    with pytest.raises(StateError, match="tau"):
        load_state(tmp_path, method())
