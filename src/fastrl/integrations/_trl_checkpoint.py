"""FastRL's part of a checkpoint, and which checkpoints are whole.

    checkpoint-N/fastrl_state.json             history, budget, data set, ranks; written last
    checkpoint-N/fastrl_round_R.safetensors    inside a round: the micro-batches that rank R has yet to train on

The trainer writes a checkpoint file by file, so a run that is killed can leave half of one. The
state file is written after everything else, under a temporary name that is then renamed: a
checkpoint that has it is whole. Older checkpoints are deleted only then.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from fastrl.batching import Denominators
from fastrl.budgets import check_keys, check_unchanged
from fastrl.integrations._state_file import read_json, write_json
from fastrl.integrations._trl_data import Reserve
from fastrl.integrations._trl_prefix import SharedPrefix
from fastrl.integrations._trl_rows import MicroBatch
from fastrl.integrations._trl_schedule import Schedule
from fastrl.method import FastRL
from fastrl.types import StateError

if TYPE_CHECKING:  # a mixin: its methods are those of the trainer it is mixed into
    from trl import GRPOTrainer as _Host
else:
    _Host = object

STATE_FILE = "fastrl_state.json"
STATE_VERSION = 1
_FIELDS = ("version", "fastrl", "data", "dataset", "num_processes", "round", "num_drawn", "prefix")
_LISTS = ("num_images", "num_tiles")  # fields of a micro-batch that are lists of numbers, not tensors


def dataset_fingerprint(dataset: Any, prompt_ids: Sequence[str]) -> str:
    """Return a digest of the ids and prompts of a data set, in order. Images are not read."""
    digest = hashlib.sha256()
    digest.update("\n".join(prompt_ids).encode())
    if "prompt" in (dataset.column_names or []):
        for prompt in dataset.with_format(None).select_columns("prompt")["prompt"]:
            # An image inside a prompt shows its address in memory, which differs from run to run.
            digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(prompt)).encode())
    return digest.hexdigest()


def whole_checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, the last one last."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)
        if number and (path / STATE_FILE).is_file():
            found.append((int(number[1]), path))
    return [path for _, path in sorted(found)]


def last_whole_checkpoint(folder: str | Path) -> str:
    """Return the checkpoint that a run goes on from.

    Raises:
        StateError: there is none; names what is there instead.
    """
    whole = whole_checkpoints(folder)
    if not whole:
        there = sorted(path.name for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        raise StateError(
            f"{folder}: no checkpoint to resume from. It holds {', '.join(there) or 'none'}; a whole one has a "
            f"{STATE_FILE}, which is written last. Start anew (resume_from_checkpoint=None)."
        )
    return str(whole[-1])


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """Read FastRL's state of a checkpoint, strictly.

    Raises:
        StateError: not a whole checkpoint of a FastRL run, a damaged file, or another version; names the last
            whole checkpoint beside it.
    """
    path = Path(checkpoint) / STATE_FILE
    others = [other for other in whole_checkpoints(path.parent.parent) if other != path.parent]
    remedy = (
        f"Resume from {others[-1]}" if others else "There is no other checkpoint beside it: start a new run"
    )
    if not path.is_file():
        raise StateError(
            f"{checkpoint} holds no {STATE_FILE}: it was not saved by a FastRL run, or saving it was interrupted. "
            f"{remedy}."
        )
    state = read_json(path, version=STATE_VERSION, remedy=remedy)
    check_keys(state, dict.fromkeys(_FIELDS), "TRL adapter")
    return state


def write_state(checkpoint: str | Path, state: Mapping[str, Any]) -> None:
    """Write the state file, which makes a checkpoint whole."""
    write_json(Path(checkpoint) / STATE_FILE, state, version=STATE_VERSION)


def write_round(checkpoint: str | Path, rank: int, micro_batches: Sequence[MicroBatch | None]) -> None:
    """Write the micro-batches of a round that is under way: tensors, and a description as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    described: list[dict[str, Any] | None] = []
    for k, micro_batch in enumerate(micro_batches):
        if micro_batch is None:
            described.append(None)
            continue
        for name, value in micro_batch.items():
            tensor = torch.tensor(value) if name in _LISTS else value
            tensors[f"{k}.{name}"] = tensor.detach().cpu().contiguous()
        described.append(
            {
                "num_micro_batches": micro_batch.num_micro_batches,
                "num_steps": micro_batch.num_steps,
                "denominators": asdict(micro_batch.denominators),
                "num_rows": micro_batch.num_rows,
                "num_tokens": micro_batch.num_tokens,
                "groups": micro_batch.groups,
            }
        )
    path = _round_file(checkpoint, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"micro_batches": json.dumps(described)})


def read_round(checkpoint: str | Path, rank: int, device: torch.device) -> list[MicroBatch | None]:
    """Read the micro-batches of a round that was under way."""
    with safe_open(_round_file(checkpoint, rank), framework="pt") as file:
        described = json.loads(file.metadata()["micro_batches"])
        inputs: list[dict[str, Any]] = [{} for _ in described]
        for key in file.keys():  # noqa: SIM118 - not a mapping
            number, _, name = key.partition(".")
            value = file.get_tensor(key)
            inputs[int(number)][name] = value.tolist() if name in _LISTS else value.to(device)
    return [
        None
        if description is None
        else MicroBatch(
            fields, **{**description, "denominators": Denominators(**description["denominators"])}
        )
        for description, fields in zip(described, inputs, strict=True)
    ]


def _round_file(checkpoint: str | Path, rank: int) -> Path:
    return Path(checkpoint) / f"fastrl_round_{rank}.safetensors"


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """What a checkpoint needs of a moment between two optimizer steps; micro-batches only inside a round."""

    global_step: int
    method: dict[str, Any]
    micro_step: int
    micro_batches: list[MicroBatch | None]
    round_sizes: tuple[int, int]
    num_drawn: int
    prefix: dict[str, Any]


