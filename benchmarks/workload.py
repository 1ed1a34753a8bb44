"""A workload of known size for the benchmarks: a random Qwen2, prompts of words, completions of given lengths.

Completions are scripted, so that log-probs and the update are measured alone, on the same rows for every method.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig

NUM_WORDS = 8_000
PROMPT_TOKENS = 32


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(NUM_WORDS))])
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model(hidden: int, num_layers: int) -> Qwen2ForCausalLM:
    """A model with random weights; hidden 256 and 4 layers are 7 M parameters, 512 and 12 are 51 M."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=NUM_WORDS + 2, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def prompts(number: int) -> Dataset:
    rng = np.random.default_rng(0)
    words = rng.integers(0, NUM_WORDS, (number, PROMPT_TOKENS))
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in words]})


def binary_reward(completion_ids: list, **_: Any) -> list[float]:
    return [float(sum(ids) % 2) for ids in completion_ids]


class ScriptedLengths:
    """Mix into a GRPOTrainer: completions of random words, of one length or log-normal ones."""

    completion_tokens = 64
    spread = 0.0

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple[list, None]:
        step, rank = self.state.global_step, self.accelerator.process_index  # type: ignore[attr-defined]
        rng = np.random.default_rng([step, rank])
        lengths = self.completion_tokens * np.exp(self.spread * rng.standard_normal(len(prompt_ids)))
        longest = self.max_completion_length - 1  # type: ignore[attr-defined]
        sizes = np.clip(lengths.astype(int), 1, longest)
        return [[*rng.integers(2, NUM_WORDS, size).tolist(), 1] for size in sizes], None


def arguments(folder: Path, **settings: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        "max_completion_length": 128, "learning_rate": 1e-6, "beta": 0.0, "seed": 0,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOConfig(**{**defaults, **settings})


def quiet() -> None:
    """Leave the trainer's printed logs out of a benchmark's output."""
    warnings.filterwarnings("ignore")
    from transformers.trainer_callback import PrinterCallback

    PrinterCallback.on_log = lambda *args, **kwargs: None  # type: ignore[method-assign]
