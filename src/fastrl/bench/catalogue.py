"""The methods and losses that `fastrl compare` knows by name, as settings on top of any recipe."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastrl.bench.recipe import OWN_KEYS, Recipe
from fastrl.bench.settings import ALL_ROLLOUTS
from fastrl.bench.training import Method
from fastrl.config import FastRLConfig, did_you_mean, parse_yaml, read_yaml
from fastrl.types import ConfigError

LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
}
"""Trainer keys of the published losses. DAPO's dynamic sampling is a method of its own (`dapo_dynamic`)."""

CARRIED = (
    "rollout_cost", "align", "micro_batches", "updates", "share_prompt", "outcome_key", "max_empty_steps", "trace",
)  # fmt: skip
"""Settings that every method takes from the recipe: they say how it runs and is rewarded, not what the method is."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A method by name.

    Args:
        label: What tables call it.
        fastrl: Changes of FastRL's published setting; None = stock TRL.
        num_rollouts: Fixed G; None = the recipe's.
        like: A method whose mean G_t of the same loss and seed is this one's fixed G.
        is_recipe: The recipe's own `fastrl:` block.
    """

    label: str
    fastrl: Mapping[str, Any] | None = field(default_factory=dict)
    num_rollouts: int | None = None
    like: str | None = None
    is_recipe: bool = False


METHODS: dict[str, Entry] = {
    "grpo": Entry(label="stock TRL", fastrl=None),
    "shared": Entry(label="nothing pruned, prompts shared", fastrl=ALL_ROLLOUTS),
    "fastrl": Entry(label="FastRL (the recipe's setting)", is_recipe=True),
    "unbiased": Entry(
        label="unbiased + discovery",
        fastrl={
            "tau": 0.1,
            "representative": "random",
            "weighting": 1.0,
            "denominator": "full",
            "zero_variance": "drop",
            "align": "dummy",
            "budget": "discovery",
        },
    ),
    "without_mdap": Entry(label="FastRL without MDAP", fastrl={"pruner": "none"}),
    "without_ars": Entry(label="FastRL without ARS", fastrl={"budget": "fixed"}),
    "cppo": Entry(
        label="CPPO",
        fastrl={"pruner": "top_advantage", "keep_share": 0.5, "refill": "kept", "budget": "fixed"},
    ),
    "pods": Entry(
        label="PODS",
        fastrl={"pruner": "max_variance", "keep_share": 0.25, "budget": "fixed", "zero_variance": "drop"},
    ),
    "greso": Entry(
        label="GRESO",
        fastrl={"pruner": "none", "budget": "greso", "refill": "signal", "denominator": "live"},
    ),
    "dapo_dynamic": Entry(
        label="DAPO's dynamic sampling",
        fastrl={
            "pruner": "none",
            "budget": "fixed",
            "refill": "signal",
            "max_refills": 9,
            "denominator": "live",
        },
    ),
    **{
        f"random{pruned}": Entry(
            label=f"random, {pruned} % pruned",
            fastrl={"pruner": "random", "keep_share": 1 - pruned / 100, "budget": "fixed"},
        )
        for pruned in (25, 50, 75)
    },
    "advantage_only": Entry(label="advantage-only", fastrl={"pruner": "advantage_only", "budget": "fixed"}),
    "2grpo": Entry(label="2-GRPO", fastrl=ALL_ROLLOUTS, num_rollouts=2),
    "fixed_g4": Entry(label="fixed G = 4", fastrl=ALL_ROLLOUTS, num_rollouts=4),
    "fixed_g": Entry(label="fixed G = mean G_t of unbiased", fastrl=ALL_ROLLOUTS, like="unbiased"),
}


def resolve(spec: str, recipe: Recipe) -> Method:
    """Build a method of a comparison.

    Args:
        spec: A name of `METHODS`; NAME:key=value,key=value for changes of its FastRL settings (fastrl:tau=0.4); or a
            YAML file with a `fastrl:` block (without one: stock TRL) and trainer keys.
        recipe: What the comparison trains.

    Raises:
        ConfigError: no such name or file, or settings that cannot work.
    """
    if spec.endswith((".yaml", ".yml")):
        return _from_file(Path(spec))
    name, _, changes = spec.partition(":")
    entry = METHODS.get(name)
    if entry is None:
        raise ConfigError(
            f"--methods {spec}: {name!r} is no method.{did_you_mean(name, METHODS)} Choose of "
            f"{', '.join(METHODS)}, or name a YAML file with a `fastrl:` block."
        )
    settings = _settings(entry, recipe)
    changed = _changes(spec, changes) if changes else {}
    if changed and settings is None:
        raise ConfigError(f"--methods {spec}: stock TRL has no settings of FastRL. Leave out {changes!r}.")
    return Method(
        key="-".join([name, *(f"{key}{value}" for key, value in changed.items())]),
        label=", ".join([entry.label, *(f"{key} {value}" for key, value in changed.items())]),
        fastrl=None if settings is None else FastRLConfig.from_dict({**settings, **changed}),
        trainer=with_rollouts(recipe, entry.num_rollouts) if entry.num_rollouts else {},
    )


def like(method: Method) -> str | None:
    """The key of the method whose mean G_t this one takes for its fixed G, if it does."""
    entry = METHODS.get(method.key)
    return None if entry is None else entry.like


def with_rollouts(recipe: Recipe, num_rollouts: int) -> dict[str, Any]:
    """Trainer keys for another fixed G with the same prompts per step."""
    rows, default = int(recipe.trainer["per_device_train_batch_size"]), int(recipe.trainer["num_generations"])
    if rows * num_rollouts % default:
        raise ConfigError(
            f"per_device_train_batch_size {rows} at num_generations {default} has no whole counterpart at "
            f"{num_rollouts}: rows per prompt change, prompts per step must not. Choose a multiple of {default}."
        )
    return {
        "num_generations": num_rollouts,
        "per_device_train_batch_size": rows * num_rollouts // default,
    }


def _settings(entry: Entry, recipe: Recipe) -> dict[str, Any] | None:
    if entry.fastrl is None:
        return None
    if entry.is_recipe:
        return recipe.fastrl.to_dict()
    carried = {key: getattr(recipe.fastrl, key) for key in CARRIED}
    return {**carried, **entry.fastrl}


def _changes(spec: str, changes: str) -> dict[str, Any]:
    pairs = [change.partition("=") for change in changes.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise ConfigError(f"--methods {spec}: expected NAME:key=value,key=value, such as fastrl:tau=0.4.")
    names = {f.name for f in dataclasses.fields(FastRLConfig)}
    for key, _, _ in pairs:
        if key not in names:
            raise ConfigError(f"--methods {spec}: {key!r} is no setting of FastRL.{did_you_mean(key, names)}")
    return {key: parse_yaml(text, f"--methods {spec}") for key, _, text in pairs}


def _from_file(path: Path) -> Method:
    content = read_yaml(path)
    block = content.get("fastrl")
    return Method(
        key=path.stem,
        label=path.stem.replace("_", " "),
        fastrl=None if block is None else FastRLConfig.from_dict(block),
        trainer={key: value for key, value in content.items() if key not in OWN_KEYS},
    )
