"""Rewards of every kind, and what a run tells its user: metrics, tables, callbacks, evaluations, checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, Qwen2ForSequenceClassification, TrainerCallback
from transformers import trainer as transformers_trainer
from trl.trainer import grpo_trainer
from trl_compare import (
    KEEP_ALL,
    chat_model,
    chat_tokenizer,
    compare,
    completion_tables,
    logged,
    run,
    train_as_published,
)
from trl_support import (
    ScriptedFast,
    ScriptedStock,
    grpo_args,
    length_reward,
    parity_reward,
    relative_error,
    text_dataset,
    text_model,
    text_tokenizer,
)

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer

# Rewards


ROW_BY_ROW = True


def reward_tokenizer():
    """Another vocabulary than the policy's: the reward model must read text, not ids."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["one", "more"])
    return tokenizer


def reward_model(folder) -> str:
    torch.manual_seed(5)
    config = text_model().config
    config.num_labels, config.vocab_size = 1, len(reward_tokenizer())
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    reward_tokenizer().save_pretrained(folder)
    return str(folder)


def chat_dataset():
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"start w{i}"}] for i in range(8)]})


@pytest.mark.parametrize("prompts", ["plain", "chat"])
@pytest.mark.parametrize("given", ["path", "model"])
def test_reward_models_give_the_gradient_of_stock_trl(tmp_path, given, prompts):
    path = reward_model(tmp_path / "judge")
    settings = {"gradient_accumulation_steps": 2, "reward_funcs": [path, length_reward]}
    if given == "model":
        judge = AutoModelForSequenceClassification.from_pretrained(path)
        settings["reward_funcs"] = [judge, length_reward]
        settings["trainer_kwargs"] = {"reward_processing_classes": [reward_tokenizer(), None]}
    if prompts == "chat":
        settings |= {"model": chat_model, "processing_class": chat_tokenizer(), "dataset": chat_dataset()}
        settings["reward_funcs"] = settings["reward_funcs"][:1]
        if given == "model":
            settings["trainer_kwargs"] = {"reward_processing_classes": reward_tokenizer()}
    stock, fast, _ = compare(tmp_path, **settings)
    assert logged(fast, "rewards/judge/mean") == pytest.approx(logged(stock, "rewards/judge/mean"), rel=1e-5)
    assert logged(fast, "rewards/judge/std")[0] > 0


async def async_parity(prompts, completion_ids, **_):
    return parity_reward(prompts=prompts, completion_ids=completion_ids)


async def async_length(prompts, completion_ids, **_):
    return length_reward(prompts=prompts, completion_ids=completion_ids)


def sparse(completion_ids, **_):
    """Scores every other rollout: the others have the other function's reward alone."""
    return [float(len(ids)) if i % 2 else None for i, ids in enumerate(completion_ids)]


REWARDS = {
    "async": [async_parity, async_length],
    "async_and_sync": [parity_reward, async_length],
    "sparse": [sparse, length_reward],
    "one": [parity_reward],
}


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_rewards_of_every_kind_give_the_gradient_of_stock_trl(tmp_path, kind, loss):
    settings = {"reward_funcs": REWARDS[kind], "gradient_accumulation_steps": 2, "loss_type": loss}
    stock, fast, _ = compare(tmp_path, **settings)
    names = [f"rewards/{function.__name__}/{kind}" for function in REWARDS[kind] for kind in ("mean", "std")]
    for key in ("reward", "reward_std", "frac_reward_zero_std", *names):
        assert logged(fast, key) == pytest.approx(logged(stock, key), rel=1e-5)
    train_as_published(tmp_path, **settings)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_rollouts_that_nobody_could_score_leave_the_others_as_in_stock_trl(tmp_path, loss):
    settings = {"reward_funcs": [sparse], "gradient_accumulation_steps": 2, "loss_type": loss}
    compare(tmp_path, **settings)


def talkative(completion_ids, trainer_state, log_extra, log_metric, **_):
    """What a reward function may tell: a column, a metric, and something that depends on the step."""
    lengths = [len(ids) for ids in completion_ids]
    log_extra("length", lengths)
    log_metric("longest", float(max(lengths)))
    return [trainer_state.global_step + float(n % 3) for n in lengths]


