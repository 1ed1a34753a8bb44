"""`diagnose` against closed forms, hand-computed ranks, and real gradients of a 270M language model."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastrl import ConfigError, FastRLConfig, Group, GroupError
from fastrl.advantages import group_advantages
from fastrl.bench.agreement import find_pairs, pearson, ranks, spearman
from fastrl.bench.diagnose import at_share, diagnose, read_gram, score_selection, write_gram
from fastrl.method import select
from fastrl.similarity import jaccard_distances

DATA = Path(__file__).parents[2] / "../shared/data/gradient_gram"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared gradients are not on this machine")

NONE = FastRLConfig(pruner="none", budget="fixed")
UNBIASED = FastRLConfig(
    representative="random", weighting=1.0, align="dummy", denominator="full", budget="fixed"
)


def jaccard(group: Group) -> np.ndarray:
    return 1.0 - jaccard_distances(group.tokens_G)


def random_groups(num: int, num_rollouts: int, seed: int = 0) -> tuple[list[Group], list[np.ndarray]]:
    """Groups of 0/1 rewards with one right rollout at least, and Gram matrices of random gradients."""
    rng = np.random.default_rng(seed)
    groups, grams = [], []
    for p in range(num):
        rewards_G = (rng.random(num_rollouts) < 0.5).astype(float)
        rewards_G[:2] = 0.0, 1.0
        tokens_G = [rng.integers(0, 6, size=5).tolist() for _ in range(num_rollouts)]
        groups.append(Group(prompt_id=f"p{p}", tokens_G=tokens_G, rewards_G=rewards_G))
        gradients_GD = rng.standard_normal((num_rollouts, 20))
        grams.append(gradients_GD @ gradients_GD.T)
    return groups, grams


def protocol_rewards(num_right: int, rng: np.random.Generator, num_rollouts: int = 12) -> np.ndarray:
    """Rewards of the shared data's protocol: 1 for some rollouts at random, else 0, plus 0.1 x uniform noise."""
    rewards_G = np.zeros(num_rollouts)
    rewards_G[rng.choice(num_rollouts, num_right, replace=False)] = 1.0
    return rewards_G + 0.1 * rng.random(num_rollouts)


def all_subsets(num_rollouts: int, num_kept: int) -> np.ndarray:
    """(number of subsets, G) weights of 0 and 1."""
    chosen = np.array(list(itertools.combinations(range(num_rollouts), num_kept)))
    weights = np.zeros((len(chosen), num_rollouts))
    np.put_along_axis(weights, chosen, 1.0, axis=1)
    return weights


# --- scores -----------------------------------------------------------------------------------------


def test_two_rollouts_by_hand():
    """Gradients (1, 0) and (3, 4), advantages 1 and -1: full = (-2, -4), and the first alone is (1, 0)."""
    gram = np.array([[1.0, 3.0], [3.0, 25.0]])
    cosine, error = score_selection(gram, np.array([1.0, -1.0]), np.array([1.0, 0.0]))
    assert cosine == pytest.approx(-2 / math.sqrt(20), abs=1e-12)
    assert error == pytest.approx(5 / math.sqrt(20), abs=1e-12)  # (1, 0) - (-2, -4) = (3, 4)
    cosine, error = score_selection(gram, np.array([1.0, -1.0]), np.array([0.0, 2.0]))
    assert cosine == pytest.approx((12 + 32) / (10 * math.sqrt(20)), abs=1e-12)
    assert error == pytest.approx(math.sqrt(16 + 16) / math.sqrt(20), abs=1e-12)


def test_scores_equal_those_of_explicit_gradient_vectors():
    rng = np.random.default_rng(1)
    gradients_GD = rng.standard_normal((7, 11))
    advantages_G = rng.standard_normal(7)
    weights = rng.random((5, 7)) * (rng.random((5, 7)) < 0.6)
    cosine, error = score_selection(gradients_GD @ gradients_GD.T, advantages_G, weights)
    full = advantages_G @ gradients_GD
    for k in range(5):
        pruned = (weights[k] * advantages_G) @ gradients_GD
        assert cosine[k] == pytest.approx(
            pruned @ full / np.linalg.norm(pruned) / np.linalg.norm(full), abs=1e-10
        )
        assert error[k] == pytest.approx(np.linalg.norm(pruned - full) / np.linalg.norm(full), abs=1e-10)


