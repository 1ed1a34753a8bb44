"""Recipes: what is read, what is refused, and what the refusal says."""

from pathlib import Path

import pytest
import yaml

from fastrl.bench.recipe import Recipe, check_file, parse_recipe, read_recipe, read_yaml
from fastrl.bench.tasks import TestbedTask
from fastrl.config import FastRLConfig
from fastrl.types import ConfigError

pytest.importorskip("trl")
pytestmark = pytest.mark.trl

RECIPES = sorted(
    path for path in Path(__file__).parents[2].glob("recipes/**/*.yaml") if "parts" not in path.parts
)


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid(path: Path):
    check_file(path)


def test_a_recipe_has_trl_keys_a_task_and_settings(tmp_path: Path):
    path = write(
        tmp_path, "seed: 3\nbeta: 0.0\ntask: {train_prompts: 8}\nfastrl: {tau: 0.5}\nbaseline: false\n"
    )
    recipe = read_recipe(path)
    assert recipe.name == "recipe"
    assert recipe.trainer == {"seed": 3, "beta": 0.0}
    assert recipe.seed == 3
    assert recipe.task == TestbedTask(train_prompts=8)
    assert recipe.fastrl == FastRLConfig(tau=0.5)
    assert not recipe.baseline


def test_an_empty_recipe_is_the_published_setting(tmp_path: Path):
    assert read_recipe(write(tmp_path, "")) == Recipe(name="recipe", trainer={})


def test_overrides_are_yaml_and_reach_into_blocks(tmp_path: Path):
    path = write(tmp_path, "learning_rate: 0.1\nfastrl:\n")
    changed = read_recipe(
        path, ["learning_rate=1e-5", "fastrl.tau=0.6", "task.num_threads=null", "baseline=false"]
    )
    assert changed.trainer == {"learning_rate": 1e-5}
    assert changed.fastrl.tau == 0.6
    assert changed.task.num_threads is None
    assert not changed.baseline


def test_an_exponent_without_a_point_is_a_number(tmp_path: Path):
    assert read_yaml(write(tmp_path, "a: 1e-6\nb: [2E3, x]\nc: {d: 1.5e-4}\ne: e5\n")) == {
        "a": 1e-6,
        "b": [2e3, "x"],
        "c": {"d": 1.5e-4},
        "e": "e5",
    }


def test_what_is_written_down_reads_back_the_same(tmp_path: Path):
    recipe = read_recipe(write(tmp_path, "seed: 3\nlearning_rate: 1e-6\nfastrl: {tau: 0.5}\n"))
    again = write(tmp_path, yaml.safe_dump(recipe.to_dict()))
    assert read_recipe(again) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", "'learnin_rate' is no key of a recipe. Did you mean 'learning_rate'"),
        ("fast_rl: {}", "Did you mean 'fastrl'"),
        ("tau: 0.5", "'tau' is a setting of FastRL: write it under `fastrl:`"),
        ("output_dir: here", "output_dir is set by the runner: .* --out"),
        ("task: {name: gsm8k}", "task.name: 'gsm8k' is unknown"),
        ("task: {problems: lang}", "task.problems: 'lang' is unknown. Did you mean 'long'"),
        ("task: {train_prompt: 4}", "task.train_prompt is unknown. Did you mean 'train_prompts'"),
        ("task: {train_prompts: 0}", "task.train_prompts: 0 is not a whole number of at least 1"),
        ("task: {evaluate_every: true}", "task.evaluate_every: True is not a whole number"),
        ("task: testbed", "task: expected a block of settings, found 'testbed'"),
        ("fastrl: {taau: 0.5}", "Did you mean 'tau'"),
        ("fastrl: {tau: 2}", r"tau: 2 is outside \[0, 1\]"),
        ("baseline: both", "baseline: 'both' is neither true nor false"),
        ("- a\n- b", "expected a mapping of `key: value` lines, found a list"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tau", "expected key=value"),
        ("=3", "expected key=value"),
        ("seed.x=3", "seed is a value, not a block"),
        ("beta=[1", "--set beta=.* not valid YAML|not valid YAML"),
    ],
)
def test_a_mistaken_override_is_named(tmp_path: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        read_recipe(write(tmp_path, "seed: 1"), [override])


def test_a_missing_file_is_a_users_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.yaml")


def test_what_trl_rejects_is_reported_with_its_own_words():
    recipe = parse_recipe({"per_device_train_batch_size": 8, "num_generations": 3}, name="odd")
    with pytest.raises(ConfigError, match=r"odd: TRL does not accept these settings: .*divisible"):
        recipe.grpo_config("unused")


def test_the_runner_reports_nowhere_and_logs_every_step():
    args = parse_recipe({"bf16": False}, name="plain").grpo_config("unused")
    assert args.report_to in ([], ["none"], "none")
    assert (args.logging_steps, args.remove_unused_columns, args.disable_tqdm) == (1, False, True)


def test_a_file_of_settings_or_of_another_script_is_checked_too(tmp_path: Path):
    assert check_file(write(tmp_path, "tau: 0.4"))["tau"] == 0.4
    assert check_file(write(tmp_path, "model_name_or_path: x\nfastrl: {tau: 0.3}"))["tau"] == 0.3
    with pytest.raises(ConfigError, match="Did you mean 'tau'"):
        check_file(write(tmp_path, "taau: 0.4"))


def test_a_recipe_changes_its_base(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "seed: 3\nlearning_rate: 0.1\nfastrl: {tau: 0.5, ngram: 2}\n", encoding="utf-8"
    )
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nseed: 4\nfastrl: {tau: 0.6}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "mine.yaml") == {
        "seed": 4, "learning_rate": 0.1, "fastrl": {"tau": 0.6, "ngram": 2},
    }  # fmt: skip


def test_a_recipe_that_is_its_own_base_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n", encoding="utf-8")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"base: is a circle.*a\.yaml -> .*b\.yaml"):
        read_yaml(tmp_path / "a.yaml")


def test_a_missing_base_is_named(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("base: nowhere.yaml\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_yaml(tmp_path / "a.yaml")