def test_columns_and_metrics_of_a_reward_function(tmp_path):
    settings = {"reward_funcs": [talkative, parity_reward], "log_completions": True, "max_steps": 3}
    stock, _ = run(ScriptedStock, tmp_path / "stock", **settings)
    fast, _ = run(ScriptedFast, tmp_path / "fast", KEEP_ALL, **settings)
    assert logged(fast, "longest") == logged(stock, "longest")
    assert len(set(logged(fast, "rewards/talkative/mean"))) > 1, "the step reaches the function"
    for ours, trls in zip(
        completion_tables(tmp_path / "fast"), completion_tables(tmp_path / "stock"), strict=True
    ):
        assert sorted(set(ours) - set(trls)) == [
            f"fastrl/{n}" for n in ("cluster", "group", "kept", "weight")
        ]
        pd.testing.assert_frame_equal(ours[list(trls)], trls, rtol=1e-5)
        assert (ours["length"] > 0).all()
    pruned = train_as_published(tmp_path / "pruned", **settings)
    table = completion_tables(tmp_path / "pruned")[-1]
    assert 0 < table["fastrl/kept"].sum() < len(table)
    assert logged(pruned, "fastrl/kept/frac")[-1] == table["fastrl/kept"].mean()


def test_unique_prompts_in_the_table_of_a_logging_backend(tmp_path, monkeypatch):
    sent = []

    class Backend:
        Table = staticmethod(lambda dataframe: dataframe)
        log = staticmethod(lambda values: sent.append(values["completions"]))

    class Reporting(ScriptedFast):
        def train(self, *args, **kwargs):
            self.args.report_to = ["trackio"]  # after construction: its callback needs the package
            return super().train(*args, **kwargs)

    monkeypatch.setattr(grpo_trainer, "trackio", Backend, raising=False)
    run(Reporting, tmp_path, FastRLConfig(), log_completions=True, log_unique_prompts=True)
    assert [len(table) for table in sent] == [2] * 3, "two steps and the end of the run"
    assert all(table["prompt"].is_unique for table in sent)


# Callbacks


class Events(TrainerCallback):
    """Records the order of events, and what the state says at each."""

    def __init__(self) -> None:
        self.seen: list = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **_: self.seen.append((name, state.global_step, state.epoch))


@pytest.mark.parametrize("config", [KEEP_ALL, FastRLConfig()], ids=["keep_all", "published"])
def test_callbacks_are_called_as_by_stock_trl(tmp_path, config):
    """Whatever is pruned: a skipped micro-step is still a sub-step of its optimizer step."""
    settings = {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "max_steps": -1,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 8,
        "trainer_kwargs": {"eval_dataset": text_dataset(2)},
    }
    seen = []
    for trainer_class, fastrl in ((ScriptedStock, None), (ScriptedFast, config)):
        events = Events()
        run(trainer_class, tmp_path, fastrl, callbacks=[events], **settings)
        seen.append(events.seen)
    assert len(seen[0]) > 30
    assert seen[1] == seen[0]


def test_a_callback_can_stop_the_run(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    trainer, _ = run(ScriptedFast, tmp_path, FastRLConfig(), callbacks=[Stop()], max_steps=8)
    assert trainer.state.global_step == 2


def test_an_optimizer_of_the_users_own(tmp_path):
    def gradients(trainer_class, fastrl=None):
        made = []

        def model(_):
            made.append(text_model())
            return made[0]

        class Own(trainer_class):
            def __init__(self, model, **kwargs):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
                super().__init__(model=model, optimizers=(optimizer, schedule), **kwargs)

        return run(Own, tmp_path, fastrl, model=model, max_steps=4)[1]

    expected, found = gradients(ScriptedStock), gradients(ScriptedFast, KEEP_ALL)
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert float(expected[3].norm()) > 1e-3


# Evaluation


EVALUATIONS = {
    "fewer": ({"num_generations_eval": 2}, {}),
    "more": ({"num_generations_eval": 8}, {}),
    "single": ({"num_generations_eval": 1}, {}),
    "stream": ({}, {"eval_dataset": text_dataset(4).to_iterable_dataset()}),
    "several_sets": ({}, {"eval_dataset": {"easy": text_dataset(2), "hard": text_dataset(4)}}),
    "reference": ({"beta": 0.1, "num_generations_eval": 2}, {}),
}


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluation_during_training_is_that_of_stock_trl(tmp_path, kind):
    settings, kwargs = EVALUATIONS[kind]
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, **settings}
    settings["trainer_kwargs"] = {"eval_dataset": text_dataset(4), **kwargs}
    stock, fast, _ = compare(tmp_path, max_steps=3, **settings)

    def evaluations(trainer):
        rows = [entry for entry in trainer.state.log_history if any("eval_" in key for key in entry)]
        untimed = ("runtime", "per_second")
        return [{k: v for k, v in row.items() if not k.endswith(untimed)} for row in rows]

    expected, found = evaluations(stock), evaluations(fast)
    assert len(found) == len(expected) == 3 * (2 if kind == "several_sets" else 1)
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True)
    trainer = train_as_published(tmp_path, max_steps=3, **settings)
    assert len(evaluations(trainer)) == len(expected)


