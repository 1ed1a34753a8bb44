"""Procedural geometry problems: a picture, a generic question, a solution and an exact answer.

The warm-up split writes down each family's typical mistake instead of the right method at a rate of its
own (`MISTAKES`). That plants the mixed difficulty that reinforcement learning then removes.

A picture belongs to the split that the hash of its own pixels names, so no two splits can share one,
whatever the seeds.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from PIL import Image

from fastrl.data import diagrams_long
from fastrl.data.diagrams import DRAW, SIZE, Exercise, Paper

if TYPE_CHECKING:
    from datasets import Dataset

Split = Literal["warmup", "train", "held_out"]

MAX_DRAWS = 1000  # drawings that may be refused in a row before a family counts as exhausted
# How often a warm-up solution makes the family's typical mistake, where there is one to make.
MISTAKES = {
    "tri_sum": 0.35,
    "exterior": 0.75,
    "isosceles": 0.6,
    "parallel": 0.65,
    "circle": 0.85,
    "pythagoras": 0.6,
    "perimeter": 0.75,
    "area": 0.3,
}
FAMILIES: tuple[str, ...] = tuple(MISTAKES)


@dataclass(frozen=True, kw_only=True)
class ProblemSet:
    """Families of problems that train together.

    Args:
        draw: Draws an exercise of a family.
        mistakes: Rates of the planted mistakes, in the order of the families.
        max_tokens: Most tokens of a completion, with room to spare.
        salt: Keeps the random numbers of the sets apart.
    """

    draw: Mapping[str, Callable[[Paper], Exercise]]
    mistakes: Mapping[str, float]
    max_tokens: int
    salt: str = ""


PROBLEM_SETS: Mapping[str, ProblemSet] = {
    "short": ProblemSet(draw=DRAW, mistakes=MISTAKES, max_tokens=24),
    "long": ProblemSet(draw=diagrams_long.DRAW, mistakes=diagrams_long.MISTAKES, max_tokens=72, salt="long/"),
}


@dataclass(frozen=True)
class Problem:
    """One problem. `solution` is what the warm-up imitates; outside that split it is always right."""

    id: str
    family: str
    question: str
    image: Image.Image
    answer: str
    solution: str


def split_of(image: Image.Image) -> Split:
    """The split a picture belongs to, from its pixels alone: 1/2 warm-up, 1/4 train, 1/4 held-out."""
    byte = blake2b(image.tobytes(), digest_size=1).digest()[0]
    return "warmup" if byte < 128 else "train" if byte < 192 else "held_out"


def problem_set_of(name: str) -> ProblemSet:
    """The set of this name: short (one or two steps) or long (two to four steps, solved in words)."""
    if name not in PROBLEM_SETS:
        raise ValueError(f"problem_set={name!r} is unknown; choose one of {', '.join(PROBLEM_SETS)}.")
    return PROBLEM_SETS[name]


def stream(split: Split, seed: int = 0, *, problem_set: str = "short") -> Iterator[Problem]:
    """Yield problems of one split without end, families in turn, no picture twice.

    Deterministic: a function of (split, seed, problem_set). An exercise whose mistake happens to give the right
    answer is drawn again.
    """
    if split not in get_args(Split):
        raise ValueError(f"split={split!r} is unknown; choose one of {', '.join(get_args(Split))}.")
    chosen = problem_set_of(problem_set)
    rng = random.Random(f"{chosen.salt}{split}/{seed}")
    seen: set[str] = set()
    while True:
        for family, rate in chosen.mistakes.items():
            for _ in range(MAX_DRAWS):
                paper = Paper(rng)
                question, right, mistaken = chosen.draw[family](paper)
                wrong = mistaken if split == "warmup" and rng.random() < rate else None
                is_coincidence = mistaken is not None and mistaken.value == right.value
                picture = blake2b(paper.image.tobytes(), digest_size=8).hexdigest()
                if not is_coincidence and split_of(paper.image) == split and picture not in seen:
                    break
            else:
                raise RuntimeError(
                    f"{MAX_DRAWS} drawings of {family} in a row gave no new picture for {split}."
                )
            seen.add(picture)
            yield Problem(
                id=f"{family}-{picture}",
                family=family,
                question=question,
                image=paper.image,
                answer=str(right.value),
                solution=(wrong or right).written_out(),
            )


def problems(split: Split, num: int, seed: int = 0, *, problem_set: str = "short") -> list[Problem]:
    """The first `num` problems of a split. A longer list with the same seed begins with the shorter one."""
    return list(islice(stream(split, seed, problem_set=problem_set), num))


def dataset(split: Split, num: int, seed: int = 0, *, problem_set: str = "short") -> "Dataset":
    """The same problems as rows for a trainer: id, prompt (conversational), image, answer, family."""
    from datasets import Dataset, Features, Image, List, Value

    rows = problems(split, num, seed, problem_set=problem_set)
    message = {"role": Value("string"), "content": Value("string")}
    return Dataset.from_dict(
        {
            "id": [row.id for row in rows],
            "prompt": [[{"role": "user", "content": row.question}] for row in rows],
            "image": [row.image for row in rows],
            "answer": [row.answer for row in rows],
            "family": [row.family for row in rows],
        },
        features=Features(
            id=Value("string"),
            prompt=List(message),
            image=Image(),
            answer=Value("string"),
            family=Value("string"),
        ),
    )


def contact_sheet(problem_set: str = "short", *, num_rows: int = 3, scale: int = 2) -> Image.Image:
    """Held-out pictures on one sheet, a column for each family."""
    cell, num_families = SIZE * scale + 4, len(problem_set_of(problem_set).mistakes)
    sheet = Image.new("L", (cell * num_families, cell * num_rows), 200)
    for index, row in enumerate(problems("held_out", num_rows * num_families, problem_set=problem_set)):
        place = (index % num_families * cell + 2, index // num_families * cell + 2)
        sheet.paste(row.image.resize((SIZE * scale, SIZE * scale)), place)
    return sheet


if __name__ == "__main__":
    contact_sheet(*sys.argv[2:]).save(sys.argv[1])
