"""Unusual but legal settings of TRL: odd schedules, masks, tables, resumes inside a round."""

import json

import datasets
import pandas as pd
import pytest
import torch
from trl import GRPOTrainer
from trl_support import (
    Scripted,
    ScriptedFast,
    ScriptedStock,
    relative_error,
    saved_text_model,
    text_dataset,
    train,
    vision_dataset,
)

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer, FastRLMixin
from fastrl.trace import read_rollouts
from fastrl.types import StateError

KEEP_ALL = {"fastrl": FastRLConfig(pruner="none", budget="fixed")}


def errors(folder, stock=ScriptedStock, fast=ScriptedFast, **settings):
    """Relative errors of the keep-all gradients, step by step."""
    _, expected = train(stock, folder, **settings)
    _, found = train(fast, folder, trainer_kwargs=KEEP_ALL, **settings)
    assert len(found) == len(expected) > 0
    assert max(float(g.norm()) for g in expected) > 1e-4
    return [relative_error(a, b) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("per_generation", [1, 2])
def test_several_rounds_per_optimizer_step(tmp_path, loss, per_generation):
    settings = {"steps_per_generation": per_generation, "gradient_accumulation_steps": 4, "loss_type": loss}
    assert max(errors(tmp_path, per_device_train_batch_size=4, **settings)) < 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_incomplete_last_window_of_an_epoch(tmp_path, loss):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    settings |= {"max_steps": -1, "num_train_epochs": 2, "dataset": text_dataset(6), "loss_type": loss}
    assert max(errors(tmp_path, **settings)) < 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_misaligned_generation_sums_to_stock_trl(tmp_path, loss):
    """Rows are dealt to micro-steps differently, so only the sum at a fixed policy is comparable."""
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}
    settings |= {"learning_rate": 0.0, "loss_type": loss}
    _, expected = train(ScriptedStock, tmp_path, **settings)
    _, found = train(ScriptedFast, tmp_path, trainer_kwargs=KEEP_ALL, **settings)
    assert relative_error(sum(found), sum(expected)) < 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_padding_to_a_multiple(tmp_path, loss):
    assert max(errors(tmp_path, pad_to_multiple_of=8, gradient_accumulation_steps=2, loss_type=loss)) < 1e-5


class CutOff(Scripted):
    """Every third rollout ends without an end token."""

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        return [ids[:-1] if i % 3 == 0 and len(ids) > 1 else ids for i, ids in enumerate(completions)], logps


class CutOffStock(CutOff, GRPOTrainer):
    pass


class CutOffFast(CutOff, FastGRPOTrainer):
    pass


@pytest.mark.parametrize("loss", ["grpo", "dapo", "luspo"])
def test_masked_truncated_completions_keep_the_gradient(tmp_path, loss):
    settings = {"mask_truncated_completions": True, "gradient_accumulation_steps": 2, "loss_type": loss}
    assert max(errors(tmp_path, stock=CutOffStock, fast=CutOffFast, **settings)) < 1e-5


def test_a_rollout_without_loss_tokens_stands_for_nobody(tmp_path):
    """It would be kept as the first of its class, and its valid siblings pruned in its favour."""

    class FirstIsCutOff(ScriptedFast):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            wrong = [[5, 6, 7, 8], [5, 6, 7, 8, 1]]
            return [wrong[i % 4] if i % 4 < 2 else [20 + i % 4, 9, 1] for i in range(len(prompt_ids))], None

    def reward(completion_ids, **_):
        return [0.0 if i % 4 < 2 else 1.0 for i in range(len(completion_ids))]

    trainer, _ = train(
        FirstIsCutOff, tmp_path, reward_funcs=[reward], mask_truncated_completions=True, max_steps=1,
        trainer_kwargs={"fastrl": FastRLConfig(budget="fixed")},
    )  # fmt: skip
    (micro_batch,) = (m for m in trainer._micro_batches if m is not None)
    assert (micro_batch["completion_mask"].sum(1) > 0).all()
    assert sorted(micro_batch["advantages"].sign().tolist()) == [-1.0, -1.0, 1.0, 1.0]


def test_rewards_normalised_one_by_one_keep_their_signal(tmp_path):
    """Totals can all be equal where the advantages are not: the advantages decide zero variance then."""

    def first(completion_ids, **_):
        return [float(i % 4 == 0) for i in range(len(completion_ids))]

    def second(completion_ids, **_):
        return [1.0 - value for value in first(completion_ids)]

    settings = {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": [0.7, 0.3],
        "max_steps": 1,
    }
    settings["reward_funcs"] = [first, second]
    drop = FastRLConfig(pruner="none", budget="fixed", zero_variance="drop", denominator="full")
    _, expected = train(ScriptedStock, tmp_path, **settings)
    _, found = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": drop}, **settings)
    assert float(expected[0].norm()) > 1e-3
    assert relative_error(found[0], expected[0]) < 1e-5


