"""k + (N - k) steps with a resume between equal N steps, bit for bit (promise R3)."""

import json

import pytest
import torch
from trl_support import text_dataset, train

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer
from fastrl.trace import read_rollouts
from fastrl.types import StateError

STEPS = 16  # four epochs of four rounds of two prompts
SETTINGS = {
    "max_steps": STEPS,
    "num_train_epochs": 4,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "learning_rate": 0.02,
    "optim": "adamw_torch",
    "weight_decay": 0.01,
    "save_strategy": "steps",
    "save_steps": 1,
}
CONFIG = FastRLConfig(tau=0.9)


class Recorded(FastGRPOTrainer):
    """Remembers what each round was and what became of it. Rollouts are really sampled."""

    history: list

    def _report_round(self, groups, selections):
        super()._report_round(groups, selections)
        for group, selection in zip(groups, selections, strict=True):
            tokens = [list(map(int, row)) for row in group.tokens_G]
            self.history.append(
                (group.prompt_id, tokens, group.rewards_G.tolist(), selection.keep_G.tolist())
            )


def run(folder, resume=None, config=CONFIG):
    history: list = []
    Recorded.history = history
    trainer, _ = train(Recorded, folder, resume=resume, trainer_kwargs={"fastrl": config}, **SETTINGS)
    return trainer, history


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer, history = run(folder)
    return folder, trainer, history


def test_the_uninterrupted_run_is_worth_comparing(uninterrupted):
    _, trainer, history = uninterrupted
    sizes = [len(tokens) for _, tokens, _, _ in history]
    assert len(history) == 2 * STEPS
    assert min(sizes) < max(sizes), "ARS must have changed G_t"
    assert not all(all(keep) for _, _, _, keep in history), "something must have been pruned"
    epochs = [[prompt_id for prompt_id, *_ in history[8 * e : 8 * e + 8]] for e in range(4)]
    assert all(sorted(epoch) == sorted(str(i) for i in range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "every epoch has its own order"
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize(
    "k", [1, 4, 6, 12, 13], ids=["start", "epoch boundary", "epoch 1", "smaller G_t", "last epoch"]
)
def test_resumed_run_equals_the_uninterrupted_one(uninterrupted, tmp_path, k):
    folder, whole, history = uninterrupted
    resumed, tail = run(tmp_path, resume=str(folder / f"checkpoint-{k}"))
    assert tail == history[2 * k :]
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.fastrl.state_dict() == whole.fastrl.state_dict()


def test_changed_settings_are_refused_by_name(uninterrupted, tmp_path):
    folder, _, _ = uninterrupted
    with pytest.raises(StateError, match=r"tau \(saved 0.9, now 0.5\)"):
        run(tmp_path, resume=str(folder / "checkpoint-4"), config=FastRLConfig(tau=0.5))


def test_checkpoint_without_fastrl_state_is_refused(uninterrupted, tmp_path):
    folder, _, _ = uninterrupted
    state = folder / "checkpoint-2" / STATE_FILE
    saved = state.read_text(encoding="utf-8")
    state.unlink()
    with pytest.raises(StateError, match="was not saved by a FastRL run"):
        run(tmp_path, resume=str(folder / "checkpoint-2"))
    state.write_text(saved, encoding="utf-8")


def test_state_file_is_plain_json_and_whole(uninterrupted):
    folder, _, _ = uninterrupted
    files = sorted(path.name for path in (folder / "checkpoint-3").glob("fastrl*"))
    assert files == [STATE_FILE], "no temporary file is left behind"
    state = json.loads((folder / "checkpoint-3" / STATE_FILE).read_text(encoding="utf-8"))
    assert state["fastrl"]["step"] == 3
    assert state["round"] is None, "no round is under way"


def test_duplicate_ids_are_refused(tmp_path):
    dataset = text_dataset().add_column("id", ["a"] * 8)
    with pytest.raises(ValueError, match="row 1: id 'a' is missing or occurs twice"):
        train(FastGRPOTrainer, tmp_path, dataset=dataset)


def test_records_of_repeated_steps_are_not_written_twice(tmp_path):
    config = FastRLConfig(tau=0.9, trace=True)
    run(tmp_path, config=config)
    before = (tmp_path / "fastrl" / "rollouts.jsonl").read_text(encoding="utf-8")
    run(tmp_path, resume=str(tmp_path / "checkpoint-6"), config=config)
    assert (tmp_path / "fastrl" / "rollouts.jsonl").read_text(encoding="utf-8") == before
    assert len(read_rollouts(tmp_path / "fastrl")) == 2 * STEPS


def test_inside_a_round_the_accumulation_may_not_change(tmp_path):
    """The rows of the round are saved as micro-batches: other micro-batches would be other rows."""
    half = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    config = {"fastrl": FastRLConfig(pruner="none", budget="fixed")}
    train(FastGRPOTrainer, tmp_path, trainer_kwargs=config, **common, **half)
    other = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    with pytest.raises(StateError, match="inside a round of 2 micro-steps; this run has 4, in windows of 2"):
        train(
            FastGRPOTrainer, tmp_path, resume=str(tmp_path / "checkpoint-1"), trainer_kwargs=config, **common,
            **other,
        )  # fmt: skip
