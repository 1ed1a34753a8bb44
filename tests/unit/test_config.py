"""Settings: the published defaults, and errors that say the value, the rule, the reason and the remedy."""

import dataclasses
import json

import pytest
import yaml

from fastrl.config import FastRLConfig, parse_yaml
from fastrl.types import ConfigError


def test_the_defaults_are_the_published_setting():
    config = FastRLConfig()
    published = {
        "pruner": "mdap", "tau": 0.8, "ngram": 1, "compare": "kept", "advantage_tol": 1e-4,
        "representative": "first", "weighting": 0.0, "zero_variance": "keep_one", "denominator": "kept",
        "budget": "ars", "min_rollouts": 2, "max_rollouts": None, "align": "top_up",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in published} == published


def test_the_unbiased_setting_is_accepted():
    config = FastRLConfig(
        representative="random", weighting=1.0, denominator="full", zero_variance="drop", align="dummy"
    )
    assert config.weighting == 1.0


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"tau": 1.2}, ["tau", "1.2", "[0, 1]", "share of n-grams"]),
        ({"tau": -0.1}, ["tau", "-0.1", "[0, 1]"]),
        ({"tau": float("nan")}, ["tau", "nan", "[0, 1]"]),
        ({"ngram": 0}, ["ngram", "0", "at least one token"]),
        ({"advantage_tol": 0.0}, ["advantage_tol", "0.0", "rounding noise"]),
        ({"weighting": 2.0}, ["weighting", "2.0", "unbiased"]),
        ({"keep_share": 0.0}, ["keep_share", "0.0", "share of rollouts"]),
        ({"min_rollouts": 1}, ["min_rollouts", "1", "[2, ", "no baseline"]),
        ({"max_rollouts": 1}, ["max_rollouts", "1", "[2, ", "no baseline"]),
        ({"max_empty_steps": 0}, ["max_empty_steps", "0", "counts steps"]),
        ({"seed": -1}, ["seed", "-1", "seeds the generators"]),
        (
            {"min_rollouts": 6, "max_rollouts": 4},
            ["max_rollouts: 4", "min_rollouts: 6", "Raise one or lower"],
        ),
        ({"weighting": 0.5}, ["weighting: 0.5", "top_up", "unbiased", "Set align: dummy"]),
        (
            {"weighting": 0.5, "align": "dummy"},
            ["weighting: 0.5", "representative: first", "not unbiased", "Set representative: random"],
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_rule_and_reason(settings, parts):
    with pytest.raises(ConfigError) as caught:
        FastRLConfig(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "suggestion"),
    [
        ("pruner", "mdpa", "mdap"),
        ("pruner", "randm", "random"),
        ("budget", "asr", "ars"),
        ("compare", "keep", "kept"),
        ("representative", "fist", "first"),
        ("zero_variance", "keep-one", "keep_one"),
        ("denominator", "ful", "full"),
        ("align", "topup", "top_up"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_choices_and_a_guess(name, value, suggestion):
    with pytest.raises(ConfigError) as caught:
        FastRLConfig(**{name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert f"Did you mean {suggestion!r}?" in message


def test_a_choice_unlike_any_other_gets_no_guess():
    with pytest.raises(ConfigError) as caught:
        FastRLConfig(pruner="zzz")
    assert "Did you mean" not in str(caught.value)
    assert "none, mdap" in str(caught.value)


def test_an_unknown_key_is_an_error_with_a_guess_and_all_names():
    with pytest.raises(ConfigError) as caught:
        FastRLConfig.from_dict({"taw": 0.8})
    message = str(caught.value)
    assert "'taw' is not a setting" in message
    assert "Did you mean 'tau'?" in message
    for field in dataclasses.fields(FastRLConfig):
        assert field.name in message


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('tau: "0.8"', ["tau", "'0.8'", "str", "float"]),
        ("advantage_tol: 1e-4", ["advantage_tol", "'1e-4'", "str", "float"]),  # YAML 1.1: no dot, no number
        ("ngram: 1.5", ["ngram", "1.5", "float", "int"]),
        ("ngram: true", ["ngram", "True", "bool", "int"]),
        ("tau: true", ["tau", "True", "bool", "float"]),
        ("trace: 1", ["trace", "1", "int", "bool"]),
        ("pruner: no", ["pruner", "False", "bool", "str"]),
        ("pruner: null", ["pruner", "None", "NoneType", "str"]),
        ("tau: null", ["tau", "None", "float"]),
        ("max_rollouts: 4.0", ["max_rollouts", "4.0", "float", "int"]),
        ("tau: [0.8]", ["tau", "[0.8]", "list", "float"]),
    ],
)
def test_wrong_types_from_yaml_are_caught_at_once(line, parts):
    with pytest.raises(ConfigError) as caught:
        FastRLConfig.from_dict(yaml.safe_load(line))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "line", ["tau: 1", "max_rollouts: null", "outcome_key: null", "advantage_tol: 1.0e-4"]
)
def test_what_yaml_may_write_for_a_number_or_for_nothing_is_accepted(line):
    (name, value), *_ = yaml.safe_load(line).items()
    assert getattr(FastRLConfig.from_dict({name: value}), name) == value


def test_a_number_in_quotes_comes_with_the_remedy():
    with pytest.raises(ConfigError, match="without quotes"):
        FastRLConfig.from_dict(yaml.safe_load('advantage_tol: "0.1"'))


def test_a_file_may_write_small_numbers_without_a_dot(tmp_path):
    (tmp_path / "settings.yaml").write_text("advantage_tol: 1e-4\n", encoding="utf-8")
    assert FastRLConfig.load(tmp_path / "settings.yaml").advantage_tol == 1e-4


def test_a_quoted_number_stays_a_text(tmp_path):
    assert parse_yaml('a: "1e5"\nb: 1e5\nc: 1.5E-3\nd: e5', "here") == {
        "a": "1e5",
        "b": 1e5,
        "c": 1.5e-3,
        "d": "e5",
    }


def test_a_file_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "settings.yaml").write_text("tau: [0.8\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings\.yaml: not valid YAML"):
        FastRLConfig.load(tmp_path / "settings.yaml")


def test_settings_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FastRLConfig().tau = 0.5
    with pytest.raises(TypeError, match="positional"):
        FastRLConfig("mdap")


def test_a_configuration_survives_json():
    config = FastRLConfig(tau=0.3, max_rollouts=4, outcome_key="accuracy_reward", seed=7)
    assert FastRLConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert list(config.to_dict()) == [field.name for field in dataclasses.fields(FastRLConfig)]


# --- files --------------------------------------------------------------------------------------


def write(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_settings_is_read(tmp_path):
    assert FastRLConfig.load(write(tmp_path, "tau: 0.5\nngram: 2\n")) == FastRLConfig(tau=0.5, ngram=2)


def test_a_recipe_is_read_by_its_fastrl_block(tmp_path):
    path = write(tmp_path, "model: tiny\nfastrl:\n  tau: 0.5\n  budget: fixed\n")
    assert FastRLConfig.load(path) == FastRLConfig(tau=0.5, budget="fixed")


@pytest.mark.parametrize("text", ["", "fastrl:\n", "fastrl: {}\n"])
def test_an_empty_file_or_block_is_the_published_setting(tmp_path, text):
    assert FastRLConfig.load(write(tmp_path, text)) == FastRLConfig()


def test_an_unknown_key_in_a_recipe_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'ngram'"):
        FastRLConfig.load(write(tmp_path, "fastrl:\n  ngrams: 2\n"))


def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe\.yaml.*mapping.*list"):
        FastRLConfig.load(write(tmp_path, "- tau\n"))


@pytest.mark.parametrize("value", ["mdap", "[tau]", "0.8", "true"])
def test_a_fastrl_block_that_is_no_mapping_is_refused_by_name(tmp_path, value):
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        FastRLConfig.load(write(tmp_path, f"fastrl: {value}\n"))


@pytest.mark.parametrize("value", ["false", "off", "0", "''", "[]"])
def test_switching_the_block_off_does_not_switch_the_published_setting_on(tmp_path, value):
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        FastRLConfig.load(write(tmp_path, f"fastrl: {value}\n"))


def test_yaml_cannot_run_code(tmp_path):
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        FastRLConfig.load(write(tmp_path, "tau: !!python/object/apply:os.getcwd []\n"))


# --- the identity -------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_variance", ["keep_one", "keep_all"])
def test_no_pruner_and_a_fixed_budget_change_nothing(zero_variance):
    assert FastRLConfig(pruner="none", budget="fixed", zero_variance=zero_variance).is_identity


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pruner": "none"},
        {"budget": "fixed"},
        {"pruner": "none", "budget": "fixed", "zero_variance": "drop"},
        # A ceiling below the engine's number is a smaller group: not the engine's own algorithm.
        {"pruner": "none", "budget": "fixed", "max_rollouts": 4},
    ],
)
def test_whatever_changes_the_run_is_not_the_identity(settings):
    assert not FastRLConfig(**settings).is_identity
