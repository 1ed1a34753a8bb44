"""The toy policy against enumeration and closed forms; bounds are Monte-Carlo errors that are known exactly."""

import io
import itertools
import json
from math import comb

import numpy as np
import pytest

from fastrl import FastRL, FastRLConfig
from fastrl.bench import simulate as toy
from fastrl.bench.settings import UNBIASED
from fastrl.bench.simulate import CORRECT_K, MODES, SUCCESS_RATES, default_configs, simulate
from fastrl.budgets import BUDGETS
from fastrl.pruners import PRUNERS
from fastrl.similarity import jaccard_distance, ngram_set
from fastrl.types import ConfigError

NONE = FastRLConfig(pruner="none", budget="fixed")
PAPER = FastRLConfig(budget="fixed")
ONE_PER_CLASS = FastRLConfig(pruner="advantage_only", budget="fixed", denominator="full")


def policy(seed=0):
    logits_PK = toy.initial_logits(np.random.default_rng([seed, 0]))
    return logits_PK, toy.softmax(logits_PK)


def ways(p, size):
    """P(n of the group are right), n = 1 .. G - 1."""
    n = np.arange(1, size)
    return n, np.array([comb(size, k) for k in n]) * p**n * (1 - p) ** (size - n)


def advantages(n, size):
    """A+ and |A-| of a group in which n are right (standard deviation with Bessel's correction)."""
    deviation = np.sqrt(n * (size - n) / (size * (size - 1)))
    return (1 - n / size) / deviation, (n / size) / deviation


def class_scores(probs_K):
    """Mean score e_k - pi of a right and of a wrong rollout."""
    right_K, wrong_K = probs_K * CORRECT_K, probs_K * (1 - CORRECT_K)
    return right_K / right_K.sum() - probs_K, wrong_K / wrong_K.sum() - probs_K


@pytest.fixture(scope="module")
def result():
    return simulate()


# --- the policy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_start_at_their_success_rates_and_seeds_differ_in_the_rest(seed):
    _, probs_PK = policy(seed)
    assert probs_PK.sum(1) == pytest.approx(1.0)
    assert probs_PK @ CORRECT_K == pytest.approx(SUCCESS_RATES, abs=1e-12)
    assert not np.allclose(probs_PK, policy(seed + 1)[1], atol=0.01)


def test_modes_of_a_class_are_near_and_far_so_that_tau_decides():
    sets = [ngram_set(tokens) for tokens in MODES]
    for members in ((0, 1, 2), (3, 4, 5)):
        near, *far = [jaccard_distance(sets[a], sets[b]) for a, b in itertools.combinations(members, 2)]
        assert near == pytest.approx(1 / 3)
        assert min(far) > 0.8


def test_the_expected_gradient_is_that_of_every_possible_group():
    size, (_, probs_PK) = 4, policy()
    expected_PK = np.zeros_like(probs_PK)
    for modes in itertools.product(range(len(MODES)), repeat=size):
        rewards = CORRECT_K[list(modes)]
        if rewards.std() == 0:
            continue
        coefficients = (rewards - rewards.mean()) / rewards.std(ddof=1) / size
        chance_P = probs_PK[:, list(modes)].prod(1)
        for k, coefficient in zip(modes, coefficients, strict=True):
            expected_PK += chance_P[:, None] * coefficient * (np.eye(len(MODES))[k] - probs_PK)
    assert toy.expected_gradient(probs_PK, size) == pytest.approx(expected_PK / len(probs_PK), abs=1e-12)


def test_the_expected_gradient_points_along_the_slope_of_each_success_rate():
    (logits_PK, probs_PK), step = policy(), 1e-6
    gradient_PK = toy.expected_gradient(probs_PK, 8)
    for p, k in itertools.product(range(len(probs_PK)), range(len(MODES))):
        moved = logits_PK.copy()
        moved[p, k] += step
        slope = ((toy.softmax(moved) - probs_PK) @ CORRECT_K)[p] / step
        scale = gradient_PK[p] @ CORRECT_K / (probs_PK[p] * (CORRECT_K - SUCCESS_RATES[p]) @ CORRECT_K)
        assert gradient_PK[p, k] == pytest.approx(scale * slope, rel=1e-4)


def test_sampled_groups_agree_with_the_expected_gradient():
    _, probs_PK = policy()
    counts_P = np.full(len(probs_PK), 8)
    draws = [toy._sample(probs_PK, counts_P, np.random.default_rng([7, i]), 8) for i in range(1500)]
    full_ND = np.array([toy._gradient(NONE, g, toy.select(g, NONE), probs_PK)[0].ravel() for g in draws])
    error_D = full_ND.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(full_ND.mean(0) - toy.expected_gradient(probs_PK, 8).ravel()) <= 4.5 * error_D).all()


