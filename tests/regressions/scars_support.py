"""What the tests of this folder share: a trainer that shows what reaches the loss, and readers of the run folder."""

import json
from pathlib import Path

import torch
from trl import GRPOTrainer
from trl_support import Scripted

from fastrl.integrations.trl import FastRLMixin

LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "cispo")},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
TIMING = ("time", "runtime", "per_second")


class ShowsItsInputs(Scripted, GRPOTrainer):
    """A user's own trainer that keeps the inputs of every forward pass with a gradient."""

    def __init__(self, *args, **kwargs):
        self.shown = []
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        copied = {k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()}
        self.shown.append((self.state.global_step, copied))
        return super()._compute_loss(model, inputs)


class ShownFast(FastRLMixin, ShowsItsInputs):
    """The same under FastRL: what it shows are the micro-batches of the survivors."""


def rows_of(inputs):
    """(row number, prompt tokens, completion tokens) of each row that holds a loss token."""
    for i in range(len(inputs["prompt_ids"])):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
        completion = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()
        if completion:
            yield i, prompt, completion


def records(folder, from_step=0):
    """The trace of a run: a record per rollout."""
    return [r for r in _lines(Path(folder) / "fastrl" / "rollouts.jsonl") if r["step"] >= from_step]


def metrics(folder, after_step=0):
    """What was logged, without what the clock decides."""
    lines = [m for m in _lines(Path(folder) / "fastrl" / "metrics.jsonl") if m["step"] > after_step]
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMING)} for line in lines]


def _lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
