"""vLLM through TRL's own client code, with a scripted server behind it; and the ratio that corrects for it.

The real vLLM runs in `tests/with_vllm`, in an environment of its own.
"""

import hashlib

import numpy as np
import pytest
import torch
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl_support import relative_error, scripted_ids, train, vision_dataset

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer

ROW_BY_ROW = True

KEEP_ALL = FastRLConfig(pruner="none", budget="fixed")


class ScriptedServer:
    """Answers as a vLLM server does: n completions per prompt, each with the log-probs of its tokens."""

    def __init__(self, words):
        self.words = words
        self.requests = []
        self.images_sent = 0

    def image_features(self, images):
        self.images_sent += sum(len(of_prompt or []) for of_prompt in images)
        return [None if of_prompt is None else {} for of_prompt in images]

    def generate(self, prompts, features=None, n=1, **sampling):
        self.requests.append((n, len(prompts)))
        completions = [
            scripted_ids(ids, i, len(self.requests), None, self.words) for ids in prompts for i in range(n)
        ]
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[value] for value in sampler_logprobs(ids)] for ids in completions],
        }


def sampler_logprobs(ids):
    """Around those of an untrained model of 42 words, but not equal: some ratios must hit their bounds."""
    rng = np.random.default_rng(list(hashlib.sha256(repr(ids).encode()).digest()[:8]))
    values = (-np.log(42) + rng.normal(0, 0.7, len(ids))).tolist()
    return [None if k == 2 else value for k, value in enumerate(values)]  # what vLLM could not score


class ThroughServer:
    """Set a trainer up as TRL does with use_vllm=True and vllm_mode="server", without importing vLLM."""

    def __init__(self, *args, mode="token_truncate", **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1
        self.vllm_importance_sampling_correction, self.vllm_importance_sampling_mode = True, mode
        self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max = None, 1.5
        self.server = ScriptedServer(range(60, 120) if self._is_vlm else range(2, 30))
        client = VLLMGeneration.__new__(VLLMGeneration)
        options = {
            "mode": "server", "accelerator": self.accelerator, "vllm_client": self.server, "temperature": 1.0,
            "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "max_completion_length": 10,
            "logprobs": 0, "structured_outputs_regex": None, "generation_kwargs": {}, "sync_weights": lambda: None,
            "processing_class": self.processing_class, "_place_features": lambda features, prompt_ids: features,
        }  # fmt: skip
        client.__dict__.update(options)
        self.vllm_generation = client


class StockThroughServer(ThroughServer, GRPOTrainer):
    pass


class FastThroughServer(ThroughServer, FastGRPOTrainer):
    pass


MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@pytest.mark.parametrize(
    ("loss", "mode"),
    [*((loss, mode) for loss in ("grpo", "dapo") for mode in MODES), ("vespo", "token_truncate")],
)
def test_importance_ratio_is_that_of_trl(tmp_path, loss, mode):
    settings = {"loss_type": loss, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer, found = train(
        FastThroughServer, tmp_path, trainer_kwargs={"mode": mode, "fastrl": KEEP_ALL}, **settings
    )
    stock, expected = train(StockThroughServer, tmp_path, trainer_kwargs={"mode": mode}, **settings)
    assert max(gradient.norm() for gradient in expected) > 1e-4
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 1e-5
    for key, value in stock.state.log_history[0].items():
        if key.startswith("sampling/"):
            assert trainer.state.log_history[0][key] == pytest.approx(value, rel=1e-4), key


def test_the_ratio_hits_its_bounds_in_these_tests(tmp_path):
    trainer, _ = train(FastThroughServer, tmp_path, trainer_kwargs={"fastrl": KEEP_ALL}, max_steps=1)
    ratios = torch.cat([m["importance_sampling_ratio"].flatten() for m in trainer._micro_batches if m])
    assert ratios.max() == 1.5
    assert ratios.min() < 0.7


def test_old_log_probs_are_computed_for_survivors_only(tmp_path):
    rows = []

    class Counts(FastThroughServer):
        def _logps(self, model, micro_batch):
            rows.append(len(micro_batch["completion_ids"]))
            return super()._logps(model, micro_batch)

    trainer, _ = train(
        Counts, tmp_path, trainer_kwargs={"fastrl": FastRLConfig(budget="fixed", tau=0.9)}, max_steps=1
    )
    kept = sum(m.num_rows for m in trainer._micro_batches if m is not None)
    assert sum(rows) == kept < 8


def with_counts(trainer_class, counts):
    class WithCounts(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.fastrl.plan = lambda prompt_ids: np.array(counts)

    return WithCounts


def test_one_request_per_distinct_count(tmp_path):
    trainer, _ = train(
        with_counts(FastThroughServer, [3, 2, 4, 2]), tmp_path, trainer_kwargs={"fastrl": KEEP_ALL},
        per_device_train_batch_size=16, max_steps=1,
    )  # fmt: skip
    assert trainer.server.requests == [(2, 2), (3, 1), (4, 1)]
    rows = [(m, i) for m in trainer._micro_batches if m is not None for i in range(len(m["advantages"]))]
    assert len(rows) == 11
    for micro_batch, i in rows:  # every completion is one that was sampled for its own prompt
        prompt = micro_batch["prompt_ids"][i][micro_batch["prompt_mask"][i].bool()].tolist()
        completion = micro_batch["completion_ids"][i][micro_batch["completion_mask"][i].bool()].tolist()
        scripted = [
            scripted_ids(prompt, k, r, None, trainer.server.words) for k in range(4) for r in (1, 2, 3)
        ]
        assert completion in scripted


def test_images_are_sent_once_per_prompt(tmp_path):
    from fastrl import testbed

    model, processor = testbed.load()
    dataset = vision_dataset()
    trainer, _ = train(
        with_counts(FastThroughServer, [3, 2, 4, 2]), tmp_path, model=model, processing_class=processor,
        dataset=dataset, trainer_kwargs={"fastrl": KEEP_ALL}, per_device_train_batch_size=16, max_steps=1,
        learning_rate=1e-4,
    )  # fmt: skip
    rows = {row_id: len(row["images"]) for row_id, row in enumerate(dataset)}
    sent = sum(rows[int(prompt_id)] for prompt_id in trainer._round_prompt_ids)
    assert trainer.server.images_sent == sent
