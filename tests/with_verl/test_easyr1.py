"""The EasyR1 adapter around a stand-in with EasyR1's order of calls, verl's own DataProto and a real tiny model."""

import copy
import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")

import ray
import stand_in
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fastrl.config import FastRLConfig
from fastrl.integrations import easyr1
from fastrl.integrations._easyr1_settings import check_supported, settings_of
from fastrl.trace import read_rollouts
from fastrl.types import ConfigError, FastRLError, GroupError, StateError

NUM_PROMPTS, BATCH, N = 16, 4, 4


class Reward:
    """`compute_reward.remote(batch)` answers at once; `ray.get` is told so below."""

    def __init__(self):
        self.compute_reward = SimpleNamespace(remote=self._compute)
        self.extra = ("accuracy",)
        self.modulus = 3  # one answer of so many is right

    def _compute(self, batch):
        last = batch.batch["response_mask"].sum(-1) - 1
        scores = torch.zeros_like(batch.batch["response_mask"], dtype=torch.float32)
        right = (batch.batch["responses"] % self.modulus == 0).float()[:, 0]
        scores[torch.arange(len(scores)), last.clamp(min=0)] = right
        return scores, {name: right.tolist() for name in self.extra}


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda value: value)


@pytest.fixture
def engine(monkeypatch) -> ModuleType:
    """A fresh copy of the stand-in's module: the adapter wraps functions in it."""
    monkeypatch.delitem(sys.modules, "stand_in", raising=False)
    return importlib.import_module("stand_in")


def config_of(tmp_path, **algorithm):
    return SimpleNamespace(
        algorithm=SimpleNamespace(
            **{
                "adv_estimator": "grpo",
                "gamma": 1.0,
                "lam": 1.0,
                "disable_kl": True,
                "use_kl_loss": True,
                "online_filtering": False,
                **algorithm,
            }
        ),
        data=SimpleNamespace(rollout_batch_size=BATCH),
        worker=SimpleNamespace(
            actor=SimpleNamespace(global_batch_size=2, loss_avg_mode="token"), rollout=SimpleNamespace(n=N)
        ),
        trainer=SimpleNamespace(save_checkpoint_path=str(tmp_path), load_checkpoint_path=None, save_freq=0),
    )


def model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def data(with_ids=True):
    rows = []
    for start in range(0, NUM_PROMPTS, BATCH):
        ids = torch.arange(start, start + BATCH)[:, None] + torch.tensor([0, 20, 40])
        row = {"input_ids": ids % 60, "ground_truth": np.array(["x"] * BATCH, dtype=object)}
        if with_ids:
            row["id"] = np.array([f"p{start + i:02d}" for i in range(BATCH)], dtype=object)
        rows.append(row)
    return rows


def trainer_of(engine, tmp_path, steps=3, *, stock=False, config=None, with_ids=True, **settings):
    config = config or config_of(tmp_path)
    main = SimpleNamespace(RayPPOTrainer=engine.RayPPOTrainer, FSDPWorker=engine.FSDPWorker)
    if not stock:
        easyr1.install(main, engine, FastRLConfig(**settings))
    workers = engine.Workers(model(), config.worker, main.FSDPWorker)
    trainer = main.RayPPOTrainer(config, Reward(), workers, data(with_ids), steps)
    return trainer, workers


def weights(workers):
    return torch.cat([p.detach().flatten() for p in workers.model.parameters()])


def test_without_pruning_the_weights_are_the_engines(tmp_path, engine):
    stock, stock_workers = trainer_of(engine, tmp_path, stock=True)
    stock.fit()
    ours, workers = trainer_of(engine, tmp_path, pruner="none", budget="fixed")
    ours.fit()
    assert torch.equal(weights(workers), weights(stock_workers))
    assert workers.updates == stock_workers.updates == [2, 2, 2]


@pytest.mark.parametrize("settings", [{"denominator": "full"}, {"denominator": "kept"}])
def test_dropping_groups_without_signal(tmp_path, engine, settings):
    """One update per step: with the full denominator the weights are the engine's; with the kept one they are not."""
    config = config_of(tmp_path)
    config.worker.actor.global_batch_size = BATCH
    dropping = {"pruner": "none", "budget": "fixed", "zero_variance": "drop", "align": "dummy", **settings}
    stock, stock_workers = trainer_of(engine, tmp_path, 1, stock=True, config=copy.deepcopy(config))
    ours, workers = trainer_of(engine, tmp_path, 1, config=config, **dropping)
    for trainer in (stock, ours):
        trainer.reward_fn.modulus = 16
        trainer.fit()
    assert 0 < ours.log[0]["fastrl/frac_zero_variance"] < 1
    assert ours.log[0]["fastrl/trained/rows"] < 16
    moved = (weights(workers) - weights(stock_workers)).norm() / (
        weights(stock_workers) - weights_at_start()
    ).norm()
    assert (moved < 1e-4) == (settings["denominator"] == "full")


