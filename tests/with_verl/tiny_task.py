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
    """1 for an answer that begins with one of the right digits, 0.2 for one that has one somewhere."""
    right = solution_str.strip()[:1] in [*ground_truth]
    score = 1.0 if right else 0.2 * any(digit in solution_str for digit in ground_truth)
    return {"score": score, "acc": float(right)}


def make(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    """Write model, tokenizer and prompts, the same in every call."""
    import datasets
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
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
            # None, one or five right digits: a budget has something to tell apart.
            "reward_model": {
                "style": "rule",
                "ground_truth": ["", "02468", "3", "02468"][i % 4],
            },
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(NUM_PROMPTS)
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(rows[:4]).to_parquet(folder / "val.parquet")
    return folder


def make_with_images(folder: Path) -> Path:
    """The same with a drawn image in every prompt, for a tiny Qwen2.5-VL of random weights."""
    import datasets
    import torch
    from PIL import Image
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = _tokenizer()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *marks]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'][:1] }}\n{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|>"
        "<|vision_end|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
    )
    ids = dict(zip(marks, tokenizer.convert_tokens_to_ids(marks), strict=True))
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    prefer_digits(model, tokenizer)
    model.save_pretrained(folder / "model")
    sizes = {"min_pixels": 56 * 56, "max_pixels": 56 * 56}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"<image>{i}?"}],
            "images": [Image.new("RGB", (56, 56), (16 * i, 255 - 16 * i, 100))],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(NUM_PROMPTS)
    ]
    features = datasets.Dataset.from_list([{k: v for k, v in rows[0].items() if k != "images"}]).features
    features["images"] = datasets.List(datasets.Image())
    for name, chosen in (("train", rows), ("val", rows[:4])):
        datasets.Dataset.from_list(chosen, features=features).to_parquet(folder / f"{name}.parquet")
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
