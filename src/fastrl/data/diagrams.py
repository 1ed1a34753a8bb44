"""Eight families of schematic geometry diagrams, each with its right method and a typical mistake.

Numbers and labels stand only in the picture; nothing is drawn to scale, so digits have to be read and
the family has to be recognised. The two families that look alike (triangle sum and exterior angle)
differ in the drawing and in the mistake.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SIZE = 96  # side of a picture, pixels
LATTICE = 8  # labels sit on a lattice of half a vision patch: finer is harder to read
FONT = ImageFont.load_default(size=14)
INK, PENCIL, PAPER = 0, 90, 255

ANGLES = range(20, 125, 5)
TRIPLES = [
    (3, 4, 5),
    (6, 8, 10),
    (5, 12, 13),
    (9, 12, 15),
    (8, 15, 17),
    (12, 16, 20),
    (7, 24, 25),
    (15, 20, 25),
]


@dataclass(frozen=True)
class Method:
    """A chain of steps and the value it ends in."""

    steps: str
    value: int

    def written_out(self) -> str:
        return f"<think> {self.steps} </think> \\boxed{{ {self.value} }}"


Exercise = tuple[str, Method, Method | None]  # question, right method, mistaken method if there is one
ANGLE, LENGTH = "Find the angle x .", "Find the length x ."


class Paper:
    """A white square, a pencil for the figure, ink for the labels."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.image = Image.new("L", (SIZE, SIZE), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def near(self, x: float, y: float, spread: int = 3) -> tuple[float, float]:
        return x + self.rng.randint(-spread, spread), y + self.rng.randint(-spread, spread)

    def path(self, *points: tuple[float, float]) -> None:
        self.draw.line(points, fill=PENCIL)

    def label(self, text: object, x: float, y: float, spread: int = 2) -> None:
        """Write `text` centred near (x, y), its top left corner on the lattice, on a patch of white."""
        x, y = self.near(x, y, spread)
        width = self.draw.textlength(str(text), font=FONT)
        left = min(max(round((x - width / 2) / LATTICE) * LATTICE, 0), SIZE - int(width) - 1)
        top = min(max(round((y - 6) / LATTICE) * LATTICE, 0), SIZE - 12)
        self.draw.rectangle((left - 1, top - 1, left + width, top + 11), fill=PAPER)
        self.draw.text((left, top - 3), str(text), fill=INK, font=FONT)


def _triangle(paper: Paper) -> tuple[tuple[float, float], ...]:
    corners = paper.near(48, 10, 4), paper.near(8, 84), paper.near(88, 84)
    paper.path(*corners, corners[0])
    return corners


def _two_angles(rng: random.Random) -> tuple[int, int]:
    """Two angles that leave at least 20 degrees of a triangle to the third."""
    a = rng.choice(ANGLES)
    return a, rng.choice(range(20, min(125, 165 - a), 5))


def _tri_sum(paper: Paper) -> Exercise:
    """Two angles of a triangle are given. Mistake: stops at their sum."""
    a, b = _two_angles(paper.rng)
    _triangle(paper)
    texts: list[object] = [a, b]
    texts.insert(paper.rng.randrange(3), "x")  # top, left, right: the order in which a solution reads them
    for text, (x, y) in zip(texts, [(48, 34), (26, 76), (70, 76)], strict=True):
        paper.label(text, x, y)
    total = f"{a} + {b} = {a + b}"
    return ANGLE, Method(f"{total} , 180 - {a + b} = {180 - a - b}", 180 - a - b), Method(total, a + b)


def _exterior(paper: Paper) -> Exercise:
    """The angle outside a triangle whose base runs on. Mistake: the supplement of one remote angle."""
    a, b = _two_angles(paper.rng)
    top, left, right = paper.near(30, 10, 4), paper.near(6, 84, 2), paper.near(54, 84)
    paper.path(top, left, (94, left[1]))
    paper.path(top, (right[0], left[1]))
    paper.draw.arc((right[0] - 10, left[1] - 10, right[0] + 10, left[1] + 10), 252, 360, fill=INK, width=2)
    paper.label(a, 32, 36)
    paper.label(b, 22, 76)
    paper.label("x", 76, 72)
    return ANGLE, Method(f"{a} + {b} = {a + b}", a + b), Method(f"180 - {a} = {180 - a}", 180 - a)


def _isosceles(paper: Paper) -> Exercise:
    """Ticks mark two equal sides; one angle is given. Mistake: stops after the first step."""
    top, *base = _triangle(paper)
    for foot, slope in zip(base, (2, -2), strict=True):
        x, y = (top[0] + foot[0]) / 2, (top[1] + foot[1]) / 2
        paper.draw.line((x - 4, y - slope, x + 4, y + slope), fill=INK, width=2)
    apex, foot = (48, 34), paper.rng.choice([(26, 76), (70, 76)])
    if paper.rng.random() < 0.5:
        a = paper.rng.choice(range(20, 150, 10))
        paper.label(a, *apex)
        paper.label("x", *foot)
        first, second, right = f"180 - {a} = {180 - a}", f"{180 - a} / 2 = {(180 - a) // 2}", (180 - a) // 2
        return ANGLE, Method(f"{first} , {second}", right), Method(first, 180 - a)
    a = paper.rng.choice(range(20, 85, 5))
    paper.label("x", *apex)
    paper.label(a, *foot)
    first, second = f"2 * {a} = {2 * a}", f"180 - {2 * a} = {180 - 2 * a}"
    return ANGLE, Method(f"{first} , {second}", 180 - 2 * a), Method(first, 2 * a)


