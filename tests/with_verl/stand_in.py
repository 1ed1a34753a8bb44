"""A stand-in for EasyR1, which needs CUDA: the order of its step, and what its parts promise each other. Test support.

Written from what EasyR1 (b44b311) does, not from its text. Batches are verl's own DataProto, with the model, sampling,
log-probs and optimizer of a real tiny model in one process. What the adapter relies on is here: a batch is made by
`_make_batch_data` in a loop over a data iterator; workers sample `n` rollouts per row, where meta information may say
another n; every batch must divide by the ranks; the update cuts its rows into mini-batches of a fixed size and averages
over response tokens; functions are looked up in this module by name; the cache of images compares prompts.
"""

import copy
import uuid
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from verl.protocol import DataProto

WORLD = 2


def compute_advantage(data: Any, adv_estimator: str, gamma: float = 1.0, lam: float = 1.0) -> Any:
    rewards = data.batch["token_level_rewards"].sum(-1)
    found = torch.zeros_like(rewards)
    uids = data.non_tensor_batch["uid"]
    for uid in set(uids):
        rows = np.flatnonzero(uids == uid)
        assert len(rows) > 1, "GRPO needs rollout.n > 1"
        found[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-6)
    data.batch["advantages"] = data.batch["returns"] = found[:, None] * data.batch["response_mask"]
    return data


def compute_data_metrics(batch: Any, use_critic: bool = False) -> dict[str, float]:
    scores = batch.batch["token_level_scores"].sum(-1)
    lengths = batch.batch["response_mask"].sum(-1).float()
    return {"critic/score/mean": float(scores.mean()), "response_length/mean": float(lengths.mean())}


def compute_timing_metrics(batch: Any, timing_raw: dict[str, float]) -> dict[str, float]:
    return {f"timing_s/{name}": value for name, value in timing_raw.items()}


