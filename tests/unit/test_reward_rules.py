r"""The published rewards in numbers, and the same numbers through the signatures of TRL, verl and EasyR1."""

import importlib.util
from pathlib import Path

import pytest

from fastrl.rewards import easyr1, verl
from fastrl.rewards.functions import reward_functions
from fastrl.rewards.rules import RULES

THINKING = r"<thinking>60 + 50 = 110</thinking> so \boxed{70}"
THINK = r"<think>60 + 50 = 110</think> so \boxed{70}"
R1V = "<think>60 + 50 = 110</think>\n<answer>70</answer>"
BARE = r"it is \boxed{70}"
CASES = {
    # rule: (completion, gold) -> (accuracy, format, total)
    "paper": {
        (THINKING, "70"): (1, 1, 1.5),
        (THINKING, "71"): (0, 1, 0.5),
        (THINK, "70"): (1, 0, 1.0),  # other tags
        (BARE, "70"): (1, 0, 1.0),
        ("70", "70"): (0, 0, 0.0),  # no box
        (r"<thinking></thinking>\boxed{70}", "70"): (1, 0, 1.0),  # no reasoning
        (r"First. <thinking>x</thinking>\boxed{70}", "70"): (1, 0, 1.0),  # words before
        (r"<thinking>x</thinking>\boxed{70}<thinking>y</thinking>", "70"): (1, 0, 1.0),  # twice
        ("<thinking>several\nlines</thinking>\n" + r"\boxed{\frac{1}{2}}", "0.5"): (1, 1, 1.5),
    },
    "easyr1_math": {
        (THINK, "70"): (1, 1, 1.0),
        (THINK, "71"): (0, 1, 0.1),
        (BARE, "70"): (1, 0, 0.9),
        (r"< think >x< / think > \boxed{70}", "70"): (1, 1, 1.0),  # white space around tags does not matter
        (r"<think>x</think>\boxed{}", "70"): (0, 1, 0.1),
        (r"words <think>x</think>\boxed{70}", "70"): (1, 0, 0.9),
        ("", "70"): (0, 0, 0.0),
    },
    "r1v": {
        (R1V, "70"): (1, 1, 1.0),
        (R1V, "71"): (0, 1, 0.5),
        ("<think>a\nb</think> <answer>\n70\n</answer>", "70"): (1, 1, 1.0),  # over several lines
        ("<answer>70</answer>", "70"): (1, 0, 0.5),
        (R1V + " and so on", "70"): (1, 0, 0.5),
    },
    "accuracy": {(BARE, "70"): (1, 0, 1.0), (R1V, "70"): (1, 0, 1.0), (BARE, "7"): (0, 0, 0.0)},
}
FLAT = [(name, *case, expected) for name, cases in CASES.items() for case, expected in cases.items()]


@pytest.mark.parametrize(("name", "text", "gold", "expected"), FLAT)
def test_a_rule_and_its_three_signatures_give_the_published_numbers(name, text, gold, expected):
    accuracy, in_format, total = expected
    score = RULES[name].score(text, gold)
    assert (score.accuracy, score.format, score.total) == (accuracy, in_format, pytest.approx(total))

    through_trl = [
        f(completions=[text], answer=[gold], completion_ids=[[1]]) for f in reward_functions(RULES[name])
    ]
    assert sum(part[0] for part in through_trl) == pytest.approx(total)

    through_verl = getattr(verl, name)("any/data", text, gold, {"index": 3})
    assert through_verl["score"] == pytest.approx(total)
    assert (through_verl["accuracy"], through_verl["format"]) == (accuracy, in_format)

    row = {"response": text, "response_length": 9, "ground_truth": gold}
    (through_easyr1,) = getattr(easyr1, name)([row])
    assert through_easyr1["overall"] == pytest.approx(total)
    assert through_easyr1["accuracy"] == accuracy


