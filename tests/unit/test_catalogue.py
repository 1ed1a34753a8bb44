"""The methods that `fastrl compare` knows by name: they are those of the recipes, on top of any recipe."""

import dataclasses
from pathlib import Path

import pytest

from fastrl import FastRLConfig
from fastrl.bench.catalogue import CARRIED, LOSSES, METHODS, like, resolve, with_rollouts
from fastrl.bench.recipe import read_recipe
from fastrl.types import ConfigError

pytestmark = pytest.mark.trl
RECIPES = Path(__file__).parents[2] / "recipes"
TESTBED = RECIPES / "testbed"
SAME = {
    "unbiased": "unbiased",
    "cppo": "cppo",
    "pods": "pods",
    "greso": "greso",
    "dapo_dynamic": "dapo_dynamic",
    "random75": "random",
    "advantage_only": "advantage_only",
}
"""Names, and the recipes of the testbed that say the same."""


@pytest.fixture(scope="module")
def recipe():
    return read_recipe(TESTBED / "quickstart.yaml")


@pytest.mark.parametrize(("name", "file"), SAME.items())
def test_a_name_means_what_its_recipe_says(recipe, name: str, file: str):
    expected = read_recipe(TESTBED / f"{file}.yaml")
    found = resolve(name, recipe)
    assert found.fastrl is not None
    carried = {key: getattr(expected.fastrl, key) for key in CARRIED if key != "align"}
    assert dataclasses.replace(found.fastrl, **carried) == expected.fastrl


@pytest.mark.parametrize(("name", "file"), [("2grpo", "two_grpo"), ("fixed_g4", "fixed_g4")])
def test_a_smaller_g_has_the_rows_of_its_recipe(recipe, name: str, file: str):
    expected = read_recipe(TESTBED / f"{file}.yaml").trainer
    found = resolve(name, recipe)
    assert found.trainer == {key: expected[key] for key in ("num_generations", "per_device_train_batch_size")}
    assert found.fastrl is not None
    assert (found.fastrl.tau, found.fastrl.zero_variance, found.fastrl.budget) == (0.0, "keep_all", "fixed")


def test_stock_trl_has_no_settings(recipe):
    assert resolve("grpo", recipe).fastrl is None


def test_fastrl_is_the_recipes_own_block(recipe):
    assert resolve("fastrl", recipe).fastrl == recipe.fastrl == FastRLConfig()


def test_every_method_takes_from_the_recipe_how_it_runs(recipe):
    changed = dataclasses.replace(
        recipe, fastrl=FastRLConfig(outcome_key="accuracy_reward", share_prompt="off", rollout_cost=0.3)
    )
    for name, entry in METHODS.items():
        settings = resolve(name, changed).fastrl
        assert (settings is None) == (entry.fastrl is None)
        if settings is not None:
            assert (settings.outcome_key, settings.share_prompt, settings.rollout_cost) == (
                "accuracy_reward", "off", 0.3,
            )  # fmt: skip


def test_changes_are_part_of_the_name(recipe):
    method = resolve("fastrl:tau=0.4,budget=fixed", recipe)
    assert method.fastrl == FastRLConfig(tau=0.4, budget="fixed")
    assert method.key == "fastrl-tau0.4-budgetfixed"
    assert "tau 0.4" in method.label


def test_a_file_of_ones_own_is_a_method(recipe, tmp_path: Path):
    path = tmp_path / "my_pruner.yaml"
    path.write_text("fastrl:\n  tau: 0.3\n", encoding="utf-8")
    method = resolve(str(path), recipe)
    assert (method.key, method.fastrl, method.trainer) == ("my_pruner", FastRLConfig(tau=0.3), {})


def test_random_pruning_is_named_by_what_it_prunes(recipe):
    shares = {name: resolve(name, recipe).fastrl.keep_share for name in ("random25", "random50", "random75")}
    assert shares == {"random25": 0.75, "random50": 0.5, "random75": 0.25}


def test_fixed_g_follows_the_budget_that_it_must_beat(recipe):
    assert like(resolve("fixed_g", recipe)) == "unbiased"
    assert like(resolve("unbiased", recipe)) is None


def test_another_g_keeps_the_prompts(recipe):
    assert with_rollouts(recipe, 3) == {"num_generations": 3, "per_device_train_batch_size": 48}
    with pytest.raises(ConfigError, match="no whole counterpart"):
        with_rollouts(recipe.replace(num_generations=5, per_device_train_batch_size=4), 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("grop", "Did you mean 'grpo'"),
        ("fastrl:tau", "expected NAME:key=value"),
        ("fastrl:taau=0.4", "Did you mean 'tau'"),
        ("fastrl:tau=2", "tau"),
        ("grpo:tau=0.4", "stock TRL has no settings"),
    ],
)
def test_what_cannot_be_is_refused(recipe, spec: str, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(spec, recipe)


def test_losses_are_those_of_the_published_recipes():
    """But for what the testbed leaves out: DAPO's dynamic sampling, a method of its own, dual clip and KL."""
    for loss in ("dapo", "gspo"):
        published = read_recipe(RECIPES / f"geometry3k/qwen2_5_vl_7b_{loss}.yaml").trainer
        assert {key: published[key] for key in LOSSES[loss]} == LOSSES[loss]
