"""FastRL's settings inside verl's configuration, and what of verl they cannot be combined with."""

import warnings
from typing import Any

from omegaconf import OmegaConf

from fastrl.budgets import REMEMBERING
from fastrl.config import FastRLConfig
from fastrl.types import ConfigError

MODES = ("sync", "colocate_async")
"""Trainer modes of verl's V1 trainer that were run with FastRL."""

ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
"""Advantage estimators that compare the rollouts of a group and give each one number."""


def settings_of(config: Any) -> FastRLConfig:
    """Read the block `fastrl` of verl's configuration (`+fastrl.tau=0.8` on the command line).

    Raises:
        ConfigError: an unknown setting or a value out of range.
    """
    block = OmegaConf.select(config, "fastrl")
    return FastRLConfig.from_dict(OmegaConf.to_container(block, resolve=True) if block is not None else None)


def check_supported(config: Any, settings: FastRLConfig) -> None:
    """Refuse what cannot work before any model is loaded.

    Raises:
        ConfigError: says what was given, why it cannot work, and what to do.
    """
    for problem in _problems(config, settings):
        raise ConfigError(problem)
    for note in _notes(config, settings):
        warnings.warn(note, stacklevel=3)


def _problems(config: Any, settings: FastRLConfig) -> list[str]:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    mode, estimator = config.trainer.v1.trainer_mode, str(algorithm.adv_estimator)
    found = []
    if mode not in MODES:
        found.append(
            f"trainer.v1.trainer_mode={mode}: FastRL was run with {' and '.join(MODES)} only; a mode with a pool of "
            "its own for rollouts needs a weight transfer that was never tried with it. Use one of these."
        )
    if settings.is_identity:  # nothing below is touched
        return found
    if algorithm.use_kl_in_reward:
        found.append(
            "algorithm.use_kl_in_reward=True: rewards then need log-probs of every rollout, which pruning is to save. "
            "Set it to False, and actor_rollout_ref.actor.use_kl_loss=True for a KL term in the loss."
        )
    if config.critic.enable or estimator == "gae":
        found.append(
            f"algorithm.adv_estimator={estimator}, critic.enable={config.critic.enable}: a critic values every token "
            "of every rollout, so nothing could be pruned before it. Set algorithm.adv_estimator=grpo."
        )
    elif estimator not in ESTIMATORS:
        found.append(
            f"algorithm.adv_estimator={estimator} does not compare the rollouts of one prompt by one number each. Use "
            f"one of {', '.join(ESTIMATORS)}."
        )
    if OmegaConf.select(config, "distillation.enabled"):
        found.append(
            "distillation.enabled=True: a teacher's loss is taken over every rollout, also those without an advantage. "
            "Train one or the other."
        )
    if actor.get("use_prefix_grouper"):
        found.append(
            "actor_rollout_ref.actor.use_prefix_grouper=True needs groups of one size; pruned ones are not. Set it to "
            "False."
        )
    return found + _problems_of_settings(config, settings)


def _problems_of_settings(config: Any, settings: FastRLConfig) -> list[str]:
    found = []
    if settings.refill != "none":
        found.append(
            f"fastrl.refill={settings.refill}: in verl, more prompts are sampled by its replay buffer. Set "
            "algorithm.filter_groups.enable=True for DAPO's dynamic sampling, and leave refill at none."
        )
    if settings.similarity == "gradient":
        found.append(
            "fastrl.similarity=gradient needs a sketch of every rollout's gradient: a forward pass over all of them, "
            "which pruning is to save. Set fastrl.similarity=centred."
        )
    if settings.similarity == "surprisal" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        found.append(
            "fastrl.similarity=surprisal weighs tokens by the sampler's log-probs. Set "
            "actor_rollout_ref.rollout.calculate_log_probs=True."
        )
    if settings.budget in REMEMBERING and config.algorithm.filter_groups.enable:
        found.append(
            f"fastrl.budget={settings.budget} skips prompts, and algorithm.filter_groups takes a prompt without "
            "rollouts for an error. Choose one of the two."
        )
    return found


def _notes(config: Any, settings: FastRLConfig) -> list[str]:
    actor = config.actor_rollout_ref.actor
    found: list[str] = []
    if settings.is_identity:
        return found
    if settings.micro_batches == "shrink":
        found.append(
            "fastrl.micro_batches=shrink is ignored: verl packs micro-batches by "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu."
        )
    if actor.use_kl_loss and settings.zero_variance == "drop":
        found.append(
            "fastrl.zero_variance=drop with use_kl_loss also drops the KL term of these groups. Set "
            "fastrl.zero_variance=keep_all to keep it."
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        found.append(
            "loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each micro-batch, which pruning "
            "changes. Set actor_rollout_ref.actor.loss_scale_factor to a constant (data.max_response_length)."
        )
    if not actor.use_dynamic_bsz:
        found.append(
            "actor_rollout_ref.actor.use_dynamic_bsz=False: survivors are padded to whole micro-batches on every rank. "
            "Set it, with a token budget, to gain most from pruning."
        )
    return found
