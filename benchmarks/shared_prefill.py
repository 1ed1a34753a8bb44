"""One prefill per prompt: what it saves of generation and of a step, with pruning and without.

    python benchmarks/shared_prefill.py            # the testbed, steps of training
    python benchmarks/shared_prefill.py --large    # generation of a random model with 600 image tokens

All ways run in one process, in turns, so that a drift of the machine falls on all alike. Prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from fastrl import FastRLConfig
from fastrl.bench.recipe import read_recipe
from fastrl.bench.training import Method, train_method
from fastrl.integrations._trl_prefill import SharedPrefill

METHODS = (
    Method(key="stock", label="stock TRL"),
    Method(
        key="all", label="all rollouts, shared prefill",
        fastrl=FastRLConfig(pruner="none", zero_variance="keep_all", denominator="full", budget="fixed"),
    ),
    Method(key="pruned", label="tau 0.8", fastrl=FastRLConfig(budget="fixed", share_prompt="off")),
    Method(key="both", label="tau 0.8, shared prefill", fastrl=FastRLConfig(budget="fixed")),
)  # fmt: skip
IMAGE, PATCH, SIDE = 4, 16, 400  # 25 x 25 patches
NUM_PROMPTS, NUM_ROLLOUTS, NUM_WORDS, NUM_NEW = 2, 8, 16, 24


def steps(args: argparse.Namespace) -> str:
    """Median seconds of steps and of their generation."""
    recipe = read_recipe(args.recipe, [f"task.num_threads={args.threads}"]).replace(
        max_steps=args.warm_up + args.steps
    )
    found: dict[str, list[dict[str, float]]] = {method.key: [] for method in METHODS}
    for _ in range(args.repeats):
        for method in (*METHODS, *METHODS[::-1]):
            with tempfile.TemporaryDirectory() as folder:
                run = train_method(recipe, method, seed=0, folder=Path(folder), evaluate=False)
            rows = run.metrics[args.warm_up :]
            found[method.key].append(
                {
                    "step": float(np.median([row["step_s"] for row in rows])),
                    "generation": float(np.median([row["fastrl/time/generation_s"] for row in rows])),
                    "saved": float(np.mean([row["fastrl/prompt_tokens_saved"] for row in rows])),
                }
            )
    lines = [
        "| | generation, s | of stock | step, s | of stock (range over repeats) | prompt tokens saved per step |",
        "|---|---|---|---|---|---|",
    ]
    base = found["stock"]
    for method in METHODS:
        blocks = found[method.key]
        ratios = [block["step"] / stock["step"] for block, stock in zip(blocks, base, strict=True)]
        generation = np.median([block["generation"] for block in blocks])
        lines.append(
            f"| {method.label} | {generation:.3f} | {generation / np.median([b['generation'] for b in base]):.2f} "
            f"| {np.median([b['step'] for b in blocks]):.3f} "
            f"| {np.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
            f"| {np.mean([b['saved'] for b in blocks]):,.0f} |"
        )
    return "\n".join(lines)


def large_model() -> LlavaForConditionalGeneration:
    """About 50 M random parameters: SigLIP's tower, Llama's decoder, 625 image tokens."""
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6, image_size=SIDE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=1024, pad_token_id=0, eos_token_id=None, bos_token_id=2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).eval()


def generation(args: argparse.Namespace) -> str:
    """Seconds to generate G rollouts for each of a few prompts with an image."""
    model = large_model()
    num_parameters = sum(p.numel() for p in model.parameters()) / 1e6
    tokens = (SIDE // PATCH) ** 2
    words = torch.randint(5, 8000, (NUM_PROMPTS, NUM_WORDS))
    ids = torch.cat([torch.full((NUM_PROMPTS, tokens), IMAGE), words], dim=1)
    pixels = torch.randn(NUM_PROMPTS, 3, SIDE, SIDE)
    index = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_ROLLOUTS)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NUM_NEW, pad_token_id=0)
    prefill = SharedPrefill(model)
    shared = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    ordinary = {name: value[index] for name, value in shared.items()}

    def seconds(is_shared: bool) -> float:
        start = time.perf_counter()
        if is_shared:
            with prefill.sharing(index):
                model.generate(**shared, generation_config=config)
        else:
            model.generate(**ordinary, generation_config=config)
        return time.perf_counter() - start

    seconds(is_shared=True)  # compares both paths, once
    assert prefill.reason is None, prefill.reason
    pairs = [(seconds(is_shared=False), seconds(is_shared=True)) for _ in range(args.repeats)]
    ratios = [fast / slow for slow, fast in pairs]
    return (
        f"{num_parameters:.0f} M parameters, {NUM_PROMPTS} prompts x {NUM_ROLLOUTS} rollouts, {tokens} image tokens + "
        f"{NUM_WORDS} words, {NUM_NEW} new tokens: ordinary {np.median([p[0] for p in pairs]):.1f} s, shared "
        f"{np.median([p[1] for p in pairs]):.1f} s, ratio {np.median(ratios):.2f} "
        f"({min(ratios):.2f} - {max(ratios):.2f})"
    )


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/testbed/quickstart.yaml"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    print(generation(args) if args.large else steps(args))


if __name__ == "__main__":
    main()
