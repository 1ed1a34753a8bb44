"""FastRL's part of a checkpoint of a Ray trainer (verl, EasyR1): a JSON file in its `global_step_N` folder."""

import json
from pathlib import Path

from fastrl.method import FastRL
from fastrl.types import StateError

STATE_FILE = "fastrl_state.json"
STATE_VERSION = 1


def write_state(checkpoint: Path, fastrl: FastRL) -> None:
    """Write the state under a temporary name that is then renamed; the engine calls the checkpoint whole afterwards."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    temporary = checkpoint / f"{STATE_FILE}.tmp"
    temporary.write_text(
        json.dumps({"version": STATE_VERSION, "fastrl": fastrl.state_dict()}), encoding="utf-8"
    )
    temporary.replace(checkpoint / STATE_FILE)


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
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise StateError(f"{path} is damaged ({error}). Resume from another checkpoint.") from error
    if state.get("version") != STATE_VERSION:
        raise StateError(
            f"{path} has version {state.get('version')}, this FastRL reads version {STATE_VERSION}. Resume with the "
            "FastRL that wrote it."
        )
    fastrl.load_state_dict(state["fastrl"])