def weights_at_start():
    return torch.cat([p.detach().flatten() for p in model().parameters()])


def test_pruned_steps_keep_the_number_of_updates_and_log_all_rollouts(tmp_path, engine):
    trainer, workers = trainer_of(engine, tmp_path, 6, tau=0.9, budget="fixed", align="dummy", trace=True)
    trainer.fit()
    assert workers.asked == [16] * 6
    for metrics, updates in zip(trainer.log, workers.updates, strict=True):
        assert metrics["fastrl/trained/rows"] < metrics["fastrl/rollouts"] == 16
        assert updates == (2 if metrics["fastrl/trained/rows"] > 2 else 1)
    names = ("fastrl/trained/critic/score/mean", "critic/score/mean")
    assert any(metrics[names[0]] != metrics[names[1]] for metrics in trainer.log)
    groups = read_rollouts(tmp_path / "fastrl" / "rollouts.jsonl")
    assert [group.prompt_id for group in groups[:5]] == ["p00", "p01", "p02", "p03", "p04"]
    assert np.mean([group.rewards_G.mean() for group in groups[:4]]) == pytest.approx(
        trainer.log[0]["critic/score/mean"]
    )


def test_rows_per_update_may_stay(tmp_path, engine):
    trainer, workers = trainer_of(engine, tmp_path, 4, tau=0.9, budget="fixed", align="dummy", updates="rows")
    trainer.fit()
    assert workers.updates == [math.ceil(m["fastrl/trained/rows"] / 8) for m in trainer.log]


def test_top_up_adds_pruned_rollouts(tmp_path, engine):
    trainer, _ = trainer_of(engine, tmp_path, 4, tau=1.0, budget="fixed")
    trainer.fit()
    assert all(metrics["fastrl/trained/rows"] % stand_in.WORLD == 0 for metrics in trainer.log)


@pytest.mark.parametrize("budget", ["ars", "discovery", "per_prompt", "greso"])
def test_budgets_change_what_is_sampled(tmp_path, engine, budget):
    extra = {
        "per_prompt": {"initial_rollouts": 3},
        "discovery": {"rollout_cost": 4.0, "initial_rollouts": 2},
    }.get(budget, {})
    trainer, workers = trainer_of(
        engine, tmp_path, 12, tau=0.9, budget=budget, align="dummy", trace=True, **extra
    )
    trainer.fit()
    groups = read_rollouts(tmp_path / "fastrl" / "rollouts.jsonl")
    assert sum(group.num_rollouts for group in groups) == sum(workers.asked)
    assert all(asked % stand_in.WORLD == 0 for asked in workers.asked)
    assert min(workers.asked) < 16
    if budget == "per_prompt":
        assert len({group.num_rollouts for group in groups}) > 1
    assert trainer.config.worker.rollout.n == N
    assert trainer.config.data.rollout_batch_size == BATCH


def test_discovery_is_given_the_seconds_of_the_step_before(tmp_path, engine):
    trainer, _ = trainer_of(engine, tmp_path, 3, tau=0.9, budget="discovery", align="dummy")
    trainer.fit()
    assert trainer.seconds == {"generation": 2.0, "update": 1.0, "step": 5.0}


def test_online_filtering_goes_on_over_several_reads(tmp_path, engine):
    config = config_of(tmp_path, online_filtering=True)
    trainer, workers = trainer_of(engine, tmp_path, 3, config=config, tau=0.9, budget="fixed", align="dummy")
    trainer.fit()
    assert max(workers.asked) == 16
    assert len(workers.asked) > 3
    assert all(metrics["fastrl/frac_zero_variance"] == 0 for metrics in trainer.log)


