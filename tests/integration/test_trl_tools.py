"""Tools, environments and custom rollouts: what a model is told by others is never trained on."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer
from trl_compare import (
    CALL,
    END_OF_CALL,
    KEEP_ALL,
    TOOL_CALL,
    chat_model,
    chat_tokenizer,
    compare,
    logged,
    run,
    train_as_published,
)
from trl_support import Scripted, ScriptedFast, length_reward, scripted_ids

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer
from fastrl.trace import read_rollouts

ROW_BY_ROW = True

CALLING = chat_tokenizer().convert_tokens_to_ids([CALL, TOOL_CALL, END_OF_CALL, "<eos>"])
TOLD = chat_tokenizer().convert_tokens_to_ids("4")
NUM_CALLERS = 2  # of the 4 rollouts of a group


@pytest.fixture(autouse=True)
def _silence(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


class Calling(Scripted):
    """The second half of each group calls a tool first; what follows its answer is scripted as usual."""

    def _generate_single_turn(self, prompt_ids, images, fields, num_generations, *args, **kwargs):
        completions, logps = super()._generate_single_turn(prompt_ids, images, fields, num_generations)
        if num_generations > 1:
            size = num_generations
            completions = [
                completions[i][:2] + CALLING if i % size >= size - NUM_CALLERS else completions[i]
                for i in range(len(completions))
            ]
        return completions, logps


class CallingStock(Calling, GRPOTrainer):
    pass


class CallingFast(Calling, FastGRPOTrainer):
    pass


def double(n: int) -> int:
    """
    Double a number.

    Args:
        n: The number.
    """
    return 2 * n


async def double_later(n: int) -> int:
    """
    Double a number.

    Args:
        n: The number.
    """
    return 2 * n


double_later.__name__ = "double"


def failing(n: int) -> int:
    """
    Fail.

    Args:
        n: The number.
    """
    raise ValueError(f"no {n}")


failing.__name__ = "double"


def chat_dataset(num_prompts: int = 8, **columns) -> Dataset:
    prompts = [[{"role": "user", "content": f"start w{i}"}] for i in range(num_prompts)]
    return Dataset.from_dict({"prompt": prompts, **columns})


def answer_reward(completions, completion_ids, **_):
    """Rewards a tool's answer that the model has seen, and makes advantages differ otherwise."""
    answers = [sum(message["role"] == "tool" for message in messages) for messages in completions]
    return [0.5 * n + float(sum(ids) % 3) for n, ids in zip(answers, completion_ids, strict=True)]


CHAT = {
    "model": chat_model,
    "reward_funcs": [answer_reward],
    "max_completion_length": 24,
    "gradient_accumulation_steps": 2,
}
PAIR = {"stock": CallingStock, "fast": CallingFast}


def settings_for(**extra):
    return {**CHAT, "processing_class": chat_tokenizer(), "dataset": chat_dataset(), **extra}


