"""The published table: every cell is a recipe, holds the published hyper-parameters, and plans without a model."""

from pathlib import Path

import pytest

pytest.importorskip("trl")

from fastrl.bench.plan import batches, plan
from fastrl.bench.recipe import Recipe, parse_recipe, read_recipe
from fastrl.bench.tasks import DataTask
from fastrl.config import FastRLConfig
from fastrl.report.plan import plan_table
from fastrl.types import ConfigError

pytestmark = pytest.mark.trl

RECIPES = Path(__file__).parents[2] / "recipes"
CELLS = sorted(
    path for data in ("geometry3k", "geoqa8k_r1v", "math") for path in (RECIPES / data).glob("*.yaml")
)
METHODS = sorted((RECIPES / "methods").glob("*.yaml"))


def trainer_of(path: Path, method: str = "paper") -> dict:
    return dict(read_recipe(path, changes=[RECIPES / "methods" / f"{method}.yaml"]).trainer)


def test_the_table_is_whole():
    vision = {"qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen3_vl_8b"}
    losses = {"grpo", "dapo", "gspo"}
    expected = {
        f"{data}/{model}_{loss}"
        for data in ("geometry3k", "geoqa8k_r1v")
        for model in vision
        for loss in losses
    }
    expected |= {f"math/llama3_1_8b_{loss}" for loss in losses}
    assert {f"{path.parent.name}/{path.stem}" for path in CELLS} == expected
    assert {path.stem for path in METHODS} == {"baseline", "paper", "unbiased", "cppo", "greso"}


@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.stem)
@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_cell_plans_the_published_run(path: Path, method: Path):
    recipe = read_recipe(path, changes=[method])
    assert isinstance(recipe.task, DataTask)
    recipe.grpo_config("unused")
    planned = plan(recipe)
    assert planned["batch"]["prompts_per_round"] == 256
    assert planned["batch"]["updates_per_round"] == 4
    assert planned["batch"]["rollouts_per_update"] == 512
    assert (
        planned["steps"]["rounds"] == {"geometry3k": 200, "geoqa8k-r1v": 465, "math": 645}[recipe.task.name]
    )
    assert not planned["rows"]["counted"]
    assert planned["memory"]["total"] > 0
    assert plan_table(planned).row_count > 10


@pytest.mark.parametrize("path", CELLS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_cell_has_the_published_hyper_parameters(path: Path):
    trainer, loss = trainer_of(path), path.stem.rpartition("_")[2]
    assert (trainer["num_generations"], trainer["temperature"], trainer["top_p"]) == (8, 1.0, 1.0)
    assert (trainer["learning_rate"], trainer["weight_decay"], trainer["max_grad_norm"]) == (1e-6, 0.01, 1.0)
    assert (trainer["lr_scheduler_type"], trainer["optim"]) == ("constant", "adamw_torch")
    assert trainer["num_train_epochs"] == (25 if path.parent.name == "geometry3k" else 15)
    assert trainer["max_completion_length"] == (4096 if path.parent.name == "geoqa8k_r1v" else 2048)
    clip = (trainer["epsilon"], trainer["epsilon_high"])
    assert (clip, trainer["beta"]) == {
        "grpo": ((0.2, 0.3), 0.01), "dapo": ((0.2, 0.28), 0.0), "gspo": ((3e-4, 4e-4), 0.0),
    }[loss]  # fmt: skip


def test_no_method_file_and_the_paper_are_one_setting():
    for path in CELLS:
        plain, paper = read_recipe(path), read_recipe(path, changes=[RECIPES / "methods" / "paper.yaml"])
        assert plain.fastrl == paper.fastrl
    assert read_recipe(RECIPES / "geometry3k" / "qwen2_5_vl_7b_grpo.yaml").fastrl == FastRLConfig()


def test_the_baseline_is_the_engine_itself():
    for loss, is_identity in (("grpo", True), ("gspo", True), ("dapo", False)):  # DAPO samples dynamically
        recipe = read_recipe(
            RECIPES / "geometry3k" / f"qwen2_5_vl_7b_{loss}.yaml",
            changes=[RECIPES / "methods" / "baseline.yaml"],
        )
        assert recipe.fastrl.is_identity == is_identity


def test_a_cell_takes_the_names_of_its_files():
    recipe = read_recipe(CELLS[0], ["task.processes=8"], changes=[METHODS[0]])
    assert recipe.name == f"{CELLS[0].stem}-{METHODS[0].stem}"
    assert recipe.task.processes == 8


def small(**trainer: object) -> Recipe:
    return parse_recipe({"bf16": False, "task": {"train_prompts": 10}, **trainer}, name="small")


def test_batches_follow_trls_arithmetic():
    shape = batches(
        small(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            steps_per_generation=4,
        ),
        2,
    )
    assert (shape.rows_per_round, shape.prompts) == (32, 8)
    assert (shape.rows_per_update, shape.updates) == (16, 2)
    assert shape.micro_batches() == 2
    assert shape.micro_batches(0.25) == 1


def test_a_generation_spanned_by_a_step_counts_as_part_of_it():
    shape = batches(
        small(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_generations=4,
            steps_per_generation=2,
        ),
        1,
    )
    assert (shape.rows_per_round, shape.rows_per_update, shape.updates) == (8, 16, 0.5)


def test_the_plan_of_the_testbed_counts_its_model():
    planned = plan(small(per_device_train_batch_size=8, num_generations=4, num_train_epochs=3))
    assert planned["rows"] == {"train": 10, "held_out": 200, "counted": True}
    assert planned["steps"] == {
        "rounds_per_epoch": 5, "prompts_left_out_per_epoch": 0, "optimizer_steps": 15, "rounds": 15,
    }  # fmt: skip
    assert planned["memory"]["parameters"] == 1_424_384  # as docs/testbed.md says: 1.4 M


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"generation_batch_size": 24, "per_device_train_batch_size": 4, "num_generations": 8}, None),
        (
            {"per_device_train_batch_size": 64, "num_generations": 4},
            "10 training prompts do not fill one round of 16",
        ),
    ],
)
def test_batches_that_do_not_fit_are_named(trainer: dict, message: str | None):
    with pytest.raises(ConfigError, match=message or "24 rollouts per generation are no multiple"):
        plan(small(**trainer), processes=4 if message is None else None)