def test_nothing_kept_has_no_direction_and_loses_everything():
    assert score_selection(np.eye(3), np.array([1.0, 0.0, -1.0]), np.zeros(3)) == (0.0, 1.0)


def test_a_full_gradient_of_zero_has_no_score():
    assert np.isnan(score_selection(np.ones((2, 2)), np.array([1.0, -1.0]), np.ones(2))).all()


# --- correlations -----------------------------------------------------------------------------------


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks(np.array([10.0, 30.0, 10.0, 20.0, 10.0])).tolist() == [2.0, 5.0, 2.0, 4.0, 2.0]


def test_spearman_with_ties_by_hand():
    """Ranks (1, 2.5, 2.5, 4) and (1.5, 1.5, 4, 3): deviations multiply to 2.25, 4.5 and 4.5 square-sum.

    x - 2.5 = (-1.5, 0, 0, 1.5), y - 2.5 = (-1, -1, 1.5, 0.5): 1.5 + 0.75 = 2.25.
    """
    x, y = np.array([1.0, 5.0, 5.0, 9.0]), np.array([2.0, 2.0, 8.0, 3.0])
    assert spearman(x, y) == pytest.approx(2.25 / math.sqrt(4.5 * 4.5), abs=1e-12)
    assert pearson(x, 3 - 2 * x) == pytest.approx(-1.0)
    assert math.isnan(spearman(x, np.ones(4)))


