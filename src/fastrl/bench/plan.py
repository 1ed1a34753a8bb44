"""What a recipe would do: rows, batch shapes, steps, tokens and memory, without loading a model.

Memory is that of one process under full sharding (FSDP, ZeRO-3), the usual way to train the published sizes:

    weights, gradients, two moments: 4 x (2 or 4 bytes) x parameters / processes
    gathered weights of the largest layer group: not counted; activations: with gradient checkpointing
    layers x row tokens x hidden x 2 bytes, and the logits of a micro-batch: rows x tokens x vocabulary x 4 bytes
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastrl.bench.recipe import Recipe
from fastrl.bench.tasks import DataTask
from fastrl.data.prompts import PIXELS_PER_TOKEN
from fastrl.types import ConfigError

KEPT_SHARE = 0.38
"""Rollouts that the paper's runs trained on, as inverted from its stage times (docs/simulate.md)."""
PUBLISHED_ROWS = {"geometry3k": (2101, 601), "geoqa8k-r1v": (8031, 754), "math": (11250, 1250)}
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The arithmetic of a round: TRL's batch settings for a number of processes.

    Args:
        processes: Ranks.
        rows_per_round: Rollouts that are generated at once, over all ranks (G prompts' worth at the ceiling).
        num_rollouts: G at the ceiling.
        rows_per_update: Rollouts of one optimizer step.
        rows_per_micro_batch: Rollouts of one forward and backward pass of one rank.
    """

    processes: int
    rows_per_round: int
    num_rollouts: int
    rows_per_update: int
    rows_per_micro_batch: int

    @property
    def prompts(self) -> int:
        """Prompts per round."""
        return self.rows_per_round // self.num_rollouts

    @property
    def updates(self) -> float:
        """Optimizer steps per round; below 1 where a step spans several rounds."""
        return self.rows_per_round / self.rows_per_update

    def micro_batches(self, kept_share: float = 1.0) -> int:
        """Forward and backward passes of a rank per update, at a share of kept rollouts."""
        rows = max(1, round(self.rows_per_update * kept_share / self.processes))
        return -(-rows // self.rows_per_micro_batch)


def batches(recipe: Recipe, processes: int) -> Batches:
    """Read the batch shapes from a recipe's trainer keys.

    Raises:
        ConfigError: they do not divide.
    """
    args = recipe.grpo_config("unused")
    per_pass = args.per_device_train_batch_size * processes
    rows_per_update = per_pass * args.gradient_accumulation_steps
    if recipe.trainer.get("generation_batch_size") is not None:
        rows = int(recipe.trainer["generation_batch_size"])
    else:
        rows = per_pass * int(recipe.trainer.get("steps_per_generation") or args.gradient_accumulation_steps)
    if rows % per_pass or rows % args.num_generations:
        raise ConfigError(
            f"{recipe.name}: {rows} rollouts per generation are no multiple of per_device_train_batch_size "
            f"{args.per_device_train_batch_size} x {processes} processes, and of num_generations "
            f"{args.num_generations}. Change one of the three."
        )
    return Batches(
        processes=processes,
        rows_per_round=rows,
        num_rollouts=args.num_generations,
        rows_per_update=rows_per_update,
        rows_per_micro_batch=args.per_device_train_batch_size,
    )


def plan(recipe: Recipe, processes: int | None = None) -> dict[str, Any]:
    """Say what a run of a recipe would be.

    Args:
        recipe: The recipe.
        processes: Default: those the recipe is written for, else 1.

    Returns:
        `rows` {train, held_out, counted}, `batch`, `steps`, `tokens` (upper bounds), `memory` (GiB per process,
        None where it is not known), all JSON values.
    """
    task, args = recipe.task, recipe.grpo_config("unused")
    processes = processes or getattr(task, "processes", None) or 1
    shape = batches(recipe, processes)
    rows = count_rows(recipe)
    return {
        "rows": rows,
        "batch": _batch(shape),
        "steps": _steps(shape, rows["train"], args),
        "tokens": _tokens(shape, task, args),
        "memory": _memory(shape, task, args),
    }


def count_rows(recipe: Recipe) -> dict[str, Any]:
    """Rows of the training and the held-out set: counted where the data lies here, else as published."""
    task = recipe.task
    if not isinstance(task, DataTask):
        return {"train": task.train_prompts, "held_out": task.held_out_prompts, "counted": True}
    if task.source is not None:
        from fastrl.data.readers import load

        train, held_out = (
            sum(1 for _ in load(task.name, source=task.source, split=split, columns=task.columns))
            for split in (task.train_split, task.held_out_split)
        )
        counted = True
    else:
        (train, held_out), counted = PUBLISHED_ROWS[task.name], False
    return {
        "train": min(train, task.train_prompts or train),
        "held_out": min(held_out, task.held_out_prompts or held_out),
        "counted": counted,
    }


def _batch(shape: Batches) -> dict[str, Any]:
    return {
        "processes": shape.processes,
        "prompts_per_round": shape.prompts,
        "num_rollouts": shape.num_rollouts,
        "rollouts_per_round": shape.rows_per_round,
        "updates_per_round": shape.updates,
        "rollouts_per_update": shape.rows_per_update,
        "rows_per_micro_batch": shape.rows_per_micro_batch,
        "micro_batches_per_update": shape.micro_batches(),
        "micro_batches_per_update_pruned": shape.micro_batches(KEPT_SHARE),
        "kept_share": KEPT_SHARE,
    }


def _steps(shape: Batches, num_train: int, args: Any) -> dict[str, Any]:
    rounds, left_over = divmod(num_train, shape.prompts)
    if not rounds:
        raise ConfigError(
            f"{num_train} training prompts do not fill one round of {shape.prompts}. Lower generation_batch_size "
            "(and per_device_train_batch_size with it), or take more prompts."
        )
    by_epochs = round(args.num_train_epochs * rounds * shape.updates)
    total = args.max_steps if args.max_steps > 0 else by_epochs
    return {
        "rounds_per_epoch": rounds,
        "prompts_left_out_per_epoch": left_over,
        "optimizer_steps": total,
        "rounds": round(total / shape.updates),
    }


def _tokens(shape: Batches, task: Any, args: Any) -> dict[str, Any]:
    """Upper bounds per round; image tokens by Qwen's rule of one token for 28 x 28 pixels."""
    completion = args.max_completion_length
    max_pixels = getattr(task, "max_pixels", None)
    return {
        "sampled_at_most": shape.rows_per_round * completion,
        "trained_at_most": shape.rows_per_round * completion,
        "trained_at_most_pruned": round(shape.rows_per_round * KEPT_SHARE) * completion,
        "image_at_most": max_pixels // PIXELS_PER_TOKEN**2 if max_pixels else None,
    }


def _memory(shape: Batches, task: Any, args: Any) -> dict[str, Any] | None:
    sizes = _sizes(task)
    if sizes is None:
        return None
    dtype = (args.model_init_kwargs or {}).get("dtype", "float32")
    width = 2 if dtype in ("bfloat16", "float16") else 4
    state = 4 * width * sizes["parameters"] / shape.processes
    reference = width * sizes["parameters"] / shape.processes if args.beta else 0.0
    parts = {"weights, gradients, moments": state / _GIB, "reference model": reference / _GIB}
    if "vocabulary" in sizes:
        tokens = shape.rows_per_micro_batch * args.max_completion_length
        parts["logits of a micro-batch"] = 4 * tokens * sizes["vocabulary"] / _GIB
        layers = sizes["layers"] if args.gradient_checkpointing else 16 * sizes["layers"]
        parts["activations"] = 2 * tokens * layers * sizes["hidden"] / _GIB
    return {"parts": parts, "total": sum(parts.values()), "parameters": sizes["parameters"]}


def _sizes(task: Any) -> Mapping[str, float] | None:
    """Sizes of the task's model: from its configuration where a copy lies here, else from the recipe."""
    if not isinstance(task, DataTask):
        from fastrl.testbed import checkpoint_path

        return _sizes_of(str(checkpoint_path(task.problems)))
    found = _sizes_of(task.model)
    if found is not None or task.parameters is None:
        return found
    return {"parameters": task.parameters * 1e9}


def _sizes_of(model: str) -> Mapping[str, float] | None:
    """Count the parameters of a model from its configuration, on torch's meta device; nothing is downloaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):  # no copy of it here, or a model that this transformers does not know
        return None
    text = config.get_text_config()
    is_vlm = text is not config
    kind = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(config)
    return {
        "parameters": float(sum(p.numel() for p in built.parameters())),
        "vocabulary": float(text.vocab_size),
        "layers": float(text.num_hidden_layers),
        "hidden": float(text.hidden_size),
    }
