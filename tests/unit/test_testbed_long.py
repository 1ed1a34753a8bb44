"""The long problem set: right answers, wrong mistakes, solutions in many words that outweigh the prompt."""

import math
import random
import re
from collections import Counter, defaultdict

import pytest

pytestmark = pytest.mark.trl
pytest.importorskip("PIL")

from fastrl.bench.tasks import PROBLEMS  # noqa: E402
from fastrl.data import testbed  # noqa: E402
from fastrl.data.diagrams import Paper  # noqa: E402
from fastrl.data.diagrams_long import DRAW, MISTAKES  # noqa: E402
from fastrl.rewards import extract_boxed, has_format  # noqa: E402
from pens import Recorder  # noqa: E402

NUM_DRAWINGS = 150
PROMPT_LENGTH = 43  # tokens, of the longest; the model's test counts them
SPLITS = ("warmup", "train", "held_out")
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)|root (\d+) = (\d+)")


def problems(split, num, seed=0):
    return testbed.problems(split, num, seed, problem_set="long")


def draw(family, seed):
    paper = Paper(random.Random(seed))
    paper.draw = Recorder(paper.draw)
    return paper.draw, DRAW[family](paper)


def answer_from_the_picture(family, pen):
    """Solve the problem from the labels' places alone, by another road than the generator."""
    numbers = [value for _, value in pen.numbers]
    if family == "exterior_isosceles":
        return (180 - sum(numbers)) / 2  # half of the third angle: it is outside the isosceles triangle
    if family == "isosceles_exterior":
        return 90 + numbers[0] / 2
    if family.startswith("pythagoras"):
        (_, leg), ((_, y), other) = sorted(pen.numbers, key=lambda item: item[0][0])
        last = math.hypot(leg, other) if y > 80 else math.sqrt(other**2 - leg**2)
        return leg + other + last if family == "pythagoras_perimeter" else leg * last / 2
    if family == "parallel_triangle":
        return 180 - sum(numbers)
    if family == "inscribed_triangle":
        by_distance = sorted(
            pen.numbers, key=lambda item: abs(item[0][0] - 48)
        )  # the central one is in the middle
        return 180 - by_distance[0][1] / 2 - by_distance[1][1]
    top, right = pen.numbers[0], max(pen.numbers)
    (hole,) = (item for item in pen.numbers if item not in (top, right))
    return top[1] * right[1] - hole[1] ** 2


def check_steps(method, given):
    """Every step must hold, and work on what is in the picture or was found before; return the number of steps."""
    known = {*given, *(number**2 for number in given), 2, 180}
    equations = EQUATION.findall(method.steps)
    for a, sign, b, value, square, root in equations:
        if root:
            assert int(square) in known
            assert math.isqrt(int(square)) ** 2 == int(square) == int(root) ** 2
            known.add(int(root))
            continue
        assert {int(a), int(b)} <= known, (method.steps, known)
        expected = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}[sign]
        assert int(value) == expected(int(a), int(b)), method.steps
        known.add(int(value))
    assert method.steps.endswith(f" {method.value}")
    assert method.value in known
    assert method.value > 0
    return len(equations)


@pytest.mark.parametrize("family", DRAW)
def test_the_right_method_gives_what_the_picture_says(family):
    answers = set()
    for seed in range(NUM_DRAWINGS):
        pen, (_, right, mistaken) = draw(family, seed)
        given = [value for _, value in pen.numbers]
        assert sum(map(len, pen.labels.values())) <= 3  # few enough to be read by so small a model
        assert right.value == answer_from_the_picture(family, pen), (seed, pen.labels)
        assert 2 <= check_steps(right, given) <= 4
        assert check_steps(mistaken, given) >= 1
        answers.add(right.value)
    assert len(answers) >= 7  # a constant answer would be no problem


@pytest.mark.parametrize("family", DRAW)
def test_equally_good_solutions_differ_in_their_words(family):
    shapes = Counter(re.sub(r"\d+", "n", draw(family, seed)[1][1].steps) for seed in range(300))
    assert len(shapes) >= 12  # wordings of two or three sentences and of the last one
    assert max(shapes.values()) < 60


@pytest.mark.parametrize("split", SPLITS)
def test_completions_have_30_to_60_tokens_and_outweigh_the_prompt(split):
    """One token a word, and one for the end."""
    lengths = defaultdict(list)
    for row in problems(split, 1400):
        lengths[row.family].append(len(row.solution.split()) + 1)
        assert 30 <= lengths[row.family][-1] <= 60, row.solution
    means = [sum(values) / len(values) for values in lengths.values()]
    assert min(means) > PROMPT_LENGTH
    assert 45 < sum(means) / len(means) < 55


def test_mistakes_are_wrong_and_come_at_their_rates():
    rows = problems("warmup", 2800)
    wrong = Counter(row.family for row in rows if extract_boxed(row.solution) != row.answer)
    num = Counter(row.family for row in rows)
    assert list(num) == list(MISTAKES) == list(DRAW)
    for family, rate in MISTAKES.items():
        assert wrong[family] / num[family] == pytest.approx(rate, abs=0.09)  # 3.5 standard errors


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_solutions_outside_the_warm_up_are_right(split):
    rows = problems(split, 700)
    assert [row.answer for row in rows] == [extract_boxed(row.solution) for row in rows]
    assert all(has_format(row.solution) for row in rows)


def test_no_two_splits_share_a_picture_whatever_the_seeds():
    pictures = {
        split: {row.image.tobytes() for seed in range(3) for row in problems(split, 350, seed)}
        for split in SPLITS
    }
    assert pictures["warmup"].isdisjoint(pictures["train"] | pictures["held_out"])
    assert pictures["train"].isdisjoint(pictures["held_out"])
    assert all(len(found) > 900 for found in pictures.values())  # other seeds give other pictures


@pytest.mark.parametrize("split", SPLITS)
def test_no_picture_or_id_occurs_twice_in_a_split(split):
    rows = problems(split, 1050)
    assert len({row.image.tobytes() for row in rows}) == len({row.id for row in rows}) == 1050
    assert {testbed.split_of(row.image) for row in rows} == {split}


def test_problems_are_a_function_of_split_and_seed_and_grow_at_the_end():
    once, again = problems("train", 40, seed=3), problems("train", 60, seed=3)[:40]
    assert [(r.id, r.answer, r.solution) for r in once] == [(r.id, r.answer, r.solution) for r in again]
    assert [r.id for r in once] != [r.id for r in problems("train", 40, seed=4)]


def test_dataset_has_the_rows_of_the_set():
    data = testbed.dataset("train", 14, seed=1, problem_set="long")
    assert data["id"][:] == [row.id for row in problems("train", 14, seed=1)]
    assert set(data["family"][:]) == set(DRAW)


def test_short_is_the_default_and_an_unknown_set_is_refused():
    assert tuple(testbed.PROBLEM_SETS) == PROBLEMS  # what a recipe can name
    assert {row.family for row in testbed.problems("train", 8)} == set(testbed.FAMILIES)
    with pytest.raises(ValueError, match=r"problem_set='longer' is unknown; choose one of short, long\."):
        testbed.problems("train", 1, problem_set="longer")
