"""Laws of grading: an answer equals itself, harmless rewriting changes nothing, and no text makes it raise."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify")

from fastrl.rewards.exact import read_number
from fastrl.rewards.extraction import extract_answer, extract_boxed, extract_tagged
from fastrl.rewards.grading import Status, grade, grade_answer
from fastrl.rewards.mathruler import grade_mathruler

TABLE = Path(__file__).parents[1] / "unit" / "decisions" / "geoqa_r1v.jsonl"
GOLDS = sorted({json.loads(line)["gold"] for line in TABLE.read_text(encoding="utf-8").splitlines()})

whole = st.integers(1, 999)
roots = st.integers(2, 60)
units = st.sampled_from(["", "°", "cm", " cm", "m", "米", "cm^{2}", "cm²", "海里", "小时"])


@st.composite
def expressions(draw: st.DrawFn) -> str:
    a, b, root = draw(whole), draw(whole), draw(roots)
    shape = draw(
        st.sampled_from(
            ["{a}", "-{a}", "{a}.{b}", "\\frac{{{a}}}{{{b}}}", "{a}/{b}", "{a}√{{{r}}}", "{a}+{b}√{{{r}}}", "{a}π",
             "\\frac{{√{{{r}}}}}{{{b}}}", "\\frac{{{a}}}{{{b}}}π", "{a}\\sqrt{{{r}}}-{b}"]
        )
    )  # fmt: skip
    return shape.format(a=a, b=b, r=root)


@pytest.mark.parametrize("gold", GOLDS)
def test_every_gold_equals_itself(gold):
    assert grade_answer(gold, gold) == 1.0
    assert grade_answer(f" {gold}\n", gold) == 1.0
    assert grade_answer(f"${gold}$", gold) == 1.0


@given(expressions(), units)
@settings(deadline=None)
def test_generated_answers_equal_themselves_with_and_without_their_unit(expression, unit):
    gold = expression + unit
    assert grade_answer(gold, gold) == 1.0
    assert grade_answer(expression, gold) == 1.0
    assert grade_answer(gold, expression) == 1.0


@given(expressions(), units, st.data())
@settings(deadline=None)
def test_harmless_rewriting_changes_nothing(expression, unit, data):
    rewritten = expression
    for old, new in (
        ("√{", r"\sqrt{"), (r"\frac", r"\dfrac"), (r"\frac", r"\tfrac"), ("π", r"\pi"), ("+", " + "), ("-", "−"),
    ):  # fmt: skip
        if data.draw(st.booleans()):
            rewritten = rewritten.replace(old, new)
    around = data.draw(
        st.sampled_from(
            ["{}", "${}$", r"\({}\)", "x = {}", "{}.", "The answer is {}.", r"\left({}\right)", "≈ {}"]
        )
    )
    said = around.format(rewritten)
    other = data.draw(expressions())
    assert grade_answer(said, expression + unit) == 1.0
    assert grade_answer(said, other) == grade_answer(expression, other)


@given(expressions(), expressions())
@settings(deadline=None)
def test_equality_is_that_of_the_numbers(first, second):
    a, b = float(read_number(first)), float(read_number(second))
    if math.isclose(a, b, rel_tol=1e-9):
        assert grade_answer(first, second) == 1.0
    elif abs(a - b) > 0.1:  # further apart than any rounding
        assert grade_answer(first, second) == grade_answer(second, first) == 0.0


@given(st.floats(0.01, 1000), st.integers(2, 9))
@settings(deadline=None)
def test_a_decimal_is_right_at_the_digits_that_it_shows(value, decimals):
    gold = f"{value:.12f}"
    assert grade_answer(f"{value:.{decimals}f}", gold) == 1.0
    off = value + max(2 * 10.0**-decimals, 1e-5 * value)  # beyond its digits and beyond the noise of floats
    assert grade_answer(f"{off:.{decimals}f}", gold) == 0.0


SCRAPS = st.sampled_from(
    ["\\frac", "{", "}", "√", "π", "^", "°", "cm", "=", ",", "x", "1", "(", ")", "\\boxed{", "<answer>", "</answer>",
     "/", "+", "-", "\\sqrt", "[", "]", " or ", "%", "$", "≈", "</think>", ".", "²", "\u202e", "\x00", "米", "B."]
)  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(SCRAPS, max_size=12).map("".join)), st.sampled_from(GOLDS))
@settings(deadline=None, max_examples=150)
def test_no_text_makes_grading_raise(text, gold):
    assert grade(text, gold).status is not Status.UNPARSABLE_GOLD
    assert grade_answer(gold, text) in (0.0, 1.0, None)
    assert grade_mathruler(text, gold).value in (0.0, 1.0)
    for extract in (extract_answer, extract_boxed, extract_tagged):
        found = extract(text)
        assert found is None or found == found.strip()


@given(st.lists(SCRAPS, max_size=15).map("".join), expressions())
@settings(deadline=None)
def test_the_last_stated_answer_is_found_behind_anything(noise, answer):
    assert extract_answer(f"{noise}</think> so \\boxed{{{answer}}}") == answer
    assert extract_answer(f"{noise}</think><answer>{answer}</answer>") == answer