def test_a_rollout_is_the_same_however_many_its_prompt_gets():
    _, probs_PK = policy()
    many = toy._sample(probs_PK, np.array([8] * 6), np.random.default_rng(3), 8)
    few = toy._sample(probs_PK, np.array([2, 0, 8, 3, 0, 5]), np.random.default_rng(3), 8)
    assert [(group.prompt_id, group.num_rollouts) for group in few] == [
        ("0", 2),
        ("2", 8),
        ("3", 3),
        ("5", 5),
    ]
    for group in few:
        assert list(group.tokens_G) == list(many[int(group.prompt_id)].tokens_G[: group.num_rollouts])


# --- estimates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32])
def test_one_rollout_per_class_pushes_right_and_wrong_answers_as_the_closed_form_says(size):
    num_draws = 400
    row = simulate({"one": ONE_PER_CLASS}, num_draws=num_draws, num_steps=2, num_rollouts=size)["estimates"][
        "one"
    ]
    for p, push in zip(SUCCESS_RATES, row["push_P"], strict=True):
        n, chance = ways(p, size)
        right, wrong = advantages(n, size)
        ratio = chance @ right / (chance @ wrong)
        deviation = np.sqrt(chance @ (right - ratio * wrong) ** 2 / num_draws) / (chance @ wrong)
        assert abs(push - ratio) <= 4.5 * deviation
        if size == 32 and 0.2 <= p <= 0.8:
            assert push == pytest.approx((1 - p) / p, rel=0.12)  # the limit of large groups, to order 1 / G


def test_its_bias_is_the_closed_form_within_the_interval():
    row = simulate({"one": ONE_PER_CLASS}, num_draws=1000, num_steps=2)["estimates"]["one"]
    _, probs_PK = policy()
    mean_PK = np.zeros_like(probs_PK)
    for p, probs_K in enumerate(probs_PK):
        n, chance = ways(SUCCESS_RATES[p], 8)
        right, wrong = advantages(n, 8)
        right_K, wrong_K = class_scores(probs_K)
        mean_PK[p] = (chance @ right * right_K - chance @ wrong * wrong_K) / (8 * len(probs_PK))
    full_PK = toy.expected_gradient(probs_PK, 8)
    length = np.linalg.norm(full_PK)
    bias = np.linalg.norm(mean_PK - full_PK) / length
    assert row["bias_low"] > 0.4, (
        "a share of the gradient is lost, and this configuration does not weigh for it"
    )
    assert row["bias_low"] <= bias <= row["bias_high"]
    half_width = (row["bias_high"] - row["bias_low"]) / 2
    assert row["scale"] == pytest.approx((mean_PK * full_PK).sum() / length**2, abs=half_width)
    cosine = (mean_PK * full_PK).sum() / length / np.linalg.norm(mean_PK)
    assert row["direction"] == pytest.approx(cosine, abs=half_width)


def test_the_error_of_one_weighted_rollout_per_class_is_its_variance():
    # E|pruned - full|^2 of a group = G^-2 sum_C |C| A_C^2 sum_{i in C} |s_i - mean_C s|^2 (notes/methods.md, 7.1),
    # and sum_{i in C} |s_i - mean|^2 has the mean (|C| - 1) (1 - sum_k q_k^2), q the modes' shares of the class.
    config = FastRLConfig(pruner="advantage_only", budget="fixed", **UNBIASED)
    _, probs_PK = policy()
    expected = 0.0
    for p, probs_K in zip(SUCCESS_RATES, probs_PK, strict=True):
        n, chance = ways(p, 8)
        spreads = [
            1 - ((probs_K * side / (probs_K @ side)) ** 2).sum() for side in (CORRECT_K, 1 - CORRECT_K)
        ]
        for size, advantage, spread in zip((n, 8 - n), advantages(n, 8), spreads, strict=True):
            expected += chance @ (size * advantage**2 * (size - 1) * spread) / 48**2
    draws = [
        toy._sample(probs_PK, np.full(6, 8), np.random.default_rng([0, toy._DRAWS, i]), 8)
        for i in range(1000)
    ]
    full = [toy._gradient(NONE, g, toy.select(g, NONE), probs_PK)[0] for g in draws]
    row = simulate({"one": config}, num_draws=1000, num_steps=2)["estimates"]["one"]
    measured = row["error"] ** 2 * np.mean([(g**2).sum() for g in full])
    # A positive quantity of 1000 draws: its relative error is about (its coefficient of variation < 1) / sqrt(1000).
    assert measured == pytest.approx(expected, rel=4.5 / np.sqrt(1000))


