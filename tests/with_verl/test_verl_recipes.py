"""The command lines that `fastrl train --command verl` prints are ones that verl and the adapter accept."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import hydra
from verl.utils.config import omega_conf_to_dataclass

from fastrl.bench.engines import command
from fastrl.bench.recipe import Recipe
from fastrl.bench.tasks import parse_task
from fastrl.config import FastRLConfig, merge, read_yaml
from fastrl.integrations._verl_settings import check_supported, settings_of

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(
    path for name in ("geometry3k", "geoqa8k_r1v", "math") for path in (RECIPES / name).glob("*.yaml")
)
METHODS = ("paper", "unbiased", "baseline")


def recipe_of(*paths: Path) -> Recipe:
    """Without TRL, which checks the keys of a recipe and is not in this environment."""
    content: dict = {}
    for path in paths:
        content = merge(content, read_yaml(path))
    task, fastrl = content.pop("task"), content.pop("fastrl", {})
    trainer = {key: value for key, value in content.items() if key not in ("algorithm", "baseline")}
    return Recipe(name="r", trainer=trainer, task=parse_task(task), fastrl=FastRLConfig.from_dict(fastrl))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_verl_composes_the_command_of_every_recipe(path, method):
    recipe = recipe_of(path, RECIPES / "methods" / f"{method}.yaml")
    words = command(recipe, "verl").start[1:]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=words)
    check_supported(config, settings_of(config))
    assert settings_of(config).tau == recipe.fastrl.tau
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.validate(
        config.trainer.n_gpus_per_node, config.data.train_batch_size, config.actor_rollout_ref.model
    )