@pytest.mark.parametrize("tool", [double, double_later, failing], ids=["sync", "async", "failing"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo"])
def test_tools_give_the_gradient_of_stock_trl(tmp_path, tool, loss):
    settings = settings_for(loss_type=loss, trainer_kwargs={"tools": [tool]})
    if loss == "bnpo":  # TRL's value depends on which rows share a micro-batch
        settings["gradient_accumulation_steps"] = 1
    stock, fast, _ = compare(tmp_path, **PAIR, **settings)
    for key in ("tools/call_frequency", "tools/failure_frequency"):
        assert logged(fast, key) == logged(stock, key)
    assert logged(fast, "tools/call_frequency")[0] == NUM_CALLERS / 4
    assert logged(fast, "tools/failure_frequency")[0] == float(tool is failing)


def test_answers_of_tools_are_not_trained_on(tmp_path):
    """The published run trains on what the model wrote: as many loss tokens as rows without the answers."""
    seen = []

    def remember(completion_ids, **_):
        seen.append([list(ids) for ids in completion_ids])
        return [float(i % 4) for i in range(len(completion_ids))]

    settings = settings_for(trainer_kwargs={"tools": [double]}, max_steps=1)
    settings["reward_funcs"] = [remember]
    trainer, _ = run(CallingFast, tmp_path, KEEP_ALL, **settings)
    (completions,) = seen
    told = [ids.index(TOLD) for ids in completions if TOLD in ids]
    assert len(told) == len(completions) * NUM_CALLERS // 4
    # "<tool> 4 <assistant>" comes from the template and the tool.
    written = sum(map(len, completions)) - 3 * len(told)
    assert logged(trainer, "fastrl/trained/tokens") == [written]
    train_as_published(tmp_path, fast=CallingFast, **settings_for(trainer_kwargs={"tools": [double]}))


def test_a_limit_of_tool_calls_reaches_trl(tmp_path):
    settings = settings_for(trainer_kwargs={"tools": [double]}, max_tool_calling_iterations=0)
    _, fast, _ = compare(tmp_path, **PAIR, **settings)
    assert logged(fast, "tools/call_frequency")[0] == 0.0


# Environments


class Counter:
    """Counts the calls of its tool; every rollout has one of its own."""

    def reset(self, **row) -> str | None:
        self.row, self.calls = row, 0
        return " w5"

    def double(self, n: int) -> int:
        """
        Double a number.

        Args:
            n: The number.
        """
        self.calls += 1
        return 2 * n


class Scoring(Counter):
    def get_reward(self) -> float:
        return 1.0 + self.calls


class ScoringLater(Counter):
    async def get_reward(self) -> float:
        return 1.0 + self.calls


def calls_reward(environments, completions, completion_ids, **_):
    answers = [sum(message["role"] == "tool" for message in messages) for messages in completions]
    assert [environment.calls for environment in environments] == answers, "each rollout has its own"
    return [e.calls + float(sum(ids) % 3) for e, ids in zip(environments, completion_ids, strict=True)]


ENVIRONMENTS = {
    "one": ({"environment_factory": Counter}, {}),
    "own_reward": ({"environment_factory": Scoring}, {}),
    "own_async_reward": ({"environment_factory": ScoringLater}, {}),
    "several": (
        {"environment_factory": {"a": Counter, "b": Scoring}},
        {"environment": ["a", "b"] * 4},
    ),
    "routes_alone": ({"environment_factory": {"a": Counter, "b": Scoring}}, None),
    "with_a_tool": ({"environment_factory": Scoring, "tools": [failing]}, {}),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_environments_give_the_gradient_of_stock_trl(tmp_path, kind):
    kwargs, columns = ENVIRONMENTS[kind]
    routes = Dataset.from_dict({"environment": ["a", "b"] * 4})  # prompts come from the environments
    dataset = routes if columns is None else chat_dataset(**columns)
    settings = settings_for(trainer_kwargs=kwargs, dataset=dataset)
    settings["reward_funcs"] = [calls_reward]
    stock, fast, _ = compare(tmp_path, **PAIR, **settings)
    assert logged(fast, "reward") == pytest.approx(logged(stock, "reward"))
    train_as_published(tmp_path, fast=CallingFast, **settings)


def test_an_environment_sees_the_row_but_not_our_column(tmp_path):
    seen = []

    class Watching(Scoring):
        def reset(self, **row):
            seen.append(sorted(row))
            return super().reset(**row)

    kwargs = {"environment_factory": Watching}
    dataset = chat_dataset(level=[1] * 8)
    run(CallingFast, tmp_path, KEEP_ALL, **settings_for(trainer_kwargs=kwargs, dataset=dataset, max_steps=1))
    assert seen
    assert all(row == ["level", "prompt"] for row in seen)


def test_an_environment_that_owns_prompts_and_reward_needs_no_data_set_and_no_reward_function(tmp_path):
    class Owning(Scoring):
        count = 0

        def reset(self, **row) -> str:
            super().reset(**row)
            Owning.count += 1
            return f"start w{Owning.count % 3}"

    class NoData(CallingFast):
        def __init__(self, *args, train_dataset, reward_funcs, **kwargs):
            super().__init__(*args, **kwargs)

    settings = settings_for(trainer_kwargs={"environment_factory": Owning})
    trainer = train_as_published(tmp_path, fast=NoData, **settings)
    assert trainer.state.global_step == 2


# Custom rollouts


def scripted_rollouts(prompts, trainer):
    """Three words from outside in the middle of each completion, and a field for the reward function."""
    tokenizer = trainer.processing_class
    prompt_ids = tokenizer(text=prompts)["input_ids"]
    completions, masks, seen = [], [], {}
    for ids in prompt_ids:
        occurrence = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
        own = scripted_ids(ids, occurrence, trainer.state.global_step, None, range(2, 30))
        completions.append([own[0], 31, 32, 33, *own[1:]])
        masks.append([1, 0, 0, 0, *[1] * (len(own) - 1)])
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": masks,
        "outcome": [float(sum(ids) % 3) for ids in completions],
        "same_for_all": 2.0,
    }


def outcome_reward(completion_ids, outcome, same_for_all, **_):
    assert len(outcome) == len(completion_ids) == len(same_for_all)
    return [a * b for a, b in zip(outcome, same_for_all, strict=True)]


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_rollout_func_gives_the_gradient_of_stock_trl(tmp_path, loss):
    settings = {
        "trainer_kwargs": {"rollout_func": scripted_rollouts},
        "reward_funcs": [outcome_reward, length_reward],
        "gradient_accumulation_steps": 2,
        "loss_type": loss,
        "max_completion_length": 16,
    }
    _, fast, _ = compare(tmp_path, **settings)
    # TRL's lengths leave out what the mask leaves out.
    assert logged(fast, "fastrl/trained/tokens")[0] == 16 * logged(fast, "completions/mean_length")[0]
    train_as_published(tmp_path, **settings)


def scored_rollouts(prompts, trainer):
    output = scripted_rollouts(prompts, trainer)
    output["logprobs"] = [[-0.1 * (i % 5)] * len(ids) for i, ids in enumerate(output["completion_ids"])]
    return output


def test_log_probs_of_a_rollout_func_reach_the_off_policy_mask(tmp_path):
    settings = {
        "reward_funcs": [outcome_reward],
        "gradient_accumulation_steps": 2,
        "off_policy_mask_threshold": 3.5,
        "max_completion_length": 16,
        "trainer_kwargs": {"rollout_func": scored_rollouts},
    }
    _, _, masked = compare(tmp_path, **settings)
    _, unmasked = run(ScriptedFast, tmp_path, KEEP_ALL, **{**settings, "off_policy_mask_threshold": None})
    assert not torch.allclose(masked[0], unmasked[0], atol=1e-4)


class Ragged:
    """Rollouts per prompt that differ, as a budget of another kind would plan them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fastrl.plan = lambda prompt_ids: np.array([2 + int(i) % 3 for i in prompt_ids])


class RaggedCalling(Ragged, CallingFast):
    pass


class RaggedScripted(Ragged, ScriptedFast):
    pass


@pytest.mark.parametrize("kind", ["environment", "rollout_func"])
def test_groups_of_different_sizes(tmp_path, kind):
    """A tool, an environment and a custom rollout belong to one rollout, however many its prompt has."""
    config = FastRLConfig(budget="fixed", trace=True)
    if kind == "environment":
        settings = settings_for(trainer_kwargs={"environment_factory": Counter})
        settings["reward_funcs"] = [calls_reward]
        _, gradients = run(RaggedCalling, tmp_path, config, **settings)
    else:
        settings = {"trainer_kwargs": {"rollout_func": scripted_rollouts}, "max_completion_length": 16}
        settings["gradient_accumulation_steps"] = 2
        _, gradients = run(RaggedScripted, tmp_path, config, reward_funcs=[outcome_reward], **settings)
    groups = read_rollouts(tmp_path / "fastrl")
    assert {group.num_rollouts for group in groups} == {2, 3, 4}
    assert all(group.num_rollouts == 2 + int(group.prompt_id) % 3 for group in groups)
    assert all(float(gradient.norm()) > 1e-4 for gradient in gradients)


@pytest.mark.parametrize("kind", ["tools", "rollout_func"])
def test_a_resume_inside_a_round_goes_on_with_what_was_said_by_others(tmp_path, kind):
    """Masks of tools and log-probs of a custom sampler are in the checkpoint of an unfinished round."""
    settings = {"steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    if kind == "tools":
        settings = settings_for(trainer_kwargs={"tools": [double]}, **settings)
        settings["gradient_accumulation_steps"] = 1
    else:
        settings |= {"trainer_kwargs": {"rollout_func": scored_rollouts}, "off_policy_mask_threshold": 3.5}
        settings |= {"max_completion_length": 16, "reward_funcs": [outcome_reward]}
    config = FastRLConfig(budget="fixed")
    _, whole = run(CallingFast, tmp_path, config, **settings)
    _, tail = run(CallingFast, tmp_path, config, resume=str(tmp_path / "checkpoint-1"), **settings)
    assert float(whole[1].norm()) > 1e-4
    assert len(tail) == 3
    assert all(torch.equal(a, b) for a, b in zip(tail, whole[1:], strict=True))


def test_answers_of_tools_do_not_make_rollouts_alike(tmp_path):
    """Similarity is of what the model wrote: the records leave out what the tools answered."""
    config = FastRLConfig(budget="fixed", trace=True)
    trainer, _ = run(CallingFast, tmp_path, config, **settings_for(trainer_kwargs={"tools": [double]}))
    written = [tokens for group in read_rollouts(tmp_path / "fastrl") for tokens in group.tokens_G]
    batches = [m for m in trainer._micro_batches if m is not None]
    assert any((m["tool_mask"] == 0).any() for m in batches), "a tool must have answered"
    for micro_batch in batches:
        for ids, mask in zip(
            micro_batch["completion_ids"],
            micro_batch["completion_mask"] * micro_batch["tool_mask"],
            strict=True,
        ):
            if mask.any():
                assert ids[mask.bool()].tolist() in written