def test_unbiased_settings_show_no_bias_and_the_published_ones_do(result):
    estimates = result["estimates"]
    unbiased = [name for name in estimates if name.endswith("unbiased")]
    assert len(unbiased) >= 3
    for name in unbiased:
        assert estimates[name]["bias_low"] == 0.0, name
        assert estimates[name]["bias_high"] > 0.0
        assert estimates[name]["error"] > 0.0, "unbiased is not exact"
    for name in ("mdap", "advantage_only"):
        assert estimates[name]["bias_low"] > 0.3, name
        assert estimates[name]["push_P"][0] > 2
        assert estimates[name]["push_P"][-1] < 0.5
    assert estimates["mdap, unbiased"]["push_P"] == pytest.approx([1.0] * 6), "a class keeps its whole weight"


def test_weights_alone_do_not_mend_the_bias_where_the_denominator_counts_the_kept():
    settings = {**UNBIASED, "zero_variance": "keep_one"}
    configs = {
        kind: FastRLConfig(budget="fixed", **{**settings, "denominator": kind}) for kind in ("full", "kept")
    }
    rows = simulate(configs, num_draws=200, num_steps=2)["estimates"]
    assert rows["full"]["bias_low"] == 0.0
    assert rows["kept"]["bias_low"] > 1.0
    assert rows["kept"]["direction"] > 0.98, "that bias is a step size"


@pytest.mark.parametrize("config", [FastRLConfig(budget="fixed", tau=0.0), NONE], ids=["tau 0", "none"])
def test_what_prunes_nothing_is_the_full_group_exactly(config):
    result = simulate({"this": config, "none": NONE}, num_draws=40, num_steps=10)
    row = result["estimates"]["this"]
    for name in ("bias", "bias_low", "bias_high", "error"):
        assert row[name] == 0.0
    assert (row["kept_share"], row["scale"], row["direction"]) == (
        1.0,
        pytest.approx(1.0),
        pytest.approx(1.0),
    )
    assert row["cosine"] == pytest.approx(1.0)
    assert result["dynamics"]["this"] == result["dynamics"]["none"]


def test_a_configuration_is_compared_on_the_same_groups_whatever_else_is(result):
    alone = simulate({"mdap": PAPER})
    assert alone["estimates"]["mdap"] == result["estimates"]["mdap"]
    assert alone["dynamics"]["mdap"] == result["dynamics"]["mdap"]


def test_what_differs_in_its_budget_alone_is_not_measured_twice(result):
    assert not [name for name in result["estimates"] if name.startswith("budget")]
    assert list(result["dynamics"]) == list(result["configs"])


# --- runs ---------------------------------------------------------------------------------------


def test_a_policy_that_stands_still_stands_still(result):
    for name, runs in result["dynamics"].items():
        assert runs["still"]["success"] == pytest.approx([np.mean(SUCCESS_RATES)] * 80), name
        assert runs["still"]["success_P"] == pytest.approx(list(SUCCESS_RATES)), name
        assert np.mean(runs["moving"]["success_P"]) > 0.9, name


def test_a_fixed_budget_stands_still_and_ars_follows_the_clock_even_on_a_policy_that_does(result):
    assert set(result["dynamics"]["budget fixed"]["still"]["num_rollouts"]) == {8.0}
    still = result["dynamics"]["budget ars"]["still"]["num_rollouts"]
    assert set(still[:40]) == {8.0}, "alpha < 1/2: G' is above its reference"
    assert still[-1] < 8.0
    assert result["dynamics"]["budget ars"]["still"]["sampled"] < 80 * 6 * 8


def test_counts_add_up(result):
    for runs in result["dynamics"].values():
        for run in runs.values():
            assert run["sampled"] == pytest.approx(6 * sum(run["num_rollouts"]))
            assert run["trained"] == pytest.approx(6 * sum(run["kept"]))
            assert run["trained"] <= run["sampled"] <= 80 * 6 * 8
    full = result["dynamics"]["none"]["moving"]
    assert (full["sampled"], full["trained"], full["predicted_speedup"]) == (3840, 3840, pytest.approx(1.0))


def test_the_predicted_speed_up_is_that_of_the_published_stages(result):
    run = result["dynamics"]["budget ars"]["moving"]
    seconds = 87.05 * run["sampled"] / 3840 + (55.44 + 70.14 + 319.37) * run["trained"] / 3840 + 2.96
    assert run["predicted_speedup"] == pytest.approx(534.96 / seconds)


def test_the_full_group_learns_as_its_expected_gradient_does(result):
    logits_PK, _ = policy()
    for _ in range(80):
        logits_PK = logits_PK + toy.RATES["moving"] * toy.expected_gradient(toy.softmax(logits_PK), 8)
    assert np.mean(result["dynamics"]["none"]["moving"]["success_P"]) == pytest.approx(
        np.mean(toy.softmax(logits_PK) @ CORRECT_K), abs=0.03
    )


