"""What FastRL refuses of verl's configuration, before anything is loaded; and how it gets into verl at all."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("verl")

import hydra
from verl.trainer.ppo.v1 import trainer_base

from fastrl.integrations import _verl_plugin
from fastrl.integrations import verl as adapter
from fastrl.integrations._verl_settings import check_supported, settings_of
from fastrl.types import ConfigError, FastRLError

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_dynamic_bsz=True"]


def config_of(*overrides: str):
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=[*GRPO, *overrides])


def check(*overrides: str) -> None:
    config = config_of(*overrides)
    check_supported(config, settings_of(config))


def test_settings_come_from_the_command_line():
    settings = settings_of(config_of("+fastrl.tau=0.6", "+fastrl.budget=fixed", "+fastrl.rollout_cost=1e-3"))
    assert (settings.tau, settings.budget, settings.rollout_cost) == (0.6, "fixed", 1e-3)
    assert settings_of(config_of()).to_dict()["tau"] == 0.8  # none given: the published setting


def test_an_unknown_setting_is_named():
    with pytest.raises(ConfigError, match="Did you mean 'tau'"):
        settings_of(config_of("+fastrl.tua=0.6"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.use_kl_in_reward=True"], "use_kl_loss=True"),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator=grpo"),
        (["critic.enable=True"], "critic values every token"),
        (["algorithm.adv_estimator=reinforce_plus_plus"], "Use one of grpo"),
        (["trainer.v1.trainer_mode=separate_async"], "sync and colocate_async"),
        (["distillation.enabled=True"], "teacher's loss"),
        (["actor_rollout_ref.actor.use_prefix_grouper=True"], "groups of one size"),
        (["+fastrl.refill=signal"], "algorithm.filter_groups.enable=True"),
        (["+fastrl.similarity=gradient"], "similarity=centred"),
        (
            ["+fastrl.similarity=surprisal", "actor_rollout_ref.rollout.calculate_log_probs=False"],
            "calculate_log_probs=True",
        ),
        (["+fastrl.budget=greso", "algorithm.filter_groups.enable=True"], "Choose one of the two"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_what_works_is_not_refused(mode, recwarn):
    check(f"trainer.v1.trainer_mode={mode}", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    check("actor_rollout_ref.rollout.calculate_log_probs=True", "+fastrl.similarity=surprisal")
    assert not [str(w.message) for w in recwarn if "fastrl" in str(w.message)]


def test_without_pruning_nothing_of_verl_is_refused():
    identity = ["+fastrl.pruner=none", "+fastrl.budget=fixed"]
    check(*identity, "algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=gae")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+fastrl.micro_batches=shrink"], "is ignored"),
        (["actor_rollout_ref.actor.use_kl_loss=True", "+fastrl.zero_variance=drop"], "KL term"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "loss_scale_factor"),
        (["actor_rollout_ref.actor.use_dynamic_bsz=False"], "token budget"),
    ],
)
def test_what_works_otherwise_than_expected_is_said(overrides, message):
    with pytest.warns(UserWarning, match=message):
        check(*overrides)


def test_the_older_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"trainer\.use_v1=False"):
        adapter._main(config_of("trainer.use_v1=False"))


def test_an_unknown_mode_is_named():
    with pytest.raises(ConfigError, match="none of verl's modes"):
        adapter.install("asynchronous")


def test_a_trainer_with_other_methods_is_refused():
    class Changed(trainer_base.TRAINER_REGISTRY["sync"]):
        def _update_actor(self, data, metrics): ...

    with pytest.raises(FastRLError, match=r"Changed\._update_actor takes"):
        adapter.with_fastrl(Changed)


def test_the_plugin_offers_fastrl_to_every_trainer_of_verl():
    """In a process that only imports verl, as verl's own do."""
    script = (
        "import verl, sys\n"
        "assert 'fastrl.integrations._verl_plugin' in sys.modules\n"
        "assert 'fastrl.integrations.verl' not in sys.modules\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from fastrl.integrations._verl_plugin import STOCK, is_waiting_or_done\n"
        "assert is_waiting_or_done()\n"
        "stock = vars(get_trainer_cls('sync'))[STOCK]\n"
        "print(stock.__name__, issubclass(get_trainer_cls('sync'), stock))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.stdout.split() == ["PPOTrainerSync", "True"], done.stderr[-2000:]


def test_a_trainer_chooses_by_the_block_in_its_configuration(monkeypatch):
    class Stock:
        def __init__(self, config):
            self.config = config

    registry = {"sync": Stock}
    _verl_plugin.offer(registry)
    assert type(registry["sync"](config={})) is Stock
    monkeypatch.setattr(adapter, "with_fastrl", lambda host: type("With", (host,), {}))
    assert type(registry["sync"](config={"fastrl": {"tau": 0.8}})).__name__ == "With"


@pytest.mark.parametrize(("policy", "status"), [("auto", "ok"), ("none", "problem")])
def test_the_doctor_says_whether_the_plugin_is_in_place(policy, status):
    script = "from fastrl.bench.doctor import _verl; check = _verl(); print(check.status, '|', check.detail)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "VERL_USE_EXTERNAL_PLUGINS": policy},
    )
    assert done.stdout.startswith(status), done.stderr[-2000:]
    assert ("ignored in silence" in done.stdout) == (policy == "none")
