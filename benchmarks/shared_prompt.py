"""A prompt once per group: what each part saves of a step, alone and together, with pruning and without.

    python benchmarks/shared_prompt.py                 # the testbed
    python benchmarks/shared_prompt.py --large         # a random model of 45 M parameters with 625 image tokens
    python benchmarks/shared_prompt.py --generation    # that model's generation alone
    python benchmarks/shared_prompt.py --update        # forward and backward alone, 1 to 4 survivors each

All ways run in one process, in turns, so that a drift of the machine falls on all alike. Prints markdown.
"""

# ruff: noqa: E402  (settings that torch reads when it is loaded come first)

from fastrl.cli import set_environment

set_environment()

import argparse
import contextlib
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
from fastrl.bench.settings import ALL_ROLLOUTS
from fastrl.bench.training import Method, train_method
from fastrl.integrations._trl_generation import GroupsMixin
from fastrl.integrations._trl_prefill import SharedPrefill
from fastrl.integrations._trl_prefix import SharedPrefix
from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer


@dataclass(frozen=True, kw_only=True)
class Way:
    """A method, and which parts of `share_prompt` are switched on: users have both or neither."""

    method: Method
    prefill: bool = True
    prefix: bool = True

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self.prefill:
                stack.enter_context(mock.patch.object(GroupsMixin, "_prefill_of_model", return_value=None))
            if not self.prefix:
                never = property(lambda _: False)
                stack.enter_context(mock.patch.object(SharedPrefix, "is_active", never))
            yield


ALL = FastRLConfig(**ALL_ROLLOUTS)
PRUNED = FastRLConfig(budget="fixed")
WAYS = (
    Way(method=Method(key="stock", label="stock TRL")),
    Way(method=Method(key="all", label="all rollouts, both parts", fastrl=ALL)),
    Way(method=Method(key="off", label="tau 0.8, neither", fastrl=PRUNED), prefill=False, prefix=False),
    Way(method=Method(key="prefill", label="tau 0.8, shared prefill", fastrl=PRUNED), prefix=False),
    Way(method=Method(key="prefix", label="tau 0.8, packed survivors", fastrl=PRUNED), prefill=False),
    Way(method=Method(key="both", label="tau 0.8, both parts", fastrl=PRUNED)),
)
IMAGE, PATCH, SIDE = 4, 16, 400  # 25 x 25 patches
NUM_PROMPTS, NUM_ROLLOUTS, NUM_WORDS, NUM_NEW = 2, 8, 16, 24