def test_evaluating_a_trainer_that_was_never_trained(tmp_path):
    args = grpo_args(tmp_path, per_device_eval_batch_size=8)
    trainer = FastGRPOTrainer(
        text_model(), parity_reward, args, text_dataset(), text_dataset(4), text_tokenizer(), fastrl=KEEP_ALL
    )
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert 0 <= trainer.evaluate()["eval_reward"] <= 1
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_the_best_model_is_kept_and_loaded_as_by_stock_trl(tmp_path):
    settings = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_reward",
        "greater_is_better": True,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
        "trainer_kwargs": {"eval_dataset": text_dataset(4)},
    }
    stock, _ = run(ScriptedStock, tmp_path / "stock", **settings)
    fast, _ = run(ScriptedFast, tmp_path / "fast", KEEP_ALL, **settings)
    left = [sorted(p.name for p in (tmp_path / n).glob("checkpoint-*")) for n in ("stock", "fast")]
    assert left[0] == left[1]
    assert fast.state.best_metric == pytest.approx(stock.state.best_metric, rel=1e-5)
    for a, b in zip(fast.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


# What is left behind


@pytest.mark.parametrize("how", ["called", "saved"])
def test_the_model_card_names_fastrl_its_settings_and_the_paper(tmp_path, how):
    config = FastRLConfig(tau=0.85, budget="fixed")
    settings = (
        {"max_steps": 1, "save_strategy": "steps", "save_steps": 1} if how == "saved" else {"max_steps": 1}
    )
    trainer, _ = run(ScriptedFast, tmp_path, config, **settings)
    if how == "called":
        trainer.create_model_card(model_name="mine", dataset_name="shapes")
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    for word in ("FastRL", "tau: 0.85", "```bibtex", "GRPO", "trl"):
        assert word in text
    assert text.count("## FastRL") == 1
    front = text.split("---")[1]
    assert "fastrl" in front, "the tag of the model"


def test_a_saved_model_loads_without_fastrl(tmp_path):
    trainer, _ = run(ScriptedFast, tmp_path, FastRLConfig())
    trainer.save_model(str(tmp_path / "final"))
    loaded = type(trainer.model).from_pretrained(tmp_path / "final")
    for a, b in zip(loaded.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "fastrl" not in json.loads((tmp_path / "final" / "config.json").read_text(encoding="utf-8"))


class Hub:
    """Stands in for the Hub: remembers what each upload held."""

    def __init__(self) -> None:
        self.uploads: dict[str, list[str]] = {}
        self.cards: list[str] = []

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, path_in_repo="", **_):
        folder = Path(folder_path)
        self.uploads[path_in_repo] = sorted(path.name for path in folder.iterdir())
        if (folder / "README.md").is_file():
            self.cards.append((folder / "README.md").read_text(encoding="utf-8"))
        return SimpleNamespace(is_done=lambda: True, result=lambda: None)


def test_what_is_pushed_to_the_hub_can_be_resumed_and_names_fastrl(tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr(transformers_trainer, "hf_api", lambda: hub)
    monkeypatch.setattr(transformers_trainer, "PushInProgress", lambda jobs: jobs[0])
    pushing = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_strategy": "all_checkpoints"}
    trainer, _ = run(ScriptedFast, tmp_path, FastRLConfig(), save_strategy="steps", save_steps=1, **pushing)
    trainer.push_to_hub()
    for step in (1, 2):
        assert {STATE_FILE, "trainer_state.json"} <= set(hub.uploads[f"checkpoint-{step}"])
    assert len(hub.cards) == 3
    assert all(card.count("## FastRL") == 1 for card in hub.cards)