def test_a_prompt_that_is_skipped_has_no_group_and_does_not_learn(monkeypatch):
    monkeypatch.setattr(FastRL, "plan", lambda self, ids: np.array([0, 8, 2, 8, 0, 4]))
    run = simulate({"paper": PAPER}, num_draws=2, num_steps=20)["dynamics"]["paper"]["moving"]
    assert run["num_rollouts"] == [22 / 6] * 20
    assert [run["success_P"][p] for p in (0, 4)] == pytest.approx([SUCCESS_RATES[p] for p in (0, 4)])
    assert run["success_P"][1] > SUCCESS_RATES[1]


def test_a_step_of_which_everything_is_skipped_is_an_empty_one(monkeypatch):
    monkeypatch.setattr(FastRL, "plan", lambda self, ids: np.zeros(len(ids), dtype=int))
    run = simulate({"paper": PAPER}, num_draws=2, num_steps=3)["dynamics"]["paper"]["moving"]
    assert (run["sampled"], run["trained"], run["kept"]) == (0, 0, [0.0] * 3)


def test_a_toy_that_has_learnt_everything_goes_on():
    config = FastRLConfig(budget="fixed", max_empty_steps=1)
    assert (
        len(simulate({"paper": config}, num_draws=2, num_steps=400)["dynamics"]["paper"]["moving"]["kept"])
        == 400
    )


# --- the whole ----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    first, again, other = (simulate({"a": PAPER}, seed=s, num_draws=20, num_steps=8) for s in (0, 0, 1))
    assert json.dumps(first) == json.dumps(again)
    assert first["estimates"] != other["estimates"]
    assert first["dynamics"] != other["dynamics"]


def test_the_seed_decides_groups_and_not_only_the_policy(monkeypatch):
    logits_PK, _ = policy()
    monkeypatch.setattr(toy, "initial_logits", lambda rng: logits_PK)
    first, other = (simulate({"a": PAPER}, seed=s, num_draws=20, num_steps=8) for s in (0, 1))
    assert first["estimates"]["a"]["push_P"] != other["estimates"]["a"]["push_P"]
    assert first["dynamics"]["a"]["still"]["kept"] != other["dynamics"]["a"]["still"]["kept"]


def test_the_seed_of_a_configuration_decides_its_choices_alone():
    one, two = (FastRLConfig(pruner="random", budget="fixed", seed=s) for s in (0, 1))
    rows = simulate({"one": one, "two": two}, num_draws=20, num_steps=2)["estimates"]
    assert rows["one"]["error"] != rows["two"]["error"]
    assert rows["one"]["kept_share"] == rows["two"]["kept_share"]


def test_the_result_is_json(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_by_default_every_pruner_and_budget_is_there():
    configs = default_configs()
    assert {config.pruner for config in configs.values()} == set(PRUNERS)
    assert {config.budget for config in configs.values()} == set(BUDGETS)
    unbiased = {config.pruner for config in configs.values() if config.weighting == 1.0}
    assert unbiased == {name for name, kind in PRUNERS.items() if "weighting" in kind.options}
    assert configs["mdap"] == PAPER
    assert configs["budget ars"] == FastRLConfig()


@pytest.mark.parametrize(
    ("name", "least"), [("num_draws", 2), ("num_steps", 2), ("num_rollouts", 2), ("seed", 0)]
)
def test_too_little_of_anything_is_refused(name, least):
    with pytest.raises(ConfigError, match=f"{name}: {least - 1} is below {least}"):
        simulate({"a": PAPER}, **{name: least - 1})


def test_a_run_shorter_than_its_epochs_has_epochs_of_one_step():
    run = simulate({"ars": FastRLConfig()}, num_draws=2, num_steps=3)["dynamics"]["ars"]["still"]
    assert len(run["num_rollouts"]) == 3


def test_what_fastrl_refuses_is_refused():
    with pytest.raises(ConfigError, match="below min_rollouts: 9"):
        simulate({"a": FastRLConfig(budget="fixed", min_rollouts=9)}, num_draws=2)


def test_tables_and_figure_name_every_configuration(result, tmp_path):
    pytest.importorskip("matplotlib")
    from rich.console import Console

    from fastrl.report.simulation import draw_simulation, simulation_table

    gradients, runs = simulation_table(result)
    for table, names in ((gradients, result["estimates"]), (runs, result["dynamics"])):
        console = Console(width=140, file=io.StringIO())
        console.print(table)
        printed = console.file.getvalue()
        assert all(f" {name} " in printed for name in names)
        assert table.row_count == len(names)
    files = draw_simulation(result, tmp_path / "simulation")
    assert [file.name for file in files] == ["simulation.svg", "simulation.png"]
    assert all(file.stat().st_size > 10_000 for file in files)