def steps(args: argparse.Namespace) -> str:
    """Median seconds of steps of the testbed and of their stages."""
    recipe = read_recipe(args.recipe, [f"task.num_threads={args.threads}"]).replace(
        max_steps=args.warm_up + args.steps
    )

    def run(way: Way) -> list[dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder, way.switched():
            return train_method(recipe, way.method, seed=0, folder=Path(folder), evaluate=False).metrics

    return table(args, run)


def table(args: argparse.Namespace, run: Any) -> str:
    found: dict[str, list[dict[str, float]]] = {way.method.key: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in (*WAYS, *WAYS[::-1]):
            rows = run(way)[args.warm_up :]

            def median(name: str, rows: list[dict[str, float]] = rows) -> float:
                return float(np.median([row[name] for row in rows]))

            found[way.method.key].append(
                {
                    "generation": median("fastrl/time/generation_s"),
                    "update": median("fastrl/time/update_s") + median("fastrl/time/old_ref_s"),
                    "step": median("step_s"),
                    "saved": float(np.mean([row["fastrl/prompt_tokens_saved"] for row in rows])),
                    "kept": float(
                        np.mean([row["fastrl/trained/rows"] / row["fastrl/rollouts"] for row in rows])
                    ),
                }
            )
    lines = [
        "| | kept | generation, s | log-probs, update, s | step, s | of stock (range) | prompt tokens saved |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        blocks = found[way.method.key]
        ratios = [block["step"] / stock["step"] for block, stock in zip(blocks, found["stock"], strict=True)]
        middle = {name: float(np.median([block[name] for block in blocks])) for name in blocks[0]}
        lines.append(
            f"| {way.method.label} | {middle['kept']:.0%} | {middle['generation']:.2f} | {middle['update']:.2f} "
            f"| {middle['step']:.2f} | {np.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f}) "
            f"| {middle['saved']:,.0f} |"
        )
    return "\n".join(lines)


def large_steps(args: argparse.Namespace) -> str:
    """The same for the large model: rewards of chance, so that the kept share is what redundancy leaves."""

    def run(way: Way) -> list[dict[str, float]]:
        with tempfile.TemporaryDirectory() as folder, way.switched():
            trainer = large_trainer(Path(folder), way.method.fastrl, max_steps=args.warm_up + args.steps)
            trainer.train()
            rows = [row for row in trainer.state.log_history if "fastrl/time/update_s" in row]
            return [{**row, "step_s": row["step_time"]} for row in rows]

    return table(args, run)


def large_trainer(folder: Path, fastrl: FastRLConfig | None, *, max_steps: int) -> Any:
    """A trainer of the large model, one picture per prompt, rewards of chance; None = stock TRL."""
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Picture
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from trl import GRPOConfig

    from fastrl.testbed import load

    small, processor = load()
    side = {"height": SIDE, "width": SIDE}
    pictures = LlavaImageProcessorPil(size=side, crop_size=side, do_resize=False, do_center_crop=False)
    processor = LlavaProcessor(
        image_processor=pictures, tokenizer=processor.tokenizer, patch_size=PATCH,
        vision_feature_select_strategy="full", chat_template=processor.tokenizer.chat_template,
    )  # fmt: skip
    rows = {
        "prompt": [[{"role": "user", "content": "Find the angle x ."}] for _ in range(NUM_PROMPTS * 2)],
        "images": [[Picture.new("RGB", (SIDE, SIDE), (40 * i, 99, 9))] for i in range(NUM_PROMPTS * 2)],
    }
    message = {"role": Value("string"), "content": Value("string")}
    data = Dataset.from_dict(rows, features=Features(prompt=List(message), images=List(Image())))

    def by_chance(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 2) for ids in completion_ids]

    config = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=NUM_PROMPTS * NUM_ROLLOUTS,
        num_generations=NUM_ROLLOUTS, max_completion_length=NUM_NEW, max_steps=max_steps,
        learning_rate=1e-7, beta=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    model = large_model(small.config.image_token_id, small.config.get_text_config().vocab_size)
    extra = {} if fastrl is None else {"fastrl": fastrl}
    kind = TimedGRPOTrainer if fastrl is None else FastGRPOTrainer
    return kind(
        model=model,
        processing_class=processor,
        reward_funcs=by_chance,
        args=config,
        train_dataset=data,
        **extra,
    )


def large_model(image: int = IMAGE, vocabulary: int = 8000) -> LlavaForConditionalGeneration:
    """About 45 M random parameters: SigLIP's tower, Llama's decoder, 625 image tokens."""
    torch.manual_seed(0)
    vision = SiglipVisionConfig(
        hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6, image_size=SIDE,
        patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=1024, pad_token_id=0, eos_token_id=None, bos_token_id=2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image, vision_feature_select_strategy="full",
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


def update(args: argparse.Namespace) -> str:
    """Seconds of log-probs with gradients, packed against row by row, in pairs."""
    from trl.trainer.utils import add_fused_lm_head

    from fastrl.integrations._trl_prefix import PackedModel, pack
    from fastrl.testbed import load

    def batch_of(num_prompts: int, survivors: int, image: int, num_image: int, side: int) -> dict[str, Any]:
        groups = np.repeat(np.arange(num_prompts), survivors).tolist()
        words = torch.randint(60, 120, (num_prompts, 7))
        prompts = torch.cat([torch.full((num_prompts, num_image), image), words], 1)[groups]
        lengths = torch.randint(6, 20, (len(groups),))
        mask = torch.cat([torch.ones_like(prompts), (torch.arange(20) < lengths[:, None]).long()], 1)
        ids = torch.cat([prompts, torch.randint(60, 120, (len(groups), 20))], 1).masked_fill(mask == 0, 60)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : prompts.shape[1]] = -100
        pixels = torch.randn(num_prompts, 3, side, side)[groups]
        return {
            "groups": groups, "inputs": {
                "input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels,
                "fused_lm_head": True,
            },
        }  # fmt: skip

    def seconds(model: Any, batch: dict[str, Any], *, packed: bool) -> float:
        start = time.perf_counter()
        plan = pack(batch["inputs"]["attention_mask"], 20, batch["groups"]) if packed else None
        called = model if plan is None else PackedModel(model, plan, None)
        called(**batch["inputs"]).log_probs.sum().backward()
        model.zero_grad()
        return time.perf_counter() - start

    lines = [
        "| survivors per prompt | testbed (36 image tokens) | 45 M parameters, 625 image tokens |",
        "|---|---|---|",
    ]
    small, _ = load()
    large = large_model()
    cells: dict[int, list[str]] = {1: [], 2: [], 3: [], 4: []}
    for model, num_prompts, image, num_image, side in (
        (small, 8, small.config.image_token_id, 36, 96),
        (large, 2, IMAGE, (SIDE // PATCH) ** 2, SIDE),
    ):
        add_fused_lm_head(model)
        for survivors, row in cells.items():
            batch = batch_of(num_prompts, survivors, image, num_image, side)
            seconds(model, batch, packed=True)
            pairs = [
                [seconds(model, batch, packed=flag) for flag in (False, True)] for _ in range(args.repeats)
            ]
            ratios = sorted(after / before for before, after in pairs)
            row.append(f"{np.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")
    return "\n".join([*lines, *(f"| {number} | {' | '.join(row)} |" for number, row in cells.items())])


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--generation", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/testbed/quickstart.yaml"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    ways = {"generation": generation, "update": update, "large": large_steps}
    print(next((way for name, way in ways.items() if getattr(args, name)), steps)(args))


if __name__ == "__main__":
    main()
