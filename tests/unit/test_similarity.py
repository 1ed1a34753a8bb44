"""Jaccard distances of n-gram sets: hand-worked values, short and empty responses, the fast matrix."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import Group, GroupError
from fastrl.bench.agreement import spearman
from fastrl.bench.diagnose import read_gram
from fastrl.similarity import SIMILARITIES, jaccard_distance, jaccard_distances, mean_similarity, ngram_set

GRAMS = Path(__file__).parents[3] / "shared" / "data" / "gradient_gram" / "gemma3_270m.json"


def test_ngrams_are_a_set_without_counts():
    assert ngram_set([5, 6, 5, 6]) == {(5,), (6,)}
    assert ngram_set([5, 6, 5, 6], 2) == {(5, 6), (6, 5)}
    assert ngram_set([5, 6, 5, 6], 4) == {(5, 6, 5, 6)}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_empty_response_has_no_ngrams(n):
    assert ngram_set([], n) == frozenset()


def test_a_response_shorter_than_n_is_one_ngram():
    assert ngram_set([7], 3) == {(7,)}
    assert ngram_set([7, 8], 3) == {(7, 8)}


def test_hand_worked_distances():
    assert jaccard_distance(ngram_set([1, 2, 3]), ngram_set([2, 3, 4])) == 0.5
    assert jaccard_distance(ngram_set([1, 2]), ngram_set([3, 4])) == 1.0
    assert jaccard_distance(ngram_set([1, 2, 2]), ngram_set([2, 1])) == 0.0
    assert jaccard_distance(ngram_set([1, 2, 3], 2), ngram_set([1, 2, 4], 2)) == pytest.approx(2 / 3)


def test_two_empty_responses_are_equal_and_far_from_all_others():
    assert jaccard_distance(frozenset(), frozenset()) == 0.0
    assert jaccard_distance(frozenset(), ngram_set([1])) == 1.0
    for n in (1, 2):
        assert jaccard_distances([[], [1, 2], []], n).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_group_of_empty_responses_has_distance_zero(n):
    assert jaccard_distances([[], []], n).tolist() == [[0, 0], [0, 0]]


def test_short_responses_are_equal_only_to_themselves():
    # [1] under n = 2 is the gram (1): not (1, 0), not (1, 1), not a part of (1, 2).
    distances = jaccard_distances([[1], [1], [1, 0], [1, 1], [1, 2], [0]], 2)
    assert distances[0].tolist() == [0, 0, 1, 1, 1, 1]


tokens_G = st.lists(
    st.lists(st.one_of(st.integers(0, 4), st.sampled_from([0, 151_935, 2**31, 2**40])), max_size=9),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200)
@given(tokens_G, st.integers(1, 4))
def test_the_fast_matrix_equals_the_definition_bit_for_bit(responses, n):
    sets = []
    for tokens in responses:
        grams = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
        sets.append(grams or ({tuple(tokens)} if tokens else set()))
    expected = [[1.0 - len(a & b) / len(a | b) if a | b else 0.0 for b in sets] for a in sets]
    assert jaccard_distances(responses, n).tolist() == expected
    fast_sets = [ngram_set(tokens, n) for tokens in responses]
    assert [[jaccard_distance(a, b) for b in fast_sets] for a in fast_sets] == expected


@given(tokens_G, st.integers(1, 3))
def test_distances_are_symmetric_in_the_unit_interval_and_zero_to_oneself(responses, n):
    distances = jaccard_distances(responses, n)
    assert (distances == distances.T).all()
    assert (distances.diagonal() == 0).all()
    assert distances.min() >= 0
    assert distances.max() <= 1


def test_arrays_and_lists_of_tokens_are_the_same():
    lists = [[1, 2, 3], [2, 3]]
    arrays = [np.array(tokens, dtype=np.int32) for tokens in lists]
    assert jaccard_distances(arrays, 2).tolist() == jaccard_distances(lists, 2).tolist()
    assert ngram_set(arrays[0], 2) == ngram_set(lists[0], 2)


def test_mean_similarity_counts_pairs_inside_classes_only():
    distances = np.array([[0.0, 0.25, 1.0], [0.25, 0.0, 1.0], [1.0, 1.0, 0.0]])
    assert mean_similarity(distances, [[0, 1], [2]]) == 0.75
    assert mean_similarity(distances, [[0, 1, 2]]) == pytest.approx(0.25)


def test_mean_similarity_without_a_pair_is_nan():
    assert np.isnan(mean_similarity(np.zeros((2, 2)), [[0], [1]]))
    assert np.isnan(mean_similarity(np.zeros((0, 0)), []))


def group(tokens, **more):
    return Group(prompt_id="q", tokens_G=tokens, rewards_G=np.zeros(len(tokens)), **more)


def test_centred_cosines_by_hand():
    # Counts of (1, 2): (2, 0), (0, 2), (1, 1); their mean is (1, 1), so the features are (1, -1), (-1, 1), 0.
    cosines = SIMILARITIES["centred"](group([[1, 1], [2, 2], [1, 2]]), 1)
    assert cosines == pytest.approx(np.array([[1, -1, 0], [-1, 1, 0], [0, 0, 1]]))


def test_centred_cosines_count_repetitions_where_sets_do_not():
    twice = group([[1, 2, 2, 2], [1, 1, 1, 2], [7, 7]])
    assert SIMILARITIES["jaccard"](twice, 1)[0, 1] == 1.0
    assert SIMILARITIES["centred"](twice, 1)[0, 1] < 0.8


def test_copies_have_similarity_one_even_where_all_are_copies():
    for name in ("jaccard", "centred"):
        assert SIMILARITIES[name](group([[1, 2]] * 3), 1) == pytest.approx(np.ones((3, 3)))


def test_surprisal_leaves_out_what_the_policy_was_sure_of():
    # The first token is certain: only the second counts, which rollouts 0 and 1 share.
    sure = group([[1, 5], [2, 5], [3, 6]], logps_G=[[0.0, -2.0]] * 3)
    assert SIMILARITIES["surprisal"](sure, 1)[0, 1] == pytest.approx(1.0)
    assert SIMILARITIES["centred"](sure, 1)[0, 1] < 0.5


def test_surprisal_of_an_ngram_is_that_of_its_last_token():
    logps = [[-9.0, -1.0, -2.0], [-9.0, -1.0], [-3.0]]
    weighted = group([[1, 2, 3], [1, 2], [4]], logps_G=logps)
    # Bigrams (1,2): 1, 1, 0; (2,3): 2, 0, 0; the short one, (4): 0, 0, 3.
    counts = np.array([[1, 2, 0], [1, 0, 0], [0, 0, 3]]) - np.array([2 / 3, 2 / 3, 1])
    norms = np.linalg.norm(counts, axis=1)
    assert SIMILARITIES["surprisal"](weighted, 2) == pytest.approx(counts @ counts.T / np.outer(norms, norms))


def test_sketches_give_their_cosines():
    sketched = group([[1], [2]], sketch_G=np.array([[3.0, 4.0], [4.0, 3.0]]))
    assert SIMILARITIES["gradient"](sketched, 1)[0, 1] == pytest.approx(24 / 25)


@pytest.mark.parametrize(("name", "remedy"), [("surprisal", "use_vllm"), ("gradient", "sketch_G")])
def test_what_a_similarity_lacks_is_named(name, remedy):
    with pytest.raises(GroupError, match=remedy):
        SIMILARITIES[name](group([[1], [2]]), 1)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=1, max_size=6), st.integers(1, 3))
def test_every_similarity_is_symmetric_bounded_and_positive_semidefinite(responses, n):
    rng = np.random.default_rng(0)
    logps = [(-rng.random(len(tokens))).tolist() for tokens in responses]
    full = group(responses, logps_G=logps, sketch_G=rng.normal(size=(len(responses), 3)))
    for name, similarity in SIMILARITIES.items():
        matrix = similarity(full, n)
        assert matrix.shape == (len(responses),) * 2
        assert matrix == pytest.approx(matrix.T)
        assert np.abs(matrix).max() <= 1.0
        assert matrix.diagonal() == pytest.approx(np.ones(len(responses)))
        assert np.linalg.eigvalsh(matrix).min() > -1e-6, name


@pytest.mark.skipif(not GRAMS.exists(), reason="the shared gradients are not on this machine")
def test_real_gradients_agree_with_centred_counts_more_than_with_sets():
    """Spearman over all pairs of a prompt, mean of three prompts of a pretrained 270M model; n = 1."""
    groups, grams = read_gram(GRAMS)
    found = {}
    for name in ("jaccard", "centred", "surprisal"):
        each = []
        for one, gram_GG in zip(groups, grams, strict=True):
            pairs = np.triu_indices(one.num_rollouts, 1)
            norm_G = np.sqrt(gram_GG.diagonal())
            each.append(
                spearman(SIMILARITIES[name](one, 1)[pairs], (gram_GG / np.outer(norm_G, norm_G))[pairs])
            )
        found[name] = float(np.mean(each))
    assert found == pytest.approx({"jaccard": 0.23, "centred": 0.57, "surprisal": 0.10}, abs=0.01)
