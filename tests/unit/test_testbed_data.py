"""The procedural problems: right answers, wrong mistakes, splits that share nothing."""

import math
import random
import re
from collections import Counter

import pytest

pytestmark = pytest.mark.trl
pytest.importorskip("PIL")

from fastrl.data import testbed  # noqa: E402
from fastrl.data.diagrams import DRAW, Paper  # noqa: E402
from fastrl.rewards import extract_boxed, has_format  # noqa: E402
from pens import Recorder  # noqa: E402

NUM_DRAWINGS = 150
SPLITS = ("warmup", "train", "held_out")


def draw(family, seed):
    paper = Paper(random.Random(seed))
    paper.draw = Recorder(paper.draw)
    return paper.draw, DRAW[family](paper)


def answer_from_the_picture(family, pen):
    """Solve the problem from the labels' places and the lines alone, by another road than the generator."""
    numbers = [value for _, value in pen.numbers]
    x, y = pen.labels.get("x", [(None, None)])[0]
    if family == "tri_sum":
        return 180 - sum(numbers)
    if family == "exterior":
        return 180 - (180 - sum(numbers))
    if family == "isosceles":
        (_, given_y), value = pen.numbers[0]
        return 180 - 2 * value if y < given_y else (180 - value) / 2
    if family == "circle":
        (_, given_y), value = pen.numbers[0]
        return value * 2 if given_y < y else value / 2
    if family == "pythagoras":
        if x > 40 and y < 60:  # beside the hypotenuse
            return math.hypot(*numbers)
        leg, hypotenuse = sorted(numbers)
        return math.sqrt(hypotenuse**2 - leg**2)
    if family == "perimeter":
        return sum(numbers) * 2
    if family == "area":
        return math.prod(numbers)
    upper, lower, ((x0, y0), (x1, y1)) = pen.lines

    def corner_is_acute(label_x, label_y, line_y):
        crossing_x = x0 + (label_y - y0) * (x1 - x0) / (y1 - y0)
        assert abs(label_x - crossing_x) > 3, "the label sits on the line that crosses"
        assert abs(label_y - line_y) > 4, "the label sits on a parallel"
        return (label_y < line_y) == (label_x > crossing_x)

    ((given_x, given_y), value) = pen.numbers[0]
    same = corner_is_acute(given_x, given_y, upper[0][1]) == corner_is_acute(x, y, lower[0][1])
    return value if same else 180 - value


