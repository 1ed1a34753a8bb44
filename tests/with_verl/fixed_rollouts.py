"""One update of real verl per case, all from the same rollouts and weights. Test support.

    python fixed_rollouts.py OUT.json [overrides]

Starts verl once (queue, workers, sharded engine), samples one batch, and trains on it again and again: with verl's own
trainer code, and with FastRL under different settings. What each case leaves in the weights, the metrics and the queue
is written as checkpoints and JSON for the test to compare.
"""

import json
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict
from tensordict import NonTensorStack
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from fastrl.config import FastRLConfig
from fastrl.integrations import verl as adapter
from fastrl.integrations._verl_loss import loss_over_denominators
from fastrl.method import FastRL

REWARDS = [
    [1.0, 0.0, 0.0, 0.2],
    [1.0, 1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.0, 1.0, 1.0, 0.0],
]
IDENTITY = {"pruner": "none", "budget": "fixed"}
DROP = {"pruner": "none", "budget": "fixed", "zero_variance": "drop", "denominator": "full"}
PRUNE = {"tau": 0.8, "budget": "fixed", "zero_variance": "drop", "align": "dummy"}
UNBIASED = {**PRUNE, "representative": "random", "weighting": 1.0, "denominator": "full"}

GSPO = {"policy_loss.loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"}
SEQ_MEAN = {"loss_agg_mode": "seq-mean-token-mean"}
SEQ_SUM = {"loss_agg_mode": "seq-mean-token-sum"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5}

CASES: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock seq-mean": {"actor": SEQ_MEAN},
    "stock seq-sum": {"actor": SEQ_SUM},
    "stock gspo": {"actor": GSPO},
    "stock kl": {"actor": KL},
    "stock two updates": {"updates": 2},
    "stock reinforce": {"estimator": "reinforce_plus_plus"},
    "identity": {"fastrl": IDENTITY},
    "identity reinforce": {"fastrl": IDENTITY, "estimator": "reinforce_plus_plus"},
    "identity gspo": {"fastrl": IDENTITY, "actor": GSPO},
    "identity two updates": {"fastrl": IDENTITY, "updates": 2},
    "drop": {"fastrl": DROP},
    "drop seq-mean": {"fastrl": DROP, "actor": SEQ_MEAN},
    "drop seq-sum": {"fastrl": DROP, "actor": SEQ_SUM},
    "drop gspo": {"fastrl": DROP, "actor": GSPO},
    "kept": {"fastrl": PRUNE},
    "kept seq-mean": {"fastrl": PRUNE, "actor": SEQ_MEAN},
    "live": {"fastrl": {**PRUNE, "denominator": "live"}},
    "live seq-mean": {"fastrl": {**PRUNE, "denominator": "live"}, "actor": SEQ_MEAN},
    "unbiased": {"fastrl": UNBIASED},
    "unbiased gspo": {"fastrl": UNBIASED, "actor": GSPO},
    "top up": {"fastrl": {**PRUNE, "tau": 1.0, "align": "top_up"}},
    "keep all kl": {
        "fastrl": {**DROP, "zero_variance": "keep_all", "tau": 0.0, "pruner": "mdap"},
        "actor": KL,
    },
    "nothing": {"fastrl": PRUNE, "rewards": 0.0},
    "one row": {"fastrl": {**PRUNE, "pruner": "random", "keep_share": 0.01}, "one_group": True},
    "two updates": {"fastrl": PRUNE, "updates": 2},
    "rows": {"fastrl": {**PRUNE, "updates": "rows"}, "updates": 2},
    "outcomes": {"fastrl": {**PRUNE, "outcome_key": "acc"}, "rewards": "shaped"},
    "rloo": {"fastrl": PRUNE, "estimator": "rloo"},
    "grpo_vectorized": {"fastrl": PRUNE, "estimator": "grpo_vectorized"},
    "rloo_vectorized": {"fastrl": PRUNE, "estimator": "rloo_vectorized"},
}


