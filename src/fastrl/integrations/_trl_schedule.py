"""How TRL's micro-steps, rounds, optimizer windows and epochs fit together; and what FastRL cannot serve."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

from datasets import IterableDataset

from fastrl.config import FastRLConfig
from fastrl.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run counted in rounds: one generation, used for several micro-steps and iterations.

    Args:
        prompts_per_round: P.
        rounds_per_epoch, total_rounds: The incomplete last round of an epoch is left out, as TRL does.
        micro_steps_per_round: steps_per_generation * num_iterations.
        accumulation: Micro-steps of an optimizer step; fewer in the last one of an epoch.
        windows_per_round: Optimizer windows that one iteration over a round feeds.
        steps_per_window: Micro-steps that it gives to each.
    """

    prompts_per_round: int
    rounds_per_epoch: int
    total_rounds: int
    micro_steps_per_round: int
    accumulation: int
    windows_per_round: int
    steps_per_window: int

    @classmethod
    def of(cls, args: Any, num_iterations: int, num_prompts: int) -> "Schedule":
        """Derive the schedule from TRL's arguments.

        Raises:
            ConfigError: fewer prompts than one round needs.
        """
        prompts_per_round = args.generation_batch_size // args.num_generations
        rounds_per_epoch = num_prompts // prompts_per_round
        if rounds_per_epoch == 0:
            raise ConfigError(
                f"train_dataset has {num_prompts} prompts, fewer than the {prompts_per_round} of one round "
                f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}). "
                "Give more prompts, or lower per_device_train_batch_size or steps_per_generation."
            )
        micro_steps_per_round = args.steps_per_generation * num_iterations
        accumulation = args.gradient_accumulation_steps
        updates_per_epoch = -(-rounds_per_epoch * micro_steps_per_round // accumulation)
        updates = (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * updates_per_epoch)
        )
        epochs, rest = divmod(updates, updates_per_epoch)
        windows_per_round, steps_per_window = _windows(args.steps_per_generation, accumulation)
        return cls(
            prompts_per_round=prompts_per_round,
            rounds_per_epoch=rounds_per_epoch,
            total_rounds=max(1, epochs * rounds_per_epoch + -(-rest * accumulation // micro_steps_per_round)),
            micro_steps_per_round=micro_steps_per_round,
            accumulation=accumulation,
            windows_per_round=windows_per_round,
            steps_per_window=steps_per_window,
        )

    def micro_steps(self, updates: int) -> int:
        """Micro-steps that were done after a number of optimizer steps."""
        per_epoch = self.rounds_per_epoch * self.micro_steps_per_round
        epochs, rest = divmod(updates, -(-per_epoch // self.accumulation))
        return epochs * per_epoch + rest * self.accumulation


def _windows(steps_per_generation: int, accumulation: int) -> tuple[int, int]:
    """(optimizer windows that a round feeds, micro-steps it gives to each)."""
    if steps_per_generation % accumulation == 0:
        return steps_per_generation // accumulation, accumulation
    if accumulation % steps_per_generation == 0:
        return 1, steps_per_generation
    return steps_per_generation, 1  # misaligned: every micro-step may end up in another window


def check_supported(trainer: Any, config: FastRLConfig) -> None:
    """Refuse at construction what cannot work, with what to do instead.

    Raises:
        ConfigError: ranks that share rows or get others' batches, an iterable data set, or an outcome_key that
            names no reward.
    """
    _check_loading(trainer.args.accelerator_config, trainer.accelerator)
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ConfigError(
            "train_dataset is an IterableDataset: its prompts have no stable number to key G_t and a resume by. "
            "Give a map-style datasets.Dataset."
        )
    if (
        trainer._is_vlm
        and trainer.accelerator.num_processes > 1
        and trainer.args.ddp_find_unused_parameters is False
    ):
        warnings.warn(
            "ddp_find_unused_parameters: false with images on several processes: where some prompts have no image, the "
            "gradients of the vision tower are not reduced if the last micro-batch of a step has none. Leave it unset.",
            stacklevel=3,
        )
    if config.updates == "rows":
        raise ConfigError(
            "updates: rows trains in fewer optimizer steps than without pruning, but TRL's schedule, epochs and resume "
            "count them. Set updates: fixed."
        )
    if config.outcome_key is not None and config.outcome_key not in trainer.reward_func_names:
        raise ConfigError(
            f"outcome_key: {config.outcome_key!r} is none of the reward functions "
            f"{', '.join(trainer.reward_func_names)}. Name the one that says whether the task was solved."
        )
    if config.similarity == "surprisal" and not trainer.use_vllm:
        raise ConfigError(
            "similarity: surprisal weighs tokens by the sampler's log-probs, which TRL has with vLLM only. Set "
            "use_vllm, or similarity: centred."
        )
    if config.similarity == "gradient":
        raise ConfigError(
            "similarity: gradient needs a sketch of every rollout's gradient: a forward pass over all of them, which "
            "pruning is to save, so the TRL adapter makes none. Set similarity: centred."
        )
    if trainer.beta and config.zero_variance == "drop":
        warnings.warn(
            f"zero_variance: drop with beta={trainer.beta:g} also drops the KL term of these groups. Set "
            "zero_variance: keep_all to keep it.",
            stacklevel=3,
        )


def _check_loading(loading: Any, accelerator: Any) -> None:
    """Every rank must draw the same prompts itself, and rows of its own."""
    for name in ("split_batches", "dispatch_batches"):
        if getattr(loading, name):
            raise ConfigError(
                f"accelerator_config {name}: true deals the rows of one process out to the others; FastRL gives every "
                f"rank the same prompts, and each generates its share of their rollouts. Leave {name} unset."
            )
    layout = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(layout, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp")} if layout else {}
    shared = [f"{name}_size={size}" for name, size in sizes.items() if size > 1]
    if shared:
        raise ConfigError(
            f"parallelism_config {', '.join(shared)}: ranks that share rows (tensor, context or sequence parallelism) "
            "would each be given rows of their own. Use data parallelism (DDP, FSDP, DeepSpeed ZeRO), or the verl "
            "integration."
        )
