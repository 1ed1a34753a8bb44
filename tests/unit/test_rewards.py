"""The paper's reward on the testbed: the box, the format, and the two functions a trainer calls."""

import time

import pytest

from fastrl.rewards import accuracy_reward, extract_boxed, format_reward

GOOD = r"<think> 60 + 50 = 110 , 180 - 110 = 70 </think> \boxed{ 70 }"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{ 70 }", "70"),
        (r"\boxed{1} or rather \boxed{2}, I think", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{ 1 \boxed{2}", "2"),
        (r"} { \boxed{7} }", "7"),
        ("\\boxed{\n8\n}", "8"),
        (r"\boxed{}", ""),
        (r"\boxed{9", None),
        (r"\fbox{9} boxed{9}", None),
        ("", None),
    ],
)
def test_extract_boxed_takes_the_last_balanced_box(text, content):
    assert extract_boxed(text) == content


def test_extract_boxed_is_linear_on_a_degenerate_loop():
    start = time.process_time()
    assert extract_boxed(r"\boxed{" * 100_000) is None
    assert time.process_time() - start < 2.0  # CPU seconds; a rescan per box would take minutes


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "\n" + GOOD + "\n",
        "<think>a\nb</think>\nSo the answer is\n\\boxed{70}.",
        r"<think>first \boxed{1}</think>\boxed{70} is what I found",
    ],
)
def test_good_format(text):
    assert format_reward([text]) == [0.5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "70",
        r"\boxed{70}",
        r"<think></think>\boxed{70}",
        r"<think> </think>\boxed{70}",
        r"<think>a</think>",
        r"<think>a</think> 70",
        r"<think>a</think>\boxed{ }",
        r"<think>a</think>\boxed{70",
        r"<think>a \boxed{70}</think>",
        r"<think>a \boxed{70}",
        r"a</think>\boxed{70}",
        r"Well, <think>a</think>\boxed{70}",
        r"<think>a</think>\boxed{70}<think>b</think>\boxed{70}",
        r"<think>a<think>b</think>\boxed{70}",
        r"\boxed{70}<think>a</think>",
    ],
)
def test_bad_format(text):
    assert format_reward([text]) == [0.0]


def test_accuracy_does_not_depend_on_format():
    texts = [GOOD, r"\boxed{70.0}", "70", r"<think>a</think>\boxed{69}", r"\boxed{70} no, \boxed{69}"]
    assert accuracy_reward(texts, answer=["70"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_strings_messages_and_blocks_score_the_same():
    message = [{"role": "assistant", "content": GOOD}]
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": GOOD}]}]
    turns = [{"role": "assistant", "content": r"\boxed{1}"}, {"role": "tool", "content": "?"}, *message]
    completions = [GOOD, message, blocks, turns]
    assert accuracy_reward(completions, answer=["70"] * 4) == [1.0] * 4
    assert format_reward(completions) == [0.5] * 4


def test_a_message_without_content_is_a_wrong_answer():
    completions = [[{"role": "assistant", "content": None}]]
    assert accuracy_reward(completions, answer=["70"]) == [0.0]
    assert format_reward(completions) == [0.0]


def test_without_a_gold_answer_there_is_no_score():
    assert accuracy_reward([GOOD] * 4, answer=[None, "", "  ", 70]) == [None, None, None, 1.0]


def test_columns_of_the_trainer_are_ignored():
    columns = {"prompts": ["?"], "completion_ids": [[1, 2]], "trainer_state": None, "family": ["circle"]}
    assert accuracy_reward(completions=[GOOD], answer=["70"], **columns) == [1.0]
    assert format_reward(completions=[GOOD], answer=["70"], **columns) == [0.5]


@pytest.mark.parametrize("wrong", [None, 70, {"content": GOOD}, [GOOD]])
def test_a_completion_of_the_wrong_type_is_named(wrong):
    with pytest.raises(TypeError, match="completion 1 is"):
        format_reward([GOOD, wrong])
    with pytest.raises(TypeError, match="completion 1 is"):
        accuracy_reward([GOOD, wrong], answer=["70", "70"])


def test_as_many_answers_as_completions():
    with pytest.raises(ValueError, match="2 completions came with 1 answers"):
        accuracy_reward([GOOD, GOOD], answer=["70"])