def check_arithmetic(steps):
    """Every step of a solution must hold as arithmetic; the value of the last one is returned."""
    for step in steps.split(" , "):
        if match := re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step):
            a, b, value = int(match[1]), int(match[3]), int(match[4])
            expected = {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[match[2]]
        elif match := re.fullmatch(r"root (\d+) = (\d+)", step):
            value, expected = int(match[2]), math.sqrt(int(match[1]))
        else:
            match = re.fullmatch(r"x = (\d+)", step)
            value = expected = int(match[1])
        assert value == expected, step
    return value


@pytest.mark.parametrize("family", testbed.FAMILIES)
def test_the_right_method_gives_what_the_picture_says(family):
    answers = set()
    for seed in range(NUM_DRAWINGS):
        pen, (_, right, _) = draw(family, seed)
        assert right.value == answer_from_the_picture(family, pen), (seed, pen.labels)
        assert check_arithmetic(right.steps) == right.value
        answers.add(right.value)
    assert len(answers) >= 8  # a constant answer would be no problem


def makes_the_mistake(row, steps):
    """Tell from the shape of a solution alone whether it is the family's mistake."""
    if row.family in ("tri_sum", "isosceles", "perimeter"):
        return " , " not in steps
    return {
        "exterior": steps.startswith("180"),
        "parallel": steps.startswith("x =") and is_obtuse(row),  # the given angle is acute
        "circle": steps.startswith("x ="),
        "pythagoras": "root" not in steps,
        "area": "+" in steps,
    }[row.family]


def is_obtuse(row):
    return int(row.answer) > 90


def test_every_mistake_is_wrong_and_every_other_solution_is_right():
    for row in testbed.problems("warmup", 2400):
        steps, said = re.fullmatch(r"<think> (.*) </think> \\boxed\{ (\d+) \}", row.solution).groups()
        assert check_arithmetic(steps) == int(said)
        assert (said != row.answer) == makes_the_mistake(row, steps), row


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_solutions_outside_the_warm_up_are_right(split):
    rows = testbed.problems(split, 800)
    assert [row.answer for row in rows] == [extract_boxed(row.solution) for row in rows]
    assert all(has_format(row.solution) for row in rows)


def test_mistakes_come_at_their_rates():
    rows = [row for row in testbed.problems("warmup", 2400) if row.family != "parallel" or is_obtuse(row)]
    num = Counter(row.family for row in rows)
    wrong = Counter(row.family for row in rows if extract_boxed(row.solution) != row.answer)
    for family, rate in testbed.MISTAKES.items():
        assert wrong[family] / num[family] == pytest.approx(rate, abs=0.12)  # 3.3 standard errors or more


def test_look_alike_families_differ_in_the_mistake():
    """Same numbers, other mistake: one mistake for both would give no reason to tell them apart."""
    operators = {}
    for family in ("tri_sum", "exterior"):
        _, (_, _, mistaken) = draw(family, 0)
        operators[family] = re.sub(r"\d+", "n", mistaken.steps)
    assert operators == {"tri_sum": "n + n = n", "exterior": "n - n = n"}


def test_no_two_splits_share_a_picture_whatever_the_seeds():
    pictures = {
        split: {row.image.tobytes() for seed in range(3) for row in testbed.problems(split, 400, seed)}
        for split in SPLITS
    }
    assert pictures["warmup"].isdisjoint(pictures["train"] | pictures["held_out"])
    assert pictures["train"].isdisjoint(pictures["held_out"])
    assert all(len(found) > 1000 for found in pictures.values())  # other seeds give other pictures


@pytest.mark.parametrize("split", SPLITS)
def test_no_picture_or_id_occurs_twice_in_a_split(split):
    rows = testbed.problems(split, 1200)
    assert len({row.image.tobytes() for row in rows}) == len({row.id for row in rows}) == 1200
    assert {testbed.split_of(row.image) for row in rows} == {split}


def test_problems_are_a_function_of_split_and_seed_and_grow_at_the_end():
    once, again = testbed.problems("train", 40, seed=3), testbed.problems("train", 60, seed=3)[:40]
    assert [(r.id, r.answer, r.solution, r.image.tobytes()) for r in once] == [
        (r.id, r.answer, r.solution, r.image.tobytes()) for r in again
    ]
    assert {r.id for r in once}.isdisjoint(r.id for r in testbed.problems("train", 40, seed=4))


def test_families_are_balanced():
    counts = Counter(row.family for row in testbed.problems("held_out", 8 * 12))
    assert counts == dict.fromkeys(testbed.FAMILIES, 12)


def test_an_exhausted_family_stops_with_an_explanation(monkeypatch):
    monkeypatch.setattr(testbed, "split_of", lambda image: "warmup")
    with pytest.raises(RuntimeError, match="1000 drawings of tri_sum in a row gave no new picture for train"):
        testbed.problems("train", 1)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"split='test' is unknown; choose one of warmup, train, held_out\."):
        testbed.problems("test", 1)


def test_dataset_has_the_columns_trainers_need():
    data = testbed.dataset("train", 16, seed=1)
    rows = testbed.problems("train", 16, seed=1)
    assert data.column_names == ["id", "prompt", "image", "answer", "family"]
    assert data["id"][:] == [row.id for row in rows]
    for stored, row in zip(data, rows, strict=True):
        assert stored["prompt"] == [{"role": "user", "content": row.question}]
        assert (stored["answer"], stored["family"]) == (row.answer, row.family)
        assert stored["image"].tobytes() == row.image.tobytes()  # PNG in between: no pixel changes