def test_a_resumed_run_goes_on(tmp_path, engine):
    settings = {"tau": 0.9, "budget": "per_prompt", "initial_rollouts": 3, "align": "dummy"}
    config = config_of(tmp_path / "whole")
    config.trainer.save_freq = 1
    whole, whole_workers = trainer_of(engine, tmp_path, 6, config=config, **settings)
    whole.fit()
    config = config_of(tmp_path / "rest")
    config.trainer.load_checkpoint_path = str(tmp_path / "whole" / "global_step_3")
    rest, workers = trainer_of(engine, tmp_path, 6, config=config, **settings)
    rest.fit()
    assert workers.asked == whole_workers.asked[3:]
    assert torch.equal(weights(workers), weights(whole_workers))
    config.trainer.load_checkpoint_path = str(tmp_path / "whole" / "global_step_3")
    other, _ = trainer_of(engine, tmp_path, 6, config=config, **{**settings, "tau": 0.5})
    with pytest.raises(StateError, match="tau"):
        other.fit()


def test_nothing_kept_is_a_step_without_push(tmp_path, engine):
    trainer, workers = trainer_of(
        engine,
        tmp_path,
        1,
        tau=0.9,
        budget="fixed",
        zero_variance="drop",
        align="dummy",
        outcome_key="accuracy",
    )
    trainer.reward_fn.extra = ("accuracy",)
    score = trainer.reward_fn._compute
    trainer.reward_fn.compute_reward.remote = lambda batch: (
        score(batch)[0],
        {"accuracy": [1.0] * len(batch)},
    )
    trainer.fit()
    assert trainer.log[0]["fastrl/trained/rows"] == 0
    assert torch.equal(weights(workers), weights_at_start())


def test_an_outcome_must_be_returned(tmp_path, engine):
    trainer, _ = trainer_of(engine, tmp_path, 1, budget="fixed", outcome_key="solved")
    with pytest.raises(GroupError, match="outcome_key: 'solved'"):
        trainer.fit()


def test_remembering_budgets_need_an_id(tmp_path, engine):
    trainer, _ = trainer_of(engine, tmp_path, 1, with_ids=False, budget="per_prompt")
    with pytest.raises(ConfigError, match=r"no column `id`"):
        trainer.fit()
    trainer, _ = trainer_of(engine, tmp_path, 1, with_ids=False, budget="fixed")
    trainer.fit()


def test_without_the_worker_a_varying_batch_fails(tmp_path, engine):
    """EasyR1's cache of images compares arrays of different lengths: what the subclass of the worker is for."""
    trainer, workers = trainer_of(engine, tmp_path, 3, tau=0.9, budget="fixed", align="dummy")
    workers.ranks = [
        engine.FSDPWorker(copy.deepcopy(trainer.config.worker), workers, 4) for _ in workers.ranks
    ]
    with pytest.raises(ValueError, match=r"shape|broadcast|element"):
        trainer.fit()


def test_the_worker_keeps_how_rows_are_shared_out(engine):
    from fastrl.integrations._easyr1_hooks import with_varying_batches

    assert (
        with_varying_batches(engine.FSDPWorker).update_actor.dispatch
        == engine.FSDPWorker.update_actor.dispatch
    )


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ({"adv_estimator": "gae"}, {}, "Use grpo or rloo"),
        ({"disable_kl": False, "use_kl_loss": False}, {}, "use_kl_loss=true"),
        ({}, {"refill": "signal"}, "online_filtering=true"),
        ({}, {"similarity": "surprisal"}, "similarity=centred"),
        ({"online_filtering": True}, {"budget": "per_prompt"}, "Choose one of the two"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, algorithm, settings, message):
    with pytest.raises(ConfigError, match=message):
        check_supported(config_of(tmp_path, **algorithm), FastRLConfig(**settings))


def test_settings_are_taken_off_the_command_line():
    settings, rest = settings_of(
        ["config=a.yaml", "fastrl.tau=0.6", "worker.rollout.n=8", "fastrl.rollout_cost=1e-3"]
    )
    assert (settings.tau, settings.rollout_cost, rest) == (0.6, 1e-3, ["config=a.yaml", "worker.rollout.n=8"])
    with pytest.raises(ConfigError, match="Did you mean 'tau'"):
        settings_of(["fastrl.tua=0.6"])


def test_another_easyr1_is_refused(engine):
    class Other:
        def _make_batch_data(self, batch, metrics): ...

    with pytest.raises(FastRLError, match="b44b311"):
        easyr1.with_fastrl(Other, engine, FastRLConfig())


def test_without_easyr1_the_command_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fastrl", "config=a.yaml"])
    with pytest.raises(FastRLError, match=r"fastrl\.integrations\.verl"):
        easyr1.main()