class CheckpointMixin(_Host):
    """Save and load FastRL's part of a checkpoint with the trainer's own."""

    fastrl: FastRL
    _schedule: Schedule
    _prompt_ids: list[str]
    _micro_batches: list[MicroBatch | None]
    _round_sizes: tuple[int, int]
    _reserve: Reserve
    _prefix: SharedPrefix
    _remembered: _Moment | None = None

    def _remember(self) -> None:
        """Keep the state at the start of an optimizer step: a checkpoint that is asked for inside it needs that."""
        if self._remembered is None or self._remembered.global_step != self.state.global_step:
            self._remembered = self._now()

    def _now(self) -> _Moment:
        return _Moment(
            global_step=self.state.global_step,
            method=self.fastrl.state_dict(),
            micro_step=self._step,
            micro_batches=self._micro_batches if self._step % self._schedule.micro_steps_per_round else [],
            round_sizes=self._round_sizes,
            num_drawn=self._reserve.num_drawn,
            prefix=self._prefix.state_dict(),
        )

    def _checkpoint_to_resume(self, given: str | bool | None) -> str | bool | None:
        """Return the checkpoint that `train` was asked to go on from, once it is known to be whole."""
        if given is True:
            return last_whole_checkpoint(self.args.output_dir)
        if given:
            read_state(str(given))
        return given

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE_FILE).unlink(missing_ok=True)  # a step that is saved again: not whole until it is
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._complete_checkpoint(folder)
        if self.args.should_save:  # older checkpoints go once this one is whole
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(folder.parent), limit, best, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._complete_checkpoint(Path(checkpoint_folder))
        super()._push_from_checkpoint(checkpoint_folder)

    def _complete_checkpoint(self, folder: Path) -> None:
        """Write our part of a checkpoint, the file that makes it whole last."""
        moment = self._now()
        if self._remembered is not None and self._remembered.global_step == self.state.global_step:
            moment = self._remembered  # the optimizer step under way will be done again
        is_inside_round = moment.micro_step % self._schedule.micro_steps_per_round != 0
        if is_inside_round:
            write_round(folder, self.accelerator.process_index, moment.micro_batches)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_state(
                folder,
                {
                    "fastrl": moment.method,
                    "data": self._data_order(),
                    "dataset": self._fingerprint,
                    "num_processes": self.accelerator.num_processes,
                    "round": list(moment.round_sizes) if is_inside_round else None,
                    "num_drawn": moment.num_drawn,
                    "prefix": moment.prefix,
                },
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = read_state(checkpoint)
        check_unchanged(state["data"], self._data_order())
        if state["dataset"] != self._fingerprint:
            raise StateError(
                f"train_dataset differs from the one that {checkpoint} was saved with (other prompts, ids or order): a "
                "resumed run would skip some prompts and repeat others. Give the same data set, or start a new run "
                "from these weights."
            )
        self.fastrl.load_state_dict(state["fastrl"])
        self._reserve.num_drawn = int(state["num_drawn"])
        self._prefix.load_state_dict(state["prefix"])
        # TRL counts micro-steps from 0 again. Rounds are counted by them, so go on where the run stood.
        self._step = self._schedule.micro_steps(self.state.global_step)
        if state["round"] is not None:
            self._load_round(checkpoint, state)
        self.accelerator.print(
            f"FastRL: resumed at step {self.state.global_step} (epoch {self.state.epoch:.2f}): "
            f"G_t = {self.fastrl.plan(self._prompt_ids).mean():g}, "
            f"{self.fastrl.step * self._schedule.prompts_per_round} prompts consumed"
            f"{', in the middle of a round' if state['round'] is not None else ''}."
        )

    @functools.cached_property
    def _fingerprint(self) -> str:
        return dataset_fingerprint(self.train_dataset, self._prompt_ids)

    def _data_order(self) -> dict[str, Any]:
        """What decides which prompts a step sees. The number of ranks does not."""
        schedule = self._schedule
        return {
            "seed": self.args.seed,
            "shuffle_dataset": bool(self.shuffle_dataset),
            "prompts_per_round": schedule.prompts_per_round,
            "rounds_per_epoch": schedule.rounds_per_epoch,
            "updates_per_round": schedule.micro_steps_per_round / schedule.accumulation,
        }

    def _load_round(self, checkpoint: str, state: dict[str, Any]) -> None:
        num_ranks = self.accelerator.num_processes
        if state["num_processes"] != num_ranks:
            raise StateError(
                f"{checkpoint} was saved by {state['num_processes']} processes inside a round of generation, whose "
                f"rows they shared; this run has {num_ranks}. Launch as many, or resume from a checkpoint between "
                f"rounds (every {self._schedule.micro_steps_per_round} micro-steps)."
            )
        if self.args.ignore_data_skip:
            raise StateError(
                f"{checkpoint} was saved inside a round of generation, and ignore_data_skip: true would start the data "
                "anew under it. Leave it false: no data is read to skip. Or resume from a checkpoint between rounds."
            )
        rows = read_round(checkpoint, self.accelerator.process_index, self.accelerator.device)
        steps = self._schedule.steps_per_window
        if len(rows) != self.args.steps_per_generation or any(m and m.num_steps != steps for m in rows):
            raise StateError(
                f"{checkpoint} was saved inside a round of {len(rows)} micro-steps; this run has "
                f"{self.args.steps_per_generation}, in windows of {steps}. Restore per_device_train_batch_size, "
                "steps_per_generation and gradient_accumulation_steps, or resume from a checkpoint between rounds."
            )
        self._round_sizes, self._micro_batches = tuple(state["round"]), rows
