"""FastRL's settings on EasyR1's command line, and what of EasyR1 they cannot be combined with."""

from collections.abc import Sequence
from typing import Any

from fastrl.budgets import REMEMBERING
from fastrl.config import FastRLConfig, parse_yaml
from fastrl.types import ConfigError

_ESTIMATORS = ("grpo", "rloo")


def settings_of(arguments: Sequence[str]) -> tuple[FastRLConfig, list[str]]:
    """Read `fastrl.*=value` from a command line; returns the settings, and what is EasyR1's.

    Raises:
        ConfigError: an unknown setting or a value that cannot work.
    """
    block: dict[str, Any] = {}
    others = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.startswith("fastrl."):
            block[name.removeprefix("fastrl.")] = parse_yaml(value, argument)
        else:
            others.append(argument)
    return FastRLConfig.from_dict(block), others


def check_supported(config: Any, settings: FastRLConfig) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: says what was given, why it cannot work, and what to do.
    """
    if settings.is_identity:
        return
    algorithm = config.algorithm
    found = []
    if str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator)) not in _ESTIMATORS:
        found.append(
            f"algorithm.adv_estimator={algorithm.adv_estimator} does not compare the rollouts of one prompt by one "
            f"number each. Use {' or '.join(_ESTIMATORS)}."
        )
    if not algorithm.disable_kl and not algorithm.use_kl_loss:
        found.append(
            "algorithm.use_kl_loss=false puts the KL term into rewards, which then need log-probs of every rollout. "
            "Set algorithm.use_kl_loss=true."
        )
    if settings.refill != "none":
        found.append(
            f"fastrl.refill={settings.refill}: EasyR1 samples more prompts itself. Set algorithm.online_filtering=true "
            "and leave refill at none."
        )
    if settings.similarity in ("gradient", "surprisal"):
        found.append(
            f"fastrl.similarity={settings.similarity} needs what EasyR1's sampler does not return. Set "
            "fastrl.similarity=centred."
        )
    if settings.budget in REMEMBERING and algorithm.online_filtering:
        found.append(
            f"fastrl.budget={settings.budget} gives prompts different counts, and algorithm.online_filtering looks at "
            "groups of one size. Choose one of the two."
        )
    for problem in found:
        raise ConfigError(problem)
