"""Regressions: what the tests of TRL's features found, each with what it was."""

import numpy as np
import pytest
from test_trl_tools import CallingFast, Counter, settings_for
from transformers import Qwen2ForSequenceClassification
from trl_compare import KEEP_ALL, completion_tables, run
from trl_support import ScriptedFast, ScriptedStock, text_dataset, text_model, text_tokenizer

from fastrl.config import FastRLConfig
from fastrl.trace import read_rollouts
from fastrl.types import StateError


def eval_table(folder, config, **settings):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, **settings}
    kwargs = {"eval_dataset": text_dataset(1)}
    run(ScriptedFast, folder, config, log_completions=True, trainer_kwargs=kwargs, **settings)
    return completion_tables(folder)[-1]


# Was: columns of the last round are put beside rows of the evaluation.
def test_a_table_after_an_evaluation_says_nothing_wrong(tmp_path):
    table = eval_table(tmp_path, KEEP_ALL)
    prompts = text_dataset()["prompt"]
    told = table[table["fastrl/group"].notna()]
    assert all(prompts[int(row["fastrl/group"])] == row["prompt"] for _, row in told.iterrows())


# Was: as above, where a round is smaller than the table.
def test_a_table_after_an_evaluation_of_a_smaller_round(tmp_path):
    settings = {"num_generations": 8, "per_device_train_batch_size": 16, "max_steps": 16}
    assert len(eval_table(tmp_path, FastRLConfig(tau=1.0), num_train_epochs=4, **settings)) > 0


HALF_ROUND = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}


# Was: micro-steps are counted on from the run before.
def test_training_twice_after_half_a_round(tmp_path):
    trainer, _ = run(ScriptedFast, tmp_path, KEEP_ALL, max_steps=3, **HALF_ROUND)
    trainer.train()
    assert trainer.state.global_step == 3


# Was: metrics start anew, but steps of the method and rollouts go on.
def test_training_twice_leaves_records_of_one_run(tmp_path):
    trainer, _ = run(ScriptedFast, tmp_path, FastRLConfig(budget="fixed", trace=True))
    trainer.train()
    steps = (tmp_path / "fastrl" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(read_rollouts(tmp_path / "fastrl")) == 2 * len(steps)


# Was: data starts at a first round, the trainer inside one; a KeyError a step later.
def test_a_resume_inside_a_round_that_skips_no_data_is_refused(tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **HALF_ROUND}
    run(ScriptedFast, tmp_path, KEEP_ALL, **settings)
    settings["ignore_data_skip"] = True
    with pytest.raises(StateError, match="ignore_data_skip: true would start the data anew"):
        run(ScriptedFast, tmp_path, KEEP_ALL, resume=str(tmp_path / "checkpoint-1"), **settings)
    trainer, _ = run(ScriptedFast, tmp_path, KEEP_ALL, resume=str(tmp_path / "checkpoint-2"), **settings)
    assert trainer.state.global_step == 4


class Terminated(ScriptedFast):
    """Gets transformers' request for a checkpoint (SIGTERM) in the second step, before its optimizer step."""

    was_asked = False

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 1 and not Terminated.was_asked:
            Terminated.was_asked = True
            managers = [
                getattr(callback, "jit_manager", None) for callback in self.callback_handler.callbacks
            ]
            next(manager for manager in managers if manager).is_checkpoint_requested = True
        return loss


# Was: the state is that after the round whose optimizer step was not saved.
@pytest.mark.parametrize("schedule", [{}, HALF_ROUND], ids=["rounds", "half_rounds"])
def test_a_checkpoint_on_request_before_the_optimizer_step(tmp_path, monkeypatch, schedule):
    monkeypatch.setattr(Terminated, "was_asked", False)
    settings = {"enable_jit_checkpoint": True, "max_steps": 4, **schedule}
    run(Terminated, tmp_path, KEEP_ALL, **settings)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-1"
    resumed, _ = run(ScriptedFast, tmp_path, KEEP_ALL, resume=str(checkpoint), **settings)
    assert resumed.state.global_step == 4
    assert resumed.fastrl.step == (2 if schedule else 4), "each round is counted once"


def by_keyword(prompts, log_extra, **_):
    log_extra(column="length", values=[len(prompt) for prompt in prompts])
    return [1 / 0 if prompt == "w1 w3 w3" else 1.0 for prompt in prompts]


def judge_is_down(prompts, **_):
    if len(prompts) < 5:
        raise RuntimeError("this function scores whole batches")
    raise ConnectionError("no answer")


class Broken(Qwen2ForSequenceClassification):
    def forward(self, *args, **kwargs):
        raise IndexError("index out of range in self")


RAISING = {
    "logs_by_keyword": (by_keyword, "prompt '1'"),
    "raises_otherwise_alone": (judge_is_down, "prompts 7, 0, 3, 4"),
    "reward_model": (Broken(text_model().config), "prompts 7, 0, 3, 4"),
}


# Was: called on one row, they raise something else, and the first row is blamed.
@pytest.mark.parametrize("kind", RAISING)
def test_a_reward_that_raises_blames_no_prompt_without_proof(tmp_path, kind):
    function, blamed = RAISING[kind]
    settings = {"gradient_accumulation_steps": 4, "reward_funcs": [function]}
    if kind == "reward_model":
        settings["trainer_kwargs"] = {"reward_processing_classes": [text_tokenizer()]}
    with pytest.raises((ZeroDivisionError, ConnectionError, IndexError)) as raised:
        run(ScriptedFast, tmp_path, KEEP_ALL, **settings)
    assert f"scoring {blamed}" in " ".join(raised.value.__notes__)


# Was: called on one row, it lacks its environments, and the first row is blamed.
def test_a_reward_that_raises_with_environments(tmp_path, monkeypatch):
    def reward(prompts, environments, **_):
        assert len(environments) == len(prompts)
        return [1 / 0 if "w3" in str(prompt) else float(i % 2) for i, prompt in enumerate(prompts)]

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = settings_for(trainer_kwargs={"environment_factory": Counter}, gradient_accumulation_steps=4)
    with pytest.raises(ZeroDivisionError) as raised:
        run(CallingFast, tmp_path, KEEP_ALL, **{**settings, "reward_funcs": [reward]})
    assert "scoring prompt '3'" in " ".join(raised.value.__notes__)


class Fewer(ScriptedFast):
    """A budget that asks for fewer rollouts than TRL's table has room for."""

    counts: tuple[int, int]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fastrl.plan = lambda prompt_ids: np.array(self.counts)


# Was: TRL's table holds both functions' rewards under one name.
@pytest.mark.parametrize("counts", [(2, 2), (2, 3)])
def test_two_reward_functions_of_one_name(tmp_path, monkeypatch, counts):
    monkeypatch.setattr(Fewer, "counts", counts, raising=False)
    rewards = [
        lambda completion_ids, k=k, **_: [float(len(ids) % k) for ids in completion_ids] for k in (2, 3)
    ]
    run(ScriptedStock, tmp_path, reward_funcs=rewards, log_completions=True)
    run(Fewer, tmp_path, FastRLConfig(budget="fixed"), reward_funcs=rewards, log_completions=True)


# Was: a number in a tensor is written as tensor(3).
def test_ids_of_a_formatted_data_set_are_its_numbers(tmp_path):
    dataset = text_dataset().add_column("id", list(range(8))).with_format("torch")
    run(ScriptedFast, tmp_path, FastRLConfig(budget="fixed", trace=True), dataset=dataset, max_steps=1)
    assert all(group.prompt_id.isdigit() for group in read_rollouts(tmp_path / "fastrl"))
