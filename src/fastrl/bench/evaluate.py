"""`fastrl eval`: a trained model beside its base model, on sets whose answers our own grading reads."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastrl.bench.answers import Answers, Sampler, Sampling
from fastrl.bench.items import estimate, pass_at_k
from fastrl.data.rows import Row
from fastrl.rewards.grading import grade
from fastrl.rewards.rules import Rule
from fastrl.rewards.status import Status

BASE = "base"
"""What the model before training is called."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One row of a benchmark with a model's answers and what grading found.

    Args:
        id, answer: Of the row.
        greedy: The greedy text, samples: the sampled ones.
        found, sampled: Status of each.
        in_format: Greedy text in the format of the reward? None = the reward asks for none.
    """

    id: str
    answer: str
    greedy: str
    samples: tuple[str, ...]
    found: str
    sampled: tuple[str, ...]
    in_format: float | None

    @property
    def right(self) -> float:
        """1 if the greedy answer is right."""
        return float(self.found == Status.RIGHT.value)

    def pass_at(self, k: int) -> float:
        """Unbiased estimate of the chance that one of k sampled answers is right."""
        return pass_at_k(len(self.sampled), self.sampled.count(Status.RIGHT.value), k)


def judge(row: Row, answers: Answers, rule: Rule) -> Item:
    """Grade a model's answers to one row; what counts as its answer is the rule's affair."""

    def status(text: str) -> str:
        return grade(rule.extract(text), row.answer, row.choices).status.value

    return Item(
        id=row.id,
        answer=row.answer,
        greedy=answers.greedy,
        samples=answers.samples,
        found=status(answers.greedy),
        sampled=tuple(status(text) for text in answers.samples),
        in_format=None if rule.has_format is None else rule.format(answers.greedy),
    )


def answer_all(
    rows: Sequence[Row],
    make_sampler: Callable[[], Sampler],
    sampling: Sampling,
    rule: Rule,
    file: Path,
) -> list[Item]:
    """Return a model's graded answers; from `file` where it holds them all, so that nothing is answered twice.

    Args:
        rows: Of the benchmark.
        make_sampler: Loads the model; not called if the file is complete.
        sampling, rule: How answers are drawn and read.
        file: JSON lines: the settings, then an item per row. Written anew unless settings and rows agree. Answers that
            are read from it are graded again: a verdict is never older than the grader.
    """
    settings = _settings(rows, sampling)
    stored = _stored(file, settings)
    if stored is not None:
        return [judge(row, answers, rule) for row, answers in zip(rows, stored, strict=True)]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    items = []
    with partial.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps({"settings": settings}) + "\n")
        for row, answers in zip(rows, make_sampler().answer(rows, sampling), strict=True):
            items.append(judge(row, answers, rule))
            lines.write(json.dumps(asdict(items[-1])) + "\n")
    partial.replace(file)
    return items


def summarize(items: Mapping[str, Sequence[Item]], ks: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Accuracies of each model on one benchmark, and what it gains over the base model.

    Args:
        items: Model -> its items, the same rows in the same order; `base` is compared with.
        ks: For pass@k; each at most the number of samples.
        seed: Of the bootstrap over items.

    Returns:
        JSON values: `num`; `models`: name -> greedy, sampled (the mean over samples) and pass_at_k, each {mean, low,
        high}, shares of kinds of answers, and `in_format`; `gain`: the same accuracies as paired differences.
    """
    measures = {name: _measures(rows, ks) for name, rows in items.items()}
    found: dict[str, Any] = {"num": len(next(iter(items.values()))), "models": {}, "gain": {}}
    for name, values in measures.items():
        rows = items[name]
        formats = [item.in_format for item in rows if item.in_format is not None]
        found["models"][name] = {
            **_estimates(values, seed),
            "kinds": {kind: n / len(rows) for kind, n in Counter(item.found for item in rows).items()},
            "in_format": float(np.mean(formats)) if formats else None,
        }
        if BASE in measures and name != BASE:
            differences = {key: values[key] - measures[BASE][key] for key in values}
            found["gain"][name] = _estimates(differences, seed)
    return found


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, which is always among them; none for 0."""
    found = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return found if not most or found[-1] == most else [*found, most]


def _measures(items: Sequence[Item], ks: Sequence[int]) -> dict[str, Any]:
    measures = {"greedy": np.array([item.right for item in items])}
    if ks:
        measures["sampled"] = np.array([item.pass_at(1) for item in items])
    return measures | {f"pass@{k}": np.array([item.pass_at(k) for item in items]) for k in ks if k > 1}


def _estimates(measures: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {
        name: asdict(estimate(values, rng=np.random.default_rng(seed))) for name, values in measures.items()
    }


def _settings(rows: Iterable[Row], sampling: Sampling) -> dict[str, Any]:
    """What a file of answers depends on, besides the model that names it."""
    probe = "\x00"
    settings = asdict(replace(sampling, template=None))
    settings["template"] = None if sampling.template is None else sampling.template(probe)
    return {**settings, "rows": [row.id for row in rows]}


def _stored(file: Path, settings: Mapping[str, Any]) -> list[Answers] | None:
    if not file.exists():
        return None
    first, *rest = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    if first["settings"] != settings:
        return None
    return [Answers(greedy=values["greedy"], samples=tuple(values["samples"])) for values in rest]
