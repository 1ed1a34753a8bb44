"""FastRL's part of a checkpoint of a Ray trainer (verl, EasyR1): a JSON file in its `global_step_N` folder."""

from pathlib import Path

from fastrl.integrations._state_file import read_json, write_json
from fastrl.method import FastRL
from fastrl.types import StateError

STATE_FILE = "fastrl_state.json"
STATE_VERSION = 1


def write_state(checkpoint: Path, fastrl: FastRL) -> None:
    """Write the state; the engine calls the checkpoint whole afterwards."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_json(checkpoint / STATE_FILE, {"fastrl": fastrl.state_dict()}, version=STATE_VERSION)


def load_state(checkpoint: Path, fastrl: FastRL) -> None:
    """Go on from a checkpoint, strictly.

    Raises:
        StateError: a checkpoint that FastRL did not save, a damaged file, another version or configuration.
    """
    path = checkpoint / STATE_FILE
    if not path.is_file():
        raise StateError(
            f"{checkpoint} holds no {STATE_FILE}: it was not saved by a run with FastRL, so how many rollouts its "
            "prompts had is not known. Start a new run from its weights, without resuming."
        )
    state = read_json(path, version=STATE_VERSION, remedy="Resume from another checkpoint")
    fastrl.load_state_dict(state["fastrl"])