@pytest.mark.parametrize("name", RULES)
def test_an_unreadable_gold_is_unscorable_everywhere(name):
    for gold in (None, "", "  "):
        for function in reward_functions(RULES[name].with_overlong(4, 8)):
            assert function(completions=[THINK], answer=[gold], completion_ids=[[1] * 8]) == [None]
        scored = getattr(verl, name)("any/data", THINK, gold)
        assert (scored["score"], scored["unscorable"]) == (0.0, 1.0)
        (scored,) = getattr(easyr1, name)([{"response": THINK, "ground_truth": gold}])
        assert (scored["overall"], scored["unscorable"]) == (0.0, 1.0)


def test_kinds_of_answers_are_counted():
    logged = {}
    accuracy, *_ = reward_functions(RULES["accuracy"])
    texts, golds = [r"\boxed{1}", r"\boxed{2}", "no box", r"\boxed{1}"], ["1", "1", "1", ""]
    assert accuracy(completions=texts, answer=golds, log_metric=logged.__setitem__) == [1.0, 0.0, 0.0, None]
    assert logged == {
        "answers/right": 0.25, "answers/wrong": 0.25, "answers/no_answer": 0.25, "answers/unparsable_gold": 0.25,
    }  # fmt: skip


def test_the_parts_are_named_and_only_those_that_exist():
    names = {name: [f.__name__ for f in reward_functions(rule)] for name, rule in RULES.items()}
    assert names["paper"] == ["accuracy_reward", "format_reward"]
    assert names["accuracy"] == ["accuracy_reward"]
    assert [f.__name__ for f in reward_functions(RULES["paper"].with_overlong(2, 8))] == [
        "accuracy_reward", "format_reward", "overlong_reward",
    ]  # fmt: skip


def test_the_overlong_penalty_is_trls():
    trl_rewards = pytest.importorskip("trl.rewards")
    theirs = trl_rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    ours = reward_functions(RULES["accuracy"].with_overlong(8, 20))[1]
    ids = [[0] * length for length in range(25)]
    assert ours(completion_ids=ids) == pytest.approx(theirs(completion_ids=ids))
    assert ours(completion_ids=[[0] * 12, [0] * 16, [0] * 20]) == pytest.approx([0.0, -0.5, -1.0])


def test_a_rule_without_a_buffer_punishes_nothing():
    assert RULES["paper"].overlong(10**6) == 0.0


@pytest.mark.parametrize("buffer", [-1, 9])
def test_a_buffer_longer_than_an_answer_is_refused(buffer):
    with pytest.raises(ValueError, match=r"overlong buffer: .* outside \[0, 8\]"):
        RULES["paper"].with_overlong(buffer, 8)


def test_easyr1_punishes_by_the_lengths_that_it_passes():
    rows = [{"response": BARE, "response_length": length, "ground_truth": "70"} for length in (4, 6, 8)]
    scored = easyr1.accuracy(rows, overlong_buffer=4, max_response_length=8)
    assert [row["overall"] for row in scored] == [1.0, 0.5, 0.0]


def test_easyr1_can_load_the_file_by_its_path():
    path = Path(easyr1.__file__)
    spec = importlib.util.spec_from_file_location("custom_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.REWARD_TYPE, module.REWARD_NAME) == ("batch", "fastrl")
    assert module.paper([{"response": THINKING, "ground_truth": "70"}])[0]["overall"] == 1.5


def test_conversations_are_read_and_other_things_refused():
    accuracy, in_format = reward_functions(RULES["paper"])
    chat = [{"role": "assistant", "content": [{"type": "text", "text": THINKING}]}]
    assert accuracy(completions=[chat], answer=["70"]) == [1.0]
    assert in_format(completions=[chat]) == [0.5]
    with pytest.raises(TypeError, match="completion 1 is int"):
        accuracy(completions=["x", 3], answer=["1", "2"])
    with pytest.raises(ValueError, match="2 completions came with 1 answers"):
        accuracy(completions=["x", "y"], answer=["1"])
