"""Tiny models and scripted rollouts: the same completions and rewards for stock TRL and for FastRL."""

import hashlib
import warnings
from collections import Counter

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from fastrl.integrations.trl import FastGRPOTrainer

NUM_WORDS = 40
NEVER = "w39"  # a word that no prompt uses


def text_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(NUM_WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def text_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=NUM_WORDS + 2,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def saved_text_model(folder) -> Qwen2ForCausalLM:
    """A model that TRL can load a second time, as the reference."""
    text_model().save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder)


def text_dataset(num_prompts: int = 8) -> Dataset:
    """Prompts of different lengths; "w0" marks those whose rollouts all earn the same."""
    prompts = [
        " ".join((["w0"] if i % 4 == 0 else ["w1"]) + [f"w{2 + i}"] * (1 + i % 3)) for i in range(num_prompts)
    ]
    return Dataset.from_dict({"prompt": prompts})


def vision_dataset(num_prompts: int = 8, image_counts: tuple[int, ...] = (1, 2)) -> Dataset:
    """Prompts with different numbers of images."""
    from fastrl.data.testbed import problems

    drawn = [problem.image for problem in problems("train", 2 * num_prompts, 3)]
    rows = {
        "prompt": [
            [{"role": "user", "content": f"Find the {['angle', 'length'][i % 2]} x ."}]
            for i in range(num_prompts)
        ],
        "images": [drawn[2 * i : 2 * i + image_counts[i % len(image_counts)]] for i in range(num_prompts)],
        "kind": ["w0" if i % 4 == 0 else "w1" for i in range(num_prompts)],
    }
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict(
        rows, features=Features(prompt=List(message), images=List(Image()), kind=Value("string"))
    )


def scripted_ids(prompt_ids, occurrence: int, step: int, fixed_length: int | None, words: range) -> list[int]:
    digest = hashlib.sha256(repr((list(prompt_ids), occurrence, step)).encode()).digest()
    rng = np.random.default_rng(list(digest[:8]))
    length = fixed_length or int(rng.integers(1, 9))
    return [*rng.integers(words.start, words.stop, size=length).tolist(), 1]


class Scripted:
    """A trainer whose model does not sample: rollouts depend on (prompt, occurrence, step) alone."""

    fixed_length: int | None = None

    @property
    def words(self) -> range:
        return range(60, 120) if self._is_vlm else range(2, 30)  # never the image token

    def _generate_single_turn(
        self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False
    ):
        seen: Counter = Counter()
        completions = []
        for ids in prompt_ids:
            key = tuple(ids)
            completions.append(
                scripted_ids(ids, seen[key], self.state.global_step, self.fixed_length, self.words)
            )
            seen[key] += 1
        return completions, None


class ScriptedStock(Scripted, GRPOTrainer):
    pass


class ScriptedFast(Scripted, FastGRPOTrainer):
    pass


def parity_reward(prompts, completion_ids, kind=None, **_):
    """0 or 1 by the sum of the tokens; constant for prompts that are marked."""
    marks = kind or [str(prompt) for prompt in prompts]
    return [
        1.0 if "w0" in mark else float(sum(ids) % 2) for mark, ids in zip(marks, completion_ids, strict=True)
    ]


def length_reward(completion_ids, prompts, kind=None, **_):
    """A small continuous part, so that advantages take many values."""
    marks = kind or [str(prompt) for prompt in prompts]
    return [0.0 if "w0" in mark else 0.05 * len(ids) for mark, ids in zip(marks, completion_ids, strict=True)]


class KeepGradients(TrainerCallback):
    """Copies the gradient right before each optimizer step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        parts = [
            p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()
        ]
        self.gradients.append(torch.cat(parts).double())


def grpo_args(folder, **settings) -> GRPOConfig:
    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "seed": 7,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOConfig(**{**defaults, **settings})


def train(trainer_class, folder, *, model=None, dataset=None, processing_class=None, reward_funcs=None,
          callbacks=(), fixed_length=None, resume=None, trainer_kwargs=None, **settings):  # fmt: skip
    """Train a tiny model; returns the trainer and the gradient of every optimizer step."""
    keep = KeepGradients()
    trainer = trainer_class(
        model=model if model is not None else text_model(),
        reward_funcs=reward_funcs or [parity_reward, length_reward],
        args=grpo_args(folder, **settings),
        train_dataset=dataset if dataset is not None else text_dataset(),
        processing_class=processing_class or text_tokenizer(),
        callbacks=[keep, *callbacks],
        **(trainer_kwargs or {}),
    )
    trainer.fixed_length = fixed_length
    trainer.train(resume_from_checkpoint=resume)
    return trainer, keep.gradients


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
