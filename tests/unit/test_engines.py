"""A recipe in the words of verl and EasyR1."""

import shlex
from pathlib import Path

import pytest

from fastrl.bench.engines import ENGINES, command
from fastrl.bench.recipe import parse_recipe, read_recipe
from fastrl.types import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"
ALL = sorted(
    path for name in ("geometry3k", "geoqa8k_r1v", "math") for path in (RECIPES / name).glob("*.yaml")
)

pytestmark = pytest.mark.trl


def settings(path: Path, engine: str, *, changes=(), **trainer) -> dict[str, str]:
    recipe = read_recipe(path, changes=changes).replace(**trainer)
    pairs = [word.partition("=") for word in command(recipe, engine).start[1:]]
    found = {name: value for name, _, value in pairs}
    assert len(found) == len(pairs), "a setting is given twice"
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_published_recipe_can_be_typed(path, engine):
    text = str(command(read_recipe(path), engine))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines[0].startswith(f"fastrl data {read_recipe(path).task.name} --to {engine} ")
    words = shlex.split(
        " ".join(line.removesuffix("\\") for line in lines[1:]).replace("$(", "'$(").replace(")", ")'")
    )
    assert words[:3] == ["python", "-m", f"fastrl.integrations.{engine}"]


@pytest.mark.parametrize(
    ("name", "verl", "easyr1"),
    [
        (
            "grpo",
            {
                "policy_loss.loss_mode": "vanilla",
                "loss_agg_mode": "token-mean",
                "use_kl_loss": "true",
            },
            {
                "worker.actor.loss_avg_mode": "token",
                "algorithm.disable_kl": "false",
                "algorithm.kl_coef": "0.01",
            },
        ),
        (
            "dapo",
            {"policy_loss.loss_mode": "vanilla", "loss_agg_mode": "token-mean", "clip_ratio_high": "0.28"},
            {"worker.actor.loss_avg_mode": "token", "worker.actor.clip_ratio_high": "0.28"},
        ),
        (
            "gspo",
            {
                "policy_loss.loss_mode": "gspo",
                "loss_agg_mode": "seq-mean-token-mean",
                "clip_ratio_low": "0.0003",
            },
            {"worker.actor.loss_type": "gspo_token", "worker.actor.loss_avg_mode": "seq"},
        ),
    ],
)
def test_losses(name, verl, easyr1):
    path = RECIPES / "geometry3k" / f"qwen2_5_vl_7b_{name}.yaml"
    found = settings(path, "verl")
    assert {key: found[f"actor_rollout_ref.actor.{key}"] for key in verl} == verl
    found = settings(path, "easyr1")
    assert {key: found[key] for key in easyr1} == easyr1


def test_batches_and_schedule_count_prompts_and_rounds():
    """256 prompts x 8 rollouts, four updates: TRL saves every 20 optimizer steps, which are five rounds."""
    path = RECIPES / "geometry3k" / "qwen2_5_vl_7b_grpo.yaml"
    found = settings(path, "verl")
    assert found["data.train_batch_size"] == "256"
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == "64"
    assert found["actor_rollout_ref.rollout.n"] == "8"
    assert (found["trainer.save_freq"], found["trainer.total_epochs"]) == ("5", "25")
    found = settings(path, "easyr1")
    assert (found["data.rollout_batch_size"], found["worker.actor.global_batch_size"]) == ("256", "64")


def test_dynamic_sampling_is_the_engines_own():
    path = RECIPES / "geometry3k" / "qwen2_5_vl_7b_dapo.yaml"
    found = settings(path, "verl")
    assert found["algorithm.filter_groups.enable"] == "true"
    assert found["algorithm.filter_groups.metric"] == found["+fastrl.outcome_key"] == "accuracy"
    assert "+fastrl.refill" not in found
    found = settings(path, "easyr1")
    assert (found["algorithm.online_filtering"], found["algorithm.filter_key"]) == ("true", "accuracy")


def test_settings_of_fastrl_are_those_that_differ_from_the_published_ones():
    path = RECIPES / "geometry3k" / "qwen2_5_vl_7b_grpo.yaml"
    assert not [name for name in settings(path, "verl") if "fastrl" in name]
    found = settings(path, "verl", changes=[RECIPES / "methods" / "unbiased.yaml"])
    assert found["+fastrl.weighting"] == "1.0"
    assert found["+fastrl.budget"] == "discovery"


def test_dr_grpo_divides_by_a_constant():
    found = settings(RECIPES / "geometry3k" / "qwen2_5_vl_7b_grpo.yaml", "verl", loss_type="dr_grpo")
    assert found["actor_rollout_ref.actor.loss_scale_factor"] == found["data.max_response_length"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_does_not_have_is_refused(engine):
    path = RECIPES / "geometry3k" / "qwen2_5_vl_7b_grpo.yaml"
    with pytest.raises(ConfigError, match="loss_type: vespo"):
        settings(path, engine, loss_type="vespo")
    with pytest.raises(ConfigError, match=r"fastrl\.refill: kept"):
        settings(path, engine, changes=[RECIPES / "methods" / "cppo.yaml"])
    with pytest.raises(ConfigError, match="the testbed is trained by TRL"):
        command(parse_recipe({}, name="mine"), engine)


def test_differences_are_said():
    path = RECIPES / "geometry3k" / "qwen2_5_vl_7b_dapo.yaml"
    recipe = read_recipe(path, ["task.overlong_buffer=512"])
    notes = "\n".join(command(recipe, "verl").notes)
    assert "task.overlong_buffer=512 is left out" in notes
    assert "replaced by verl's replay buffer" in notes
