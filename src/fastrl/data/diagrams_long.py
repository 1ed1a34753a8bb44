"""Seven families of composite figures that need two to four steps, solved in words.

As in `diagrams`, numbers stand only in the picture and nothing is drawn to scale. A solution says in words
what each step does, one token a word, in one of several wordings drawn at random and, where both are
natural, in one of two orders. So equally good solutions of a problem differ in their words.
"""

import random
from collections.abc import Callable, Sequence

from fastrl.data.diagrams import ANGLE, INK, PENCIL, TRIPLES, Exercise, Method, Paper

PERIMETER, AREA = "Find the perimeter .", "Find the area ."
# How often a warm-up solution makes the family's mistake.
MISTAKES = {
    "exterior_isosceles": 0.6,
    "isosceles_exterior": 0.65,
    "pythagoras_perimeter": 0.6,
    "pythagoras_area": 0.45,
    "parallel_triangle": 0.55,
    "inscribed_triangle": 0.65,
    "rectangle_hole": 0.55,
}
WORDS = """
    : a add again all alternate and angles answer apex arc are around as at away base both central
    circle comes cut difference directly each equal every exterior far figure finally from get give
    given goes half has have hence hole in inscribed inside is isosceles it its large last leaves left
    legs line lines make makes middle missing now of on one only other others out outside parallel
    product pythagoras rectangle remains rest right same sees share side sides small so square squares
    stand straight sum take that there third three to together too top triangle two up we what whole
    with without
"""
"""What solutions say besides numbers, signs and the words of the short problems."""

AREA_TRIPLES = [triple for triple in TRIPLES if triple[0] * triple[1] <= 200]
Point = tuple[float, float]


def _told(rng: random.Random, value: int, *parts: Sequence[str]) -> Method:
    """Write one wording of each part, one after the other, and a last sentence."""
    end = [f"so the answer is {value}", f"hence we get {value}", f"finally it is {value}"]
    return Method(" ".join(rng.choice(part) for part in (*parts, end)), value)


def _tick(paper: Paper, a: Point, b: Point, *, dx: float = 0, dy: float = 0) -> None:
    """Mark a side as equal to another: a short stroke through its middle."""
    x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    paper.draw.line((x - dx, y - dy, x + dx, y + dy), fill=INK, width=2)