def test_live_denominator_without_any_live_group_averages_over_all_rows(tmp_path):
    """Only the KL is left then; divided by one it would be as many times too large as there are tokens."""
    norms = {}
    for denominator in ("full", "live"):
        calls = []

        def reward(completion_ids, calls=calls, **_):
            calls.append(1)
            return [float(sum(ids) % 2) if len(calls) == 1 else 1.0 for ids in completion_ids]

        config = FastRLConfig(
            pruner="advantage_only", budget="fixed", zero_variance="keep_all", denominator=denominator
        )
        _, gradients = train(
            ScriptedFast, tmp_path, model=saved_text_model(tmp_path / "m"), reward_funcs=[reward], beta=0.04,
            learning_rate=2.0, loss_type="dapo", trainer_kwargs={"fastrl": config},
        )  # fmt: skip
        norms[denominator] = float(gradients[1].norm())
    assert norms["full"] > 0
    assert norms["live"] < 3 * norms["full"]


def test_the_identity_never_stops_for_want_of_signal(tmp_path):
    config = FastRLConfig(pruner="none", budget="fixed", max_empty_steps=1)
    trainer, _ = train(
        ScriptedFast, tmp_path, max_steps=40, trainer_kwargs={"fastrl": config},
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
    )  # fmt: skip
    assert trainer.state.global_step == 40


# What a user sees


def test_the_completions_table_holds_this_rounds_rows_only(tmp_path):
    settings = {
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "max_steps": 16,
        "num_train_epochs": 4,
    }
    trainer, _ = train(
        ScriptedFast,
        tmp_path,
        log_completions=True,
        trainer_kwargs={"fastrl": FastRLConfig(tau=1.0)},
        **settings,
    )
    logged = [e for e in trainer.state.log_history if "fastrl/rollouts" in e]
    assert logged[-1]["fastrl/rollouts"] < 16, "ARS must have lowered G_t"
    table = pd.read_parquet(max((tmp_path / "completions").glob("*.parquet")))
    assert len(table) == logged[-1]["fastrl/rollouts"]
    assert table["prompt"].nunique() == 2


def test_each_rollout_has_its_own_copy_of_the_row(tmp_path):
    seen = []

    def reward(completion_ids, answers, **_):
        for row in answers:
            row.append("x")
        seen.append([len(row) for row in answers])
        return [float(i % 2) for i in range(len(completion_ids))]

    dataset = text_dataset().add_column("answers", [["a"] for _ in range(8)])
    train(
        ScriptedFast, tmp_path, dataset=dataset, reward_funcs=[reward], max_steps=1, trainer_kwargs=KEEP_ALL
    )
    assert seen[0] == [2] * 8