class Bench:
    """A started trainer, the weights it began with, and one batch of rollouts."""

    def __init__(self, config: Any, out: Path) -> None:
        self.config, self.out = config, out
        self.trainer = adapter.install("sync")(config)
        self.trainer.init()
        self.trainer.timing_raw = {}
        self.trainer.global_steps = 1
        manager = AgentLoopManagerTQ.create(
            config=config,
            llm_client=self.trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self.trainer.get_reward_handles(),
        )
        self.trainer.agent_loop_manager = manager
        self.trainer.prepare_step()
        batch, _ = self.trainer.replay_buffer.sample(
            global_steps=1, partition_id="train", batch_size=config.data.train_batch_size
        )
        self.rows = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        self.keys, self.tags = batch.keys, batch.tags
        self.batch_type = type(batch)
        tq.kv_clear(keys=batch.keys, partition_id="train")
        self.trainer.actor_rollout_wg.save_checkpoint(str(out / "initial"), None, 0)

    def run(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        trainer, group = self.trainer, self.trainer.actor_rollout_wg
        group.load_checkpoint(str(self.out / "initial"))
        settings = FastRLConfig.from_dict(case.get("fastrl", IDENTITY))
        trainer._trained, trainer._settings = None, settings
        trainer.fastrl = FastRL(settings, num_rollouts=4, total_steps=10, steps_per_epoch=4)
        actor = self.config.actor_rollout_ref.actor.copy()
        with open_dict(actor):
            for key, value in case.get("actor", {"use_kl_loss": False}).items():
                OmegaConf.update(actor, key, value)
            actor.use_kl_loss = "use_kl_loss" in case.get("actor", {})
        loss = ppo_loss if "fastrl" not in case else loss_over_denominators
        group.set_loss_fn(partial(loss, config=omega_conf_to_dataclass(actor)))
        own = self.config.actor_rollout_ref.actor
        own.ppo_mini_batch_size = self.config.data.train_batch_size // case.get("updates", 1)
        self.config.algorithm.adv_estimator = case.get("estimator", "grpo")
        metrics: dict[str, Any] = {}
        batch, rewards = self._put(case)
        batch.extra_info["temperature"] = 1.0
        if "fastrl" in case:
            batch = trainer._balance_batch(batch, metrics)
        else:  # verl's own methods, as if FastRL were not there
            batch = super(adapter.FastRLMixin, trainer)._balance_batch(batch, metrics)
        num_rows = sum(not tag.get("is_padding", False) for tag in batch.tags)
        batch = trainer._compute_old_log_prob(batch, metrics=metrics)
        batch = trainer._compute_ref_log_prob(batch, metrics=metrics)
        batch = trainer._compute_advantage(batch, metrics=metrics)
        trained = self._trained_rows(batch)
        batch = trainer._update_actor(batch, metrics=metrics)
        trainer._compute_metrics(batch, metrics, {"step": 1.0}, global_steps=1, epoch=0)
        tq.kv_clear(keys=batch.keys, partition_id="train")
        left = tq.kv_list("train") or {}
        folder = self.out / name.replace(" ", "_")
        group.save_checkpoint(str(folder), None, 1)
        return {
            "rows": num_rows,
            "filling": len(batch.keys) - num_rows,
            "left_in_queue": len(left.get("train", {})),
            "updates": self._updates(metrics, batch),
            "rewards": rewards,
            "trained": trained,
            "metrics": {
                key: float(value) for key, value in metrics.items() if isinstance(value, float | int)
            },
        }

    def _put(self, case: dict[str, Any]) -> tuple[Any, list[float]]:
        """Put the batch into the queue under new keys, with the rewards of the case."""
        uids = sorted({key.rsplit("_", 2)[0] for key in self.keys})
        fresh = {uid: str(uuid.uuid4()) for uid in uids}
        self.places = {}
        rewards, keys, scores, extra = [], [], [], []
        for key, row in zip(self.keys, self.rows["rm_scores"].unbind(), strict=True):
            uid, session, output = key.rsplit("_", 2)
            place = REWARDS[uids.index(uid)]
            reward = place[int(session)]
            accuracy = float(reward == 1.0)
            if case.get("rewards") == "shaped":  # equal outcomes, rewards that differ
                reward, accuracy = reward + 0.01 * int(session), float(uids.index(uid) == 1)
            elif "rewards" in case:
                reward = case["rewards"]
            if case.get("one_group") and uids.index(uid):
                reward = 0.0
            score = torch.zeros_like(row)
            score[-1] = reward
            scores.append(score)
            rewards.append(reward)
            keys.append(f"{fresh[uid]}_{session}_{output}")
            self.places[keys[-1]] = [uids.index(uid), int(session)]
            extra.append({"reward_extra_info": {"acc": accuracy}})
        rows = self.rows.clone()
        rows["rm_scores"] = torch.nested.as_nested_tensor(scores, layout=torch.jagged)
        rows["extra_fields"] = NonTensorStack(*extra)
        rows["uid"] = NonTensorStack(*[key.rsplit("_", 2)[0] for key in keys])
        tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=self.tags)
        return self.batch_type(partition_id="train", keys=keys, tags=self.tags), rewards

    def _trained_rows(self, batch: Any) -> list[dict[str, Any]]:
        """Tokens and advantages of every row that the update sees, filling rows left out."""
        names = ["input_ids", "responses", "response_mask", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=names)
        columns = {name: [row.tolist() for row in data[name].unbind()] for name in names}
        return [
            {"place": self.places[key], **{name: columns[name][i] for name in names}}
            for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
            if not tag.get("is_padding", False)
        ]

    def _updates(self, metrics: dict[str, Any], batch: Any) -> int:
        info = batch.extra_info
        return len(batch.keys) // info["mini_batch_size"] if "mini_batch_size" in info else -1


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=sys.argv[2:])
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    OmegaConf.set_struct(config, False)
    kwargs = OmegaConf.to_container(config.ray_kwargs.ray_init)
    ray.init(**{**kwargs, "runtime_env": {"env_vars": {"TRANSFER_QUEUE_ENABLE": "1"}}})
    tq.init(config.transfer_queue)
    bench = Bench(config, out)
    results = {}
    for name, case in CASES.items():
        results[name] = bench.run(name, case)
        print(f"case {name}: {results[name]['rows']} rows, {results[name]['updates']} updates", flush=True)
        (out / "results.json").write_text(json.dumps(results))
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