def _exterior_isosceles(paper: Paper) -> Exercise:
    """A triangle and an isosceles one share a side. Mistake: does not share the rest between two angles."""
    rng = paper.rng
    a = rng.choice(range(20, 105, 5))
    b = rng.choice([b for b in range(20, 105, 5) if (a + b) % 10 == 0 and a + b <= 140])
    top, left = paper.near(44, 8), paper.near(6, 84, 2)
    foot, right = (paper.near(48, 84)[0], left[1]), (92, left[1])
    paper.path(top, left, right, top)
    paper.path(top, foot)
    _tick(paper, top, foot, dx=4)
    _tick(paper, foot, right, dy=4)
    paper.label(a, 31, 44, 1)
    paper.label(b, 24, 76, 1)
    paper.label("x", 76, 76, 1)
    outer, rest = a + b, 180 - a - b
    first = [
        f"the exterior angle of the left triangle is the sum of both far angles : {a} + {b} = {outer} .",
        f"in the left triangle two angles add up to that outside : {b} + {a} = {outer} .",
    ]
    shared = [
        f"equal sides make equal angles , each half of what remains : 180 - {outer} = {rest} , "
        f"{rest} / 2 = {rest // 2} .",
        f"the right triangle is isosceles , its base angles share the rest : 180 - {outer} = {rest} , "
        f"{rest} / 2 = {rest // 2} .",
    ]
    unshared = [
        f"the other angle of the right triangle is what remains to 180 : 180 - {outer} = {rest} .",
        f"take it away from a straight line to get the last angle : 180 - {outer} = {rest} .",
    ]
    return ANGLE, _told(rng, rest // 2, first, shared), _told(rng, rest, first, unshared)


def _isosceles_exterior(paper: Paper) -> Exercise:
    """The angle outside an isosceles triangle. Mistake: takes the apex and the base angle as equal."""
    rng = paper.rng
    a = rng.choice(range(20, 150, 10))
    top, left, right = paper.near(36, 8), paper.near(6, 84, 2), paper.near(64, 84)
    right = (right[0], left[1])
    paper.path(top, left, (94, left[1]))
    paper.path(top, right)
    _tick(paper, top, left, dx=4, dy=2)
    _tick(paper, top, right, dx=4, dy=-2)
    paper.draw.arc((right[0] - 8, left[1] - 8, right[0] + 8, left[1] + 8), 245, 360, fill=INK, width=2)
    paper.label(a, 36, 40, 1)
    paper.label("x", 84, 70, 1)
    rest, x = 180 - a, 180 - (180 - a) // 2
    base = [
        f"two equal sides , so the base angles share what the apex leaves : 180 - {a} = {rest} , "
        f"{rest} / 2 = {rest // 2} .",
        f"the triangle is isosceles : take away the apex , 180 - {a} = {rest} , and half of that is "
        f"at the base , {rest} / 2 = {rest // 2} .",
    ]
    outside = [
        f"the exterior angle makes a straight line with it : 180 - {rest // 2} = {x} .",
        f"outside remains what is missing to 180 : 180 - {rest // 2} = {x} .",
    ]
    equal = [
        f"two equal sides , so the angle at the base is equal to the apex , that is {a} .",
        f"the triangle is isosceles and its angles are all equal to the given one , so we have {a} .",
    ]
    wrong_outside = [
        f"the exterior angle makes a straight line with it : 180 - {a} = {rest} .",
        f"outside remains what is missing to 180 : 180 - {a} = {rest} .",
    ]
    return ANGLE, _told(rng, x, base, outside), _told(rng, rest, equal, wrong_outside)


def _right_triangle(paper: Paper) -> None:
    top, right = paper.near(20, 12), paper.near(86, 78)
    corner = (top[0], right[1])
    paper.path(top, corner, right, top)
    paper.draw.rectangle((corner[0], corner[1] - 6, corner[0] + 6, corner[1]), outline=PENCIL)


def _third_side(a: int, b: int, *, is_leg: bool) -> tuple[int, list[str], int, list[str]]:
    """The third side from two sides, in squares; and the mistake: it adds or subtracts the sides themselves."""
    sign, square, plain = ("-", b * b - a * a, b - a) if is_leg else ("+", a * a + b * b, a + b)
    first, second = (b, a) if is_leg else (a, b)
    side = round(square**0.5)
    squares = f"{first * first} {sign} {second * second} = {square} , root {square} = {side}"
    sides = f"{first} {sign} {second} = {plain}"
    right = [
        f"with pythagoras the squares of the sides give the third : {squares} .",
        f"there is a right angle , so square both to get the missing side : {squares} .",
    ]
    wrong = [
        f"from the two sides that are given we get the third one directly : {sides} .",
        f"there is a right angle , so both together give the missing side : {sides} .",
    ]
    return side, right, plain, wrong


def _around(a: int, b: int, c: int) -> list[str]:
    """The perimeter of a triangle, added up in one of two orders."""
    return [
        f"the perimeter goes around all three sides : {a} + {b} = {a + b} , {a + b} + {c} = {a + b + c} .",
        f"add up every side of the figure : {c} + {b} = {c + b} , {c + b} + {a} = {a + b + c} .",
    ]


def _pythagoras_perimeter(paper: Paper) -> Exercise:
    """The way round a right triangle. Mistake: adds or subtracts sides without squaring."""
    rng = paper.rng
    a, b, c = rng.choice(TRIPLES)
    if rng.random() < 0.5:
        a, b = b, a
    _right_triangle(paper)
    paper.label(a, 9, 46)
    is_leg = rng.random() < 0.5
    if is_leg:
        paper.label(c, 64, 38)
    else:
        paper.label(b, 50, 88)
    given = c if is_leg else b
    side, right, plain, wrong = _third_side(a, given, is_leg=is_leg)
    total, mistaken = a + given + side, a + given + plain
    return (
        PERIMETER,
        _told(rng, total, right, _around(a, given, side)),
        _told(rng, mistaken, wrong, _around(a, given, plain)),
    )


def _pythagoras_area(paper: Paper) -> Exercise:
    """The content of a right triangle from leg and hypotenuse. Mistake: forgets to halve."""
    rng = paper.rng
    a, b, c = rng.choice(AREA_TRIPLES)
    if rng.random() < 0.5:
        a, b = b, a
    _right_triangle(paper)
    paper.label(a, 9, 46)
    paper.label(c, 64, 38)
    _, side, _, _ = _third_side(a, c, is_leg=True)
    halved = [
        f"the area is half of the product of the legs : {a} * {b} = {a * b} , {a * b} / 2 = {a * b // 2} .",
        f"it is one half of a rectangle : {b} * {a} = {a * b} , {a * b} / 2 = {a * b // 2} .",
    ]
    whole = [
        f"the area is the product of the two sides : {a} * {b} = {a * b} .",
        f"it is as large as a rectangle : {b} * {a} = {a * b} .",
    ]
    return AREA, _told(rng, a * b // 2, side, halved), _told(rng, a * b, side, whole)


def _parallel_triangle(paper: Paper) -> Exercise:
    """A triangle between parallels, one angle outside it. Mistake: stops at the sum of two angles."""
    rng = paper.rng
    a = rng.choice(range(25, 90, 5))
    b = rng.choice(range(20, min(115, 165 - a), 5))
    (apex, upper), lower = paper.near(52, 14, 2), paper.near(0, 82, 2)[1]
    for y in (upper, lower):
        paper.path((2, y), (94, y))
    paper.path((16, lower), (apex, upper), (88, lower))
    texts: list[object] = [b, "x"]
    rng.shuffle(texts)
    paper.label(a, 22, 28, 1)
    paper.label(texts[0], 54, 44, 1)
    paper.label(texts[1], 70, 74, 1)
    total, x = a + b, 180 - a - b
    moved = [
        f"alternate angles at parallel lines are equal , so {a} is inside the triangle too .",
        f"the lines are parallel and the angle {a} comes again at the base on the left .",
    ]
    right = [
        f"all three angles give 180 : {a} + {b} = {total} , 180 - {total} = {x} .",
        f"take both away from 180 : 180 - {a} = {180 - a} , {180 - a} - {b} = {x} .",
    ]
    wrong = [
        f"the third angle is the sum of the two others : {a} + {b} = {total} .",
        f"now both angles together make the one that is missing : {b} + {a} = {total} .",
    ]
    return ANGLE, _told(rng, x, moved, right), _told(rng, total, moved, wrong)


def _inscribed_triangle(paper: Paper) -> Exercise:
    """An inscribed triangle with a central angle. Mistake: takes the inscribed angle as equal to the central."""
    rng = paper.rng
    central = rng.choice(range(40, 130, 10))
    b = rng.choice(range(20, 165 - central, 5))
    (x, y), radius = paper.near(48, 46, 2), 44
    paper.draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=PENCIL)
    left, right, top = (x - 32, y + 30), (x + 32, y + 30), (x + rng.randint(-9, 9), y - radius)
    paper.path(left, top, right, left)
    paper.path(left, (x, y), right)
    paper.draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=INK)
    paper.label(central, x, 62, 1)
    texts: list[object] = [b, "x"]
    rng.shuffle(texts)
    paper.label(texts[0], 20, 76, 1)
    paper.label(texts[1], 76, 76, 1)

    def rest(top: int) -> tuple[int, list[str]]:
        third = 180 - top - b
        return third, [
            f"the triangle has 180 in all : {top} + {b} = {top + b} , 180 - {top + b} = {third} .",
            f"take both away from 180 : 180 - {b} = {180 - b} , {180 - b} - {top} = {third} .",
        ]

    halved = [
        f"the inscribed angle is half of the central angle : {central} / 2 = {central // 2} .",
        f"at the top of the circle there is only half the angle : {central} / 2 = {central // 2} .",
    ]
    equal = [
        f"the angle at the top sees the same arc , so it is equal : {central} .",
        f"both angles stand on one arc of the circle and are equal , that is {central} .",
    ]
    (x_right, right_rest), (x_wrong, wrong_rest) = rest(central // 2), rest(central)
    return ANGLE, _told(rng, x_right, halved, right_rest), _told(rng, x_wrong, equal, wrong_rest)


def _rectangle_hole(paper: Paper) -> Exercise:
    """A rectangle with a square hole. Mistake: doubles the side of the hole instead of squaring it."""
    rng = paper.rng
    w, h = rng.randint(4, 12), rng.randint(4, 12)
    s = rng.randint(3, min(w, h) - 1)
    paper.draw.rectangle((*paper.near(8, 26, 2), *paper.near(74, 88, 2)), outline=PENCIL)
    x, y = paper.near(30, 44, 1)
    paper.draw.rectangle((x - 4, y - 4, x + 28, y + 24), outline=INK, width=2)
    paper.label(w, 42, 12)
    paper.label(h, 86, 54)
    paper.label(s, x + 12, y + 10, 0)

    def left_over(hole: int, sign: str, factor: int, kind: str) -> Method:
        outer = [
            f"the whole rectangle is {w} * {h} = {w * h} .",
            f"without the hole it has {h} * {w} = {w * h} .",
        ]
        inner = [
            f"the hole in the middle is {kind} , that makes {s} {sign} {factor} = {hole} .",
            f"{kind} is cut out of the middle , {s} {sign} {factor} = {hole} .",
        ]
        rng.shuffle(parts := [outer, inner])
        minus = [
            f"take the small one away from the large one : {w * h} - {hole} = {w * h - hole} .",
            f"what remains is the difference of the two : {w * h} - {hole} = {w * h - hole} .",
        ]
        return _told(rng, w * h - hole, *parts, minus)

    return AREA, left_over(s * s, "*", s, "a square"), left_over(2 * s, "*", 2, "a square")


DRAW: dict[str, Callable[[Paper], Exercise]] = {
    "exterior_isosceles": _exterior_isosceles,
    "isosceles_exterior": _isosceles_exterior,
    "pythagoras_perimeter": _pythagoras_perimeter,
    "pythagoras_area": _pythagoras_area,
    "parallel_triangle": _parallel_triangle,
    "inscribed_triangle": _inscribed_triangle,
    "rectangle_hole": _rectangle_hole,
}