def test_an_image_is_decoded_once_per_round(tmp_path, monkeypatch):
    from fastrl import testbed

    decoded = []
    original = datasets.Image.decode_example
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda self, *a, **k: decoded.append(1) or original(self, *a, **k)
    )
    model, processor = testbed.load()
    dataset = vision_dataset(image_counts=(1,))
    list(dataset)
    calls_of_one_reading = len(decoded)
    decoded.clear()
    settings = {"gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.0}
    train(
        ScriptedFast, tmp_path, model=model, dataset=dataset, processing_class=processor,
        trainer_kwargs=KEEP_ALL, **settings,
    )  # fmt: skip
    assert len(decoded) == calls_of_one_reading > 0, "one round of 8 prompts, used for 8 micro-steps"


def test_a_trainer_with_a_constructor_of_its_own_is_accepted(tmp_path):
    class MyTrainer(GRPOTrainer):
        def __init__(self, model, reward_funcs, *, bonus=0.0, **kwargs):
            super().__init__(model, reward_funcs, **kwargs)
            self.bonus = bonus

    class Mine(FastRLMixin, MyTrainer):
        pass

    trainer, _ = train(Mine, tmp_path, trainer_kwargs={"bonus": 2.0, **KEEP_ALL}, max_steps=1)
    assert trainer.bonus == 2.0


def test_counts_are_sums_over_the_optimizer_step(tmp_path):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    settings |= {"max_steps": -1, "num_train_epochs": 2, "dataset": text_dataset(6)}
    trainer, _ = train(ScriptedFast, tmp_path, trainer_kwargs=KEEP_ALL, **settings)
    sampled = [e["fastrl/rollouts"] for e in trainer.state.log_history if "fastrl/rollouts" in e]
    assert sampled == [16, 8, 16, 8], "two rounds of 8 rollouts per step, one in the last of an epoch"
    assert trainer._schedule.total_rounds == trainer.fastrl.step == 6


# Resume and records


class Recorded(ScriptedFast):
    history: list

    def _report_round(self, groups, selections):
        super()._report_round(groups, selections)
        self.history.append((self.fastrl.step, [group.prompt_id for group in groups]))


@pytest.mark.parametrize("k", [3, 4, 9])
def test_a_resume_inside_a_round_goes_on_with_its_rows(tmp_path, k):
    """Two optimizer steps per round: after an odd one the other half of its rows is still to be trained on."""
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    settings |= {"max_steps": 16, "num_train_epochs": 4, "save_strategy": "steps", "save_steps": 1}
    config = {"fastrl": FastRLConfig(tau=1.0, trace=True)}
    Recorded.history = []
    whole, _ = train(Recorded, tmp_path, trainer_kwargs=config, **settings)
    before, Recorded.history = Recorded.history, []
    resumed, _ = train(
        Recorded, tmp_path, resume=str(tmp_path / f"checkpoint-{k}"), trainer_kwargs=config, **settings
    )
    assert Recorded.history == before[-(-k // 2) :]
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (
        resumed.fastrl.budget.steps_seen
        == whole.fastrl.budget.steps_seen
        == whole.fastrl.budget.total_steps
        == 8
    )
    assert len(read_rollouts(tmp_path / "fastrl")) == 16


def test_there_is_always_a_checkpoint_with_a_state(tmp_path, monkeypatch):
    """A kill between the two saves, with older checkpoints deleted, must leave one that can be resumed."""

    def killed(self, model, trial):
        if self.state.global_step == 3:
            raise KeyboardInterrupt
        original(self, model, trial)

    original = GRPOTrainer._save_checkpoint
    monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", killed)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    with pytest.raises(KeyboardInterrupt):
        train(ScriptedFast, tmp_path, trainer_kwargs=KEEP_ALL, **settings)
    complete = [p for p in tmp_path.glob("checkpoint-*") if (p / "trainer_state.json").is_file()]
    assert complete
    assert all((path / STATE_FILE).is_file() for path in complete)


def test_a_damaged_state_says_so(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(ScriptedFast, tmp_path, trainer_kwargs=KEEP_ALL, **settings)
    path = tmp_path / "checkpoint-1" / STATE_FILE
    path.write_text(path.read_text(encoding="utf-8")[:20], encoding="utf-8")
    with pytest.raises(StateError, match="is damaged"):
        train(ScriptedFast, tmp_path, resume=str(path.parent), trainer_kwargs=KEEP_ALL, **settings)
    assert "version" in json.loads((tmp_path / "checkpoint-2" / STATE_FILE).read_text(encoding="utf-8"))


def test_a_second_run_in_the_same_folder_starts_its_records_anew(tmp_path):
    config = {"fastrl": FastRLConfig(budget="fixed", trace=True)}
    for _ in range(2):
        train(ScriptedFast, tmp_path, trainer_kwargs=config, max_steps=2)
    assert len(read_rollouts(tmp_path / "fastrl")) == 4


def test_pixels_stay_with_their_own_prompt(tmp_path):
    """Each row's pixels are those of the very prompt whose text it carries."""
    from fastrl import testbed

    model, processor = testbed.load()
    dataset = vision_dataset(image_counts=(1,))
    questions = [
        f"{900 + i} Find the angle x ." for i in range(8)
    ]  # numbers outside the vocabulary would be alike
    words = ["angle", "length", "perimeter", "area", "x", ".", "Find", "the"]
    questions = [f"Find the {word} x ." for word in words]
    dataset = dataset.remove_columns("prompt").add_column(
        "prompt", [[{"role": "user", "content": question}] for question in questions]
    )
    config = FastRLConfig(budget="fixed", tau=0.9)
    trainer, _ = train(
        ScriptedFast, tmp_path, model=model, dataset=dataset, processing_class=processor, max_steps=1,
        per_device_train_batch_size=8, gradient_accumulation_steps=4, learning_rate=0.0,
        trainer_kwargs={"fastrl": config},
    )  # fmt: skip
    expected = {}
    for row, word in zip(dataset, words, strict=True):
        pixels = processor.image_processor(row["images"], return_tensors="pt")["pixel_values"]
        expected[processor.tokenizer.convert_tokens_to_ids(word)] = pixels[0]
    checked = 0
    for micro_batch in (m for m in trainer._micro_batches if m is not None):
        for ids, pixels in zip(micro_batch["prompt_ids"], micro_batch["pixel_values"], strict=True):
            word = ids[-4]  # "Find the <word> x . <|assistant|>"
            assert torch.equal(pixels, expected[int(word)])
            checked += 1
    assert checked > 4