def _parallel(paper: Paper) -> Exercise:
    """Two parallels and a line that crosses them. Mistake: takes supplementary angles as equal.

    The given angle is an acute corner of the upper crossing. In half of the pictures x is an acute corner of
    the lower one, so the angles are equal and there is nothing to mistake.
    """
    rng, upper, lower = paper.rng, paper.near(60, 28), paper.near(36, 69)
    for _, y in (upper, lower):
        paper.path((4, y), (92, y))
    run = (upper[0] - lower[0]) / (lower[1] - upper[1])
    paper.path((upper[0] + run * (upper[1] - 4), 4), (lower[0] - run * (92 - lower[1]), 92))
    a = rng.choice(range(25, 90, 5))
    side = rng.choice([-1, 1])
    paper.label(a, upper[0] + side * 20, upper[1] - side * 12, 1)
    is_equal = rng.random() < 0.5
    right_hand, above = (1, 1) if is_equal else rng.choice([(-1, 1), (1, -1)])
    paper.label("x", lower[0] + right_hand * 16 + above * 5, lower[1] - above * 12, 1)
    equal, supplement = Method(f"x = {a}", a), Method(f"180 - {a} = {180 - a}", 180 - a)
    return (ANGLE, equal, None) if is_equal else (ANGLE, supplement, equal)


def _circle(paper: Paper) -> Exercise:
    """Central and inscribed angle over one arc. Mistake: takes them as equal."""
    rng, (x, y), radius = paper.rng, paper.near(48, 50, 2), 40
    paper.draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=PENCIL)
    left, right, top = paper.near(x - 28, y + 28, 1), paper.near(x + 28, y + 28, 1), x + rng.randint(-9, 9)
    paper.path(left, (top, y - radius), right)
    paper.path(left, (x, y), right)
    paper.draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=INK)
    inscribed: object
    central: object
    if rng.random() < 0.5:
        a = rng.choice(range(20, 85, 5))
        inscribed, central, method = a, "x", Method(f"2 * {a} = {2 * a}", 2 * a)
    else:
        a = rng.choice(range(40, 170, 10))
        inscribed, central, method = "x", a, Method(f"{a} / 2 = {a // 2}", a // 2)
    paper.label(inscribed, top, 24, 1)
    paper.label(central, x, 64, 1)
    return ANGLE, method, Method(f"x = {a}", a)


def _pythagoras(paper: Paper) -> Exercise:
    """A side of a right triangle is wanted. Mistake: adds or subtracts without squaring."""
    a, b, c = paper.rng.choice(TRIPLES)
    if paper.rng.random() < 0.5:
        a, b = b, a
    top, right = paper.near(20, 12), paper.near(86, 78)
    corner = (top[0], right[1])
    paper.path(top, corner, right, top)
    paper.draw.rectangle((corner[0], corner[1] - 6, corner[0] + 6, corner[1]), outline=PENCIL)
    paper.label(a, 9, 46)
    if paper.rng.random() < 0.5:
        paper.label(b, 50, 88)
        paper.label("x", 64, 38)
        steps = f"{a * a} + {b * b} = {c * c} , root {c * c} = {c}"
        return LENGTH, Method(steps, c), Method(f"{a} + {b} = {a + b}", a + b)
    paper.label("x", 50, 88)
    paper.label(c, 64, 38)
    steps = f"{c * c} - {a * a} = {b * b} , root {b * b} = {b}"
    return LENGTH, Method(steps, b), Method(f"{c} - {a} = {c - a}", c - a)


def _rectangle(paper: Paper) -> tuple[int, int]:
    width, height = paper.rng.randint(3, 15), paper.rng.randint(3, 15)
    paper.draw.rectangle((*paper.near(10, 26, 2), *paper.near(72, 84, 2)), outline=PENCIL)
    paper.label(width, 42, 14)
    paper.label(height, 84, 54)
    return width, height


def _perimeter(paper: Paper) -> Exercise:
    """The way round a rectangle. Mistake: half of it."""
    w, h = _rectangle(paper)
    half = f"{w} + {h} = {w + h}"
    right = Method(f"{half} , 2 * {w + h} = {2 * (w + h)}", 2 * (w + h))
    return "Find the perimeter .", right, Method(half, w + h)


def _area(paper: Paper) -> Exercise:
    """The content of a rectangle. Mistake: takes the way round it."""
    w, h = _rectangle(paper)
    around = Method(f"{w} + {h} = {w + h} , 2 * {w + h} = {2 * (w + h)}", 2 * (w + h))
    return "Find the area .", Method(f"{w} * {h} = {w * h}", w * h), around


DRAW: dict[str, Callable[[Paper], Exercise]] = {
    "tri_sum": _tri_sum,
    "exterior": _exterior,
    "isosceles": _isosceles,
    "parallel": _parallel,
    "circle": _circle,
    "pythagoras": _pythagoras,
    "perimeter": _perimeter,
    "area": _area,
}
