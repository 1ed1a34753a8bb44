"""A tiny model and a task that it half solves by chance: what the tests train on real verl. Test support.

tiny_task.make(folder)      folder/model, folder/train.parquet, folder/val.parquet
compute_score(...)          verl's reward function
"""

from pathlib import Path
from typing import Any

NUM_PROMPTS = 16


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict:
    """1 for an answer that begins with the digit, 0.2 for one that has it somewhere."""
    right = solution_str.strip()[:1] == ground_truth
    return {"score": 1.0 if right else 0.2 * (ground_truth in solution_str), "acc": float(right)}


def make(folder: Path) -> Path:
    """Write model, tokenizer and prompts, the same in every call."""
    import datasets
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    prefer_digits(model, tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"{i % 8}+{i // 8}=?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str((i % 8 + i // 8) % 10)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(NUM_PROMPTS)
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(rows[:4]).to_parquet(folder / "val.parquet")
    return folder


def prefer_digits(model: Any, tokenizer: Any) -> None:
    """Random weights that mostly answer with a digit or an end: rewards then differ inside a group."""
    import torch

    likely = [tokenizer(digit)["input_ids"][0] for digit in "0123456789"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.lm_head.weight[:, 0] = -1.5
        model.lm_head.weight[likely, 0] = 1.5
        model.get_input_embeddings().weight[:, 0] = 3.0


def _tokenizer() -> Any:
    """Bytes, as the tokenizer class that Qwen models load: other kinds are rebuilt as it, wrongly."""
    from transformers import Qwen2Tokenizer

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + k) for k, byte in enumerate(others)}
    vocab = {letters[byte]: k for k, byte in enumerate([*printable, *others])}
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        vocab[special] = len(vocab)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'][:1] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>a\n' }}{% endif %}"
    )
    return tokenizer
