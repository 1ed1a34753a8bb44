"""Generation through real vLLM, in the trainer's own process: `make test-vllm` (an environment of its own)."""

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` runs these in .venv-vllm")

import torch
from bridge import keep_weights_loadable
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl_support import NUM_WORDS, grpo_args, length_reward, parity_reward, text_dataset, text_tokenizer

from fastrl import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer

keep_weights_loadable()
pytestmark = pytest.mark.timeout(300)
DIFFERENCE = "sampling/sampling_logp_difference/mean"
VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.2,
    "vllm_max_model_length": 64,
}


@pytest.fixture
def model(tmp_path):
    """A model on disk, where vLLM loads it from; heads of 64, the smallest that its kernels take."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": NUM_WORDS + 2,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, pad_token_id=0, eos_token_id=1)).save_pretrained(tmp_path)
    text_tokenizer().save_pretrained(tmp_path)
    return Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)


def train(trainer_class, model, folder, *, counts=None, synced=True, **kwargs):
    trainer = trainer_class(
        model=model, reward_funcs=[parity_reward, length_reward], train_dataset=text_dataset(),
        args=grpo_args(folder, max_steps=4, max_completion_length=8, learning_rate=0.5, **VLLM),
        processing_class=text_tokenizer(), **kwargs,
    )  # fmt: skip
    if counts is not None:
        trainer.fastrl.plan = lambda prompt_ids: np.array(counts)
    if not synced:
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    return trainer, [row[DIFFERENCE] for row in trainer.state.log_history if DIFFERENCE in row]


def test_sampler_and_trainer_agree_after_every_update(model, tmp_path):
    before = [p.clone() for p in model.parameters()]
    config = FastRLConfig(budget="fixed", tau=0.9)
    trainer, differences = train(FastGRPOTrainer, model, tmp_path, fastrl=config)
    assert len(differences) == 4
    assert max(differences) < 0.01, "vLLM computes in bfloat16; more is another set of weights"
    assert (
        max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), before, strict=True))
        > 0.01
    )
    trained = [
        row["fastrl/trained/rows"] for row in trainer.state.log_history if "fastrl/trained/rows" in row
    ]
    assert all(0 < rows <= 8 for rows in trained)
    assert min(trained) < 8, "something must have been pruned"
    for micro_batch in (m for m in trainer._micro_batches if m is not None):
        ratio = micro_batch["importance_sampling_ratio"]
        assert 0.9 < float(ratio.min()) <= float(ratio.max()) < 1.1


def test_the_difference_shows_weights_that_were_not_synced(model, tmp_path):
    config = FastRLConfig(pruner="none", budget="fixed")
    _, differences = train(FastGRPOTrainer, model, tmp_path, synced=False, fastrl=config)
    assert max(differences) > 0.02


def test_groups_of_different_sizes(model, tmp_path):
    config = FastRLConfig(pruner="none", budget="fixed")
    trainer, differences = train(FastGRPOTrainer, model, tmp_path, counts=[2, 3], fastrl=config)
    assert max(differences) < 0.01
    log = trainer.state.log_history[0]
    assert (log["fastrl/num_rollouts/min"], log["fastrl/num_rollouts/max"], log["fastrl/rollouts"]) == (
        2,
        3,
        5,
    )


def test_stock_trl_runs_the_same_way(model, tmp_path):
    """What the others are compared with: if this fails, it is the environment."""
    _, differences = train(GRPOTrainer, model, tmp_path)
    assert max(differences) < 0.01