def test_pairs_stay_inside_advantage_classes_and_copies_count_once():
    tokens_G = [[1, 2], [1, 2], [3], [4], [1, 2], []]
    group = Group(
        prompt_id="p",
        tokens_G=tokens_G,
        rewards_G=np.array([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        advantages_G=np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    )
    gradients_GD = np.array([[1.0, 0], [1, 0], [1, 1], [0, 2], [1, 0], [0, 0]])  # the empty one has none
    gram = gradients_GD @ gradients_GD.T
    found = find_pairs([group], [gram], [0], "class")
    assert list(zip(found.i, found.j, strict=True)) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert found.cosine.tolist() == [1.0, 0.707107, 0.707107, 0.0]
    assert sorted(find_pairs([group], [gram], [0], "class_distinct").cosine) == [0.0, 0.707107]
    # Texts [1, 2], [3] and [4], whatever their advantage.
    assert sorted(find_pairs([group], [gram], [0], "group_distinct").cosine) == [0.0, 0.707107, 0.707107]


def test_a_similarity_that_is_the_cosine_agrees_perfectly_and_a_reversed_one_not_at_all():
    groups, grams = random_groups(4, 6)
    cosines = {
        group.prompt_id: gram / np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
        for group, gram in zip(groups, grams, strict=True)
    }
    result = diagnose(
        groups, grams,
        {"exact": lambda g: cosines[g.prompt_id], "reversed": lambda g: -cosines[g.prompt_id]},
        {}, num_draws=2,
    )  # fmt: skip
    exact, against = (result["similarities"][name]["class"] for name in ("exact", "reversed"))
    assert exact["num"] == result["pairs"]["class"]["num"] > 10
    assert exact["spearman"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert exact["pearson"]["value"] == pytest.approx(1.0, abs=1e-9)
    assert exact["pearson"]["se"] == pytest.approx(0.0, abs=1e-6)
    assert exact["eps"] < 1e-6
    assert against["pearson"]["value"] == pytest.approx(-1.0, abs=1e-9)
    points = np.array(exact["points"])
    assert against["eps"] == pytest.approx(2 * np.abs(points[:, 1]).mean(), abs=1e-5)
    assert result["pairs"]["class"]["spread"] == pytest.approx(
        np.abs(points[:, 1] - np.median(points[:, 1])).mean()
    )


def test_standard_errors_of_correlations_are_between_groups():
    """Two copies of one group: leaving one out changes nothing. Three groups: the jackknife's formula."""
    groups, grams = random_groups(3, 8, seed=5)
    twice = [groups[0], replace(groups[0], prompt_id="copy")]
    same = diagnose(twice, [grams[0]] * 2, {"jaccard": jaccard}, {}, num_draws=2)
    assert same["similarities"]["jaccard"]["class"]["pearson"]["se"] == pytest.approx(0.0, abs=1e-12)

    def pearson_of(places: list[int]) -> dict:
        chosen = [groups[p] for p in places], [grams[p] for p in places]
        result = diagnose(*chosen, {"jaccard": jaccard}, {}, num_draws=2)
        return result["similarities"]["jaccard"]["class"]["pearson"]

    assert pearson_of([0])["se"] is None
    left_out = np.array([pearson_of(places)["value"] for places in ([1, 2], [0, 2], [0, 1])])
    expected = math.sqrt(2 / 3 * ((left_out - left_out.mean()) ** 2).sum())
    assert expected > 0.01
    assert pearson_of([0, 1, 2])["se"] == pytest.approx(expected, abs=1e-12)


# --- pruners ----------------------------------------------------------------------------------------


def test_keeping_all_is_the_full_gradient():
    groups, grams = random_groups(3, 6)
    found = diagnose(groups, grams, {}, {"none": NONE}, num_draws=2)["pruners"]["none"]
    assert found["kept_frac"] == 1.0
    for name, value in (
        ("cosine", 1.0),
        ("error", 0.0),
        ("random_cosine", 1.0),
        ("cosine_gain", 0.0),
        ("error_gain", 0.0),
    ):
        assert found[name]["mean"] == pytest.approx(value, abs=1e-12), name
        assert found[name]["se"] == pytest.approx(0.0, abs=1e-12), name
    assert found["bias"] == pytest.approx(0.0, abs=1e-9)


def test_a_pruner_without_chance_is_scored_as_one_selection_and_its_bias_is_its_error():
    groups, grams = random_groups(5, 8)
    config = FastRLConfig(tau=0.8, budget="fixed")
    found = diagnose(groups, grams, {}, {"mdap": config}, num_draws=3)["pruners"]["mdap"]
    scores = [
        score_selection(gram, group_advantages(group.rewards_G), selection.weight_G)
        for group, gram, selection in zip(groups, grams, select(groups, config), strict=True)
    ]
    errors = np.array([score.error for score in scores])
    assert found["error"]["mean"] == pytest.approx(errors.mean())
    assert found["error"]["se"] == pytest.approx(errors.std(ddof=1) / math.sqrt(5))
    assert found["cosine"]["mean"] == pytest.approx(np.mean([score.cosine for score in scores]))
    assert found["bias"] == pytest.approx(math.sqrt((errors**2).mean()))
    assert found["config"] == config.to_dict()


def test_bias_tells_the_unbiased_setting_from_the_published_one():
    groups, grams = random_groups(6, 8)
    configs = {
        "random": FastRLConfig(pruner="random", budget="fixed"),
        "random, unbiased": FastRLConfig(pruner="random", weighting=1.0, align="dummy", budget="fixed"),
        "mdap, unbiased": UNBIASED,
        "mdap": FastRLConfig(budget="fixed"),
    }
    found = diagnose(groups, grams, {}, configs, num_draws=400)["pruners"]
    # Half of the rollouts at weight 1: the mean is half of the full gradient, for any Gram matrix.
    assert found["random"]["bias"] == pytest.approx(0.5, abs=0.03)
    for name in ("random, unbiased", "mdap, unbiased"):
        # The mean over 400 draws is off by error / 20; what is left after taking that off is smaller.
        assert found[name]["bias"] < found[name]["error"]["mean"] / 20
    assert found["mdap"]["bias"] > 0.3


def test_the_random_twin_of_random_selection_is_as_good():
    """Whatever the weights: the twin has as many rollouts and the same total weight."""
    groups, grams = random_groups(20, 8, seed=3)
    configs = {
        "paper": FastRLConfig(pruner="random", budget="fixed"),
        "unbiased": FastRLConfig(pruner="random", weighting=1.0, align="dummy", budget="fixed"),
    }
    found = diagnose(groups, grams, {}, configs, num_draws=100)["pruners"]
    for name in configs:
        for gain in (found[name]["cosine_gain"], found[name]["error_gain"]):
            assert 0 < gain["se"] < 0.03
            assert abs(gain["mean"]) < 3.5 * gain["se"]
    assert found["unbiased"]["random_error"]["mean"] > 1.2 * found["paper"]["random_error"]["mean"]


def test_the_same_seed_gives_the_same_result_and_another_seed_another():
    groups, grams = random_groups(3, 6)
    run = [
        diagnose(groups, grams, {"jaccard": jaccard}, {"u": UNBIASED}, num_draws=4, seed=s) for s in (0, 0, 1)
    ]
    assert run[0] == run[1]
    assert run[0]["pruners"] != run[2]["pruners"]


def test_groups_without_signal_are_counted_and_change_no_mean():
    groups, grams = random_groups(3, 4)
    flat = Group(prompt_id="flat", tokens_G=[[1], [2], [3]], rewards_G=np.ones(3))
    blind = Group(prompt_id="blind", tokens_G=[[1], [2]], rewards_G=np.full(2, np.nan))
    cancels = Group(prompt_id="cancels", tokens_G=[[1], [1]], rewards_G=np.array([0.0, 1.0]))
    same_up_to_rounding = np.array([[1.0, 1.0 - 1e-8], [1.0 - 1e-8, 1.0]])
    more = [*groups, flat, blind, cancels]
    configs = {"mdap": FastRLConfig(budget="fixed")}
    alone = diagnose(groups, grams, {"jaccard": jaccard}, configs, num_draws=2)
    matrices = [*grams, np.eye(3), np.eye(2), same_up_to_rounding]
    result = diagnose(more, matrices, {"jaccard": jaccard}, configs, num_draws=2)
    assert result["groups"] == {
        "num": 6,
        "signal": 3,
        "zero_variance": 1,
        "unscorable": 1,
        "cancelled": 1,
    }
    assert result["similarities"] == alone["similarities"]
    for name in ("kept_frac", "cosine", "error", "bias"):
        assert result["pruners"]["mdap"][name] == alone["pruners"]["mdap"][name]


def test_no_signal_at_all_is_no_crash_and_no_number():
    flat = Group(prompt_id="flat", tokens_G=[[1], [2]], rewards_G=np.ones(2))
    result = diagnose([flat], [np.eye(2)], {"jaccard": jaccard}, {"mdap": FastRLConfig()})
    assert result["pairs"]["class"] == {"num": 0, "mean": None, "spread": None}
    assert result["similarities"]["jaccard"]["class"]["spearman"] == {"value": None, "se": None}
    assert result["pruners"]["mdap"]["cosine"] == {"mean": None, "se": None}
    assert result["pruners"]["mdap"]["kept_frac"] is None
    json.dumps(result, allow_nan=False)


def test_a_common_kept_share():
    groups, grams = random_groups(12, 8)
    # Groups without an advantage do not count: MDAP keeps one of each of these, at any tau above 0.
    groups += [Group(prompt_id=f"flat{p}", tokens_G=[[1]] * 8, rewards_G=np.ones(8)) for p in range(12)]
    grams += [np.eye(8)] * 12
    configs = {
        "mdap": FastRLConfig(budget="fixed"),
        "random": FastRLConfig(pruner="random", budget="fixed"),
        "none": NONE,
    }
    brought = at_share(groups, configs, 0.5)
    found = diagnose(groups, grams, {}, brought, num_draws=2)["pruners"]
    assert found["random"]["kept_frac"] == 0.5
    assert found["mdap"]["kept_frac"] == pytest.approx(0.5, abs=0.1)
    assert brought["none"] == NONE
    with pytest.raises(ConfigError, match=r"share: 0 is outside \(0, 1\]"):
        at_share(groups, configs, 0)


# --- bad input --------------------------------------------------------------------------------------


def test_bad_input_names_the_prompt_and_the_remedy():
    groups, grams = random_groups(2, 3)
    with pytest.raises(ConfigError, match="num_draws: 1 is below 2"):
        diagnose(groups, grams, {}, {}, num_draws=1)
    with pytest.raises(GroupError, match="2 groups came with 1 Gram matrices"):
        diagnose(groups, grams[:1], {}, {})
    with pytest.raises(GroupError, match=r"prompt 'p1': the Gram matrix has the shape \(2, 2\)"):
        diagnose(groups, [grams[0], np.eye(2)], {}, {})
    with pytest.raises(GroupError, match="prompt 'p0': the Gram matrix has values that are not finite"):
        diagnose(groups, [grams[0] * np.nan, grams[1]], {}, {})
    with pytest.raises(GroupError, match="prompt 'p0': the similarity 'odd' has the shape"):
        diagnose(groups, grams, {"odd": lambda g: np.eye(5)}, {})


# --- files ------------------------------------------------------------------------------------------


def test_gram_files_bring_everything_back(tmp_path):
    groups, grams = random_groups(2, 3)
    groups[1] = replace(
        groups[1],
        rewards_G=np.array([0.0, np.nan, 1.0]),
        advantages_G=np.array([-1.0, 0.0, 1.0]),
        outcomes_G=np.array([0.0, np.nan, 1.0]),
        logps_G=[[-0.5] * 5, [-1.0] * 5, [-2.0] * 5],
    )
    write_gram(tmp_path / "folder" / "gram.json", groups, grams)
    read, matrices = read_gram(tmp_path / "folder" / "gram.json")
    for group, again in zip(groups, read, strict=True):
        assert again.prompt_id == group.prompt_id
        assert again.tokens_G == group.tokens_G
        assert (again.logps_G is None) == (group.logps_G is None)
        if group.logps_G is not None:
            np.testing.assert_array_equal(np.array(again.logps_G), np.array(group.logps_G))
        for name in ("rewards_G", "advantages_G", "outcomes_G"):
            np.testing.assert_array_equal(getattr(again, name), getattr(group, name))
    np.testing.assert_array_equal(matrices, grams)
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["gram.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", "Expecting property name"),
        ('{"prompt": 0}', "not a list of records"),
        ('[{"prompt": 0, "completions": [[1]]}]', "record 0: the field 'gram' is missing"),
        ('[{"prompt": 0, "completions": [[1]], "gram": [[1, 2]]}]', r"record 0: prompt '0': the Gram matrix has"),
        ('[{"prompt": 0, "completions": [[1]], "gram": [[1], [1, 2]]}]', "record 0: "),
        ('[{"prompt": 0, "completions": [[1]], "rewards": [1, 2], "gram": [[1]]}]', "record 0: prompt '0'"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_gram_file_is_an_error_that_names_the_place(tmp_path, content, message):
    (tmp_path / "gram.json").write_text(content)
    with pytest.raises(GroupError, match=message) as caught:
        read_gram(tmp_path / "gram.json")
    assert "gram.json" in str(caught.value)


# --- real gradients ---------------------------------------------------------------------------------


@needs_data
def test_real_gradients_of_a_language_model_under_the_protocol_of_their_readme():
    """Selection of 4 of 12 under drawn rewards: random < max variance < top |A| < the best of all 495 subsets.

    The figures were computed once by a separate script with explicit sums (300 draws per prompt and number of
    right rollouts): random 0.554, max variance 0.743, top |A| 0.813, best 0.863.
    """
    groups, grams = read_gram(DATA / "gemma3_270m.json")
    assert all(np.isnan(group.rewards_G).all() for group in groups)  # the file has none
    subsets = all_subsets(12, 4)
    rng = np.random.default_rng(11)
    found: dict[str, list[float]] = {name: [] for name in ("random", "variance", "top", "best")}
    for gram, num_right, _ in itertools.product(grams, (2, 3, 4, 6), range(40)):
        rewards_G = protocol_rewards(num_right, rng)
        advantages_G = group_advantages(rewards_G)
        cosine = score_selection(gram, advantages_G, subsets).cosine
        spread = (subsets @ rewards_G**2) / 4 - (subsets @ rewards_G / 4) ** 2
        found["random"].append(cosine.mean())  # exact: all subsets are equally likely
        found["variance"].append(cosine[spread.argmax()])
        found["top"].append(cosine[(subsets @ np.abs(advantages_G)).argmax()])
        found["best"].append(cosine.max())
    for name, anchor in (("random", 0.554), ("variance", 0.743), ("top", 0.813), ("best", 0.863)):
        se = np.std(found[name]) / math.sqrt(len(found[name]))
        assert se < 0.01, name
        assert np.mean(found[name]) == pytest.approx(anchor, abs=4 * se), name


@needs_data
def test_copies_explain_the_correlation_of_a_policy_of_low_entropy():
    groups, grams = read_gram(DATA / "tiny_vlm.json")
    configs = {"copies": replace(UNBIASED, tau=0.02), "all": UNBIASED}
    result = diagnose(groups, grams, {"jaccard": jaccard}, configs, num_draws=8)
    assert result["groups"]["zero_variance"] == 1
    found = result["similarities"]["jaccard"]
    assert found["class"]["num"] == 822
    assert found["class"]["pearson"]["value"] == pytest.approx(0.84, abs=0.005)  # as its README says
    assert found["class_distinct"]["num"] == 5
    assert found["class_distinct"]["pearson"]["value"] < 0
    # Clusters of copies lose nothing, whichever member speaks for them; tau = 0.8 merges different texts too.
    assert result["pruners"]["copies"]["error"]["mean"] < 1e-3
    assert result["pruners"]["copies"]["kept_frac"] < 0.2
    assert result["pruners"]["all"]["error"]["mean"] > 0.05