class Workers:
    """EasyR1's worker group: methods that shard a batch over the ranks, here one after the other."""

    def __init__(self, model: Any, config: Any, worker_class: type) -> None:
        self.world_size = WORLD
        self.model, self.config = model, config
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.asked: list[int] = []
        self.updates: list[int] = []
        per_device = config.actor.global_batch_size * config.rollout.n // WORLD
        self.ranks = [worker_class(copy.deepcopy(config), self, per_device) for _ in range(WORLD)]
        self.seed = 0

    def shards(self, batch: Any) -> list[Any]:
        assert len(batch) % WORLD == 0, f"{len(batch)} rows on {WORLD} ranks"
        return batch.chunk(WORLD)

    def prepare_rollout_engine(self) -> None: ...

    def release_rollout_engine(self) -> None: ...

    @torch.no_grad()
    def generate_sequences(self, prompts: Any) -> Any:
        self.shards(prompts)
        n = prompts.meta_info.get("n", self.config.rollout.n)
        self.asked.append(len(prompts) * n)
        ids = prompts.batch["input_ids"].repeat_interleave(n, 0)
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(6):
            logits = self.model(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
        length = prompts.batch["input_ids"].shape[1]
        responses = ids[:, length:]
        ends = (responses >= 60).long().cumsum(1)
        columns = {
            "prompts": ids[:, :length],
            "responses": responses,
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).clone(),
            "response_mask": (ends - (responses >= 60).long() == 0).long(),
        }
        return DataProto.from_dict(tensors=columns)

    def _logps(self, batch: Any) -> torch.Tensor:
        num = batch.batch["responses"].shape[1]
        logits = self.model(input_ids=batch.batch["input_ids"]).logits[:, -num - 1 : -1]
        return torch.log_softmax(logits, -1).gather(2, batch.batch["responses"][..., None])[..., 0]

    @torch.no_grad()
    def compute_log_probs(self, batch: Any) -> Any:
        for rank, shard in zip(self.ranks, self.shards(batch), strict=True):
            rank._process_multi_modal_inputs(shard)
        return DataProto.from_dict(tensors={"old_log_probs": self._logps(batch)})

    def update_actor(self, batch: Any) -> Any:
        shards = self.shards(batch)
        steps = [rank.update_actor(shard) for rank, shard in zip(self.ranks, shards, strict=True)]
        assert len({len(minis) for minis in steps}) == 1, "ranks take different numbers of optimizer steps"
        self.updates.append(len(steps[0]))
        for minis in zip(*steps, strict=True):
            tokens = sum(int(mini.batch["response_mask"].sum()) for mini in minis)
            loss = torch.zeros(())
            for mini in minis:
                ratio = (self._logps(mini) - mini.batch["old_log_probs"]).exp()
                loss = loss - (ratio * mini.batch["advantages"] * mini.batch["response_mask"]).sum() / tokens
            self.optimizer.zero_grad()
            loss.backward()
            assert torch.isfinite(loss), "an optimizer step over no tokens"
            self.optimizer.step()
        return SimpleNamespace(non_tensor_batch={})

    def save_checkpoint(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        torch.save(self.model.state_dict(), Path(path) / "model.pt")

    def load_checkpoint(self, path: str) -> None:
        self.model.load_state_dict(torch.load(Path(path) / "model.pt"))


class FSDPWorker:
    """One rank."""

    def __init__(self, config: Any, group: Workers, per_device: int) -> None:
        self.config, self.group = config, group
        self.config.actor.global_batch_size_per_device = per_device
        self._cache: dict[str, Any] = {}

    def _process_multi_modal_inputs(self, data: Any) -> None:
        if "uid" in self._cache and not np.all(data.non_tensor_batch["uid"] == self._cache["uid"]):
            self._cache.clear()
        self._cache["uid"] = data.non_tensor_batch["uid"]

    def update_actor(self, data: Any) -> list[Any]:
        self._process_multi_modal_inputs(data)
        return data.split(self.config.actor.global_batch_size_per_device)

    update_actor.dispatch = "rows are shared out"


class RayPPOTrainer:
    """The trainer: its step is one function."""

    def __init__(
        self, config: Any, reward: Any, workers: Any, train_dataloader: Any, training_steps: int
    ) -> None:
        self.config, self.reward_fn, self.actor_rollout_ref_wg = config, reward, workers
        self.train_dataloader, self.training_steps = train_dataloader, training_steps
        self.log: list[dict[str, float]] = []

    def _make_batch_data(self, metrics: dict[str, Any]) -> Any:
        batch, scored = None, defaultdict(list)
        while True:
            try:
                rows = next(self.data_iterator)
            except StopIteration:
                self.data_iterator = iter(self.train_dataloader)
                rows = next(self.data_iterator)
            new = DataProto.from_single_dict(rows, meta_info={"min_pixels": 1})
            new.non_tensor_batch["uid"] = np.array([uuid.uuid4().hex for _ in range(len(new))], dtype=object)
            gen = new.pop(batch_keys=["input_ids"], non_tensor_batch_keys=[], meta_info_keys=["min_pixels"])
            output = self.actor_rollout_ref_wg.generate_sequences(gen)
            new = new.repeat(repeat_times=self.config.worker.rollout.n, interleave=True).union(output)
            if self.config.algorithm.online_filtering:
                scores, extra = ray.get(self.reward_fn.compute_reward.remote(new))
                new.batch["token_level_scores"] = scores
                means = defaultdict(list)
                for uid, value in zip(new.non_tensor_batch["uid"], extra["accuracy"], strict=True):
                    means[uid].append(value)
                for name, values in extra.items():
                    scored[name].extend(values)
                kept = [
                    i
                    for i, uid in enumerate(new.non_tensor_batch["uid"])
                    if 0.01 < np.mean(means[uid]) < 0.99
                ]
                if not kept:
                    continue
                new = new[kept]
            batch = new if batch is None else DataProto.concat([batch, new])
            if len(batch) // self.config.worker.rollout.n >= self.config.data.rollout_batch_size:
                return batch[: self.config.data.rollout_batch_size * self.config.worker.rollout.n]

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.save_checkpoint_path) / f"global_step_{self.global_step}"
        self.actor_rollout_ref_wg.save_checkpoint(str(folder / "actor"))
        torch.save(self.data_iterator_state, folder / "dataloader.pt")

    def _load_checkpoint(self) -> None:
        path = self.config.trainer.load_checkpoint_path
        if path is None:
            return
        self.global_step = int(path.rpartition("global_step_")[2])
        self.actor_rollout_ref_wg.load_checkpoint(f"{path}/actor")
        self.actor_rollout_ref_wg.seed = self.global_step

    def fit(self) -> None:
        self.global_step = 0
        self._load_checkpoint()
        self.data_iterator = iter(self.train_dataloader)
        for _ in range(self.global_step % len(self.train_dataloader)):
            next(self.data_iterator)
        while self.global_step < self.training_steps:
            self.global_step += 1
            self.data_iterator_state = self.global_step
            metrics: dict[str, Any] = {}
            batch = self._make_batch_data(metrics=metrics)
            batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
            if "token_level_scores" not in batch.batch.keys():  # noqa: SIM118 - a TensorDict
                scores, _ = ray.get(self.reward_fn.compute_reward.remote(batch))
                batch.batch["token_level_scores"] = scores
            batch = batch.union(self.actor_rollout_ref_wg.compute_log_probs(batch))
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            algorithm = self.config.algorithm
            batch = compute_advantage(
                batch, adv_estimator=algorithm.adv_estimator, gamma=algorithm.gamma, lam=algorithm.lam
            )
            self.actor_rollout_ref_wg.update_actor(batch)
            if self.config.trainer.save_freq:
                self._save_checkpoint()
            metrics.update(compute_data_metrics(batch=batch, use_critic=False))
            metrics.update(
                compute_timing_metrics(batch=batch, timing_raw={"gen": 2.0, "old": 1.0, "step": 5.0})
            )
            self.log.append(metrics)
