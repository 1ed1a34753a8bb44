"""The `task:` block of a recipe: what is trained on, and how it is rewarded and measured."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastrl.config import did_you_mean
from fastrl.data.readers import READERS
from fastrl.rewards.rules import RULES
from fastrl.types import ConfigError

TESTBED = "testbed"
PROBLEMS = ("short", "long")
"""Problem sets of the testbed (`fastrl.data.testbed.PROBLEM_SETS`)."""
DATA = tuple(READERS)
"""Readers of `fastrl.data` that a recipe can name."""
REWARDS = tuple(RULES)
"""Rules of `fastrl.rewards` that a recipe can name."""


@dataclass(frozen=True, kw_only=True)
class TestbedTask:
    """The tiny vision-language model that ships with FastRL, on its drawn problems.

    Args:
        name: testbed.
        problems: short (one or two steps) or long (two to four, solved in words); each has its own checkpoint.
        train_prompts: Prompts of the training set, drawn with the seed of the run.
        held_out_prompts: Prompts of the held-out set, the same in every run.
        evaluate_every: Steps between held-out evaluations; 0 = before and after only.
        pass_k, pass_prompts: At the end, the share of the first `pass_prompts` held-out problems that one of `pass_k`
            sampled answers gets right (pass@k); 0 = not measured.
        num_threads: Threads of torch on a CPU; null = torch's own choice.
    """

    __test__ = False  # pytest: no class of tests

    name: str = TESTBED
    problems: str = "short"
    train_prompts: int = 128
    held_out_prompts: int = 200
    evaluate_every: int = 4
    pass_k: int = 0
    pass_prompts: int = 64
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.problems not in PROBLEMS:
            raise ConfigError(
                f"task.problems: {self.problems!r} is unknown.{did_you_mean(str(self.problems), PROBLEMS)} All: "
                f"{', '.join(PROBLEMS)}."
            )
        _check_counts(
            self,
            {
                "train_prompts": 1, "held_out_prompts": 1, "evaluate_every": 0, "pass_k": 0, "pass_prompts": 1,
                "num_threads": 1,
            },
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DataTask:
    """A model on a data set of `fastrl.data`.

    Args:
        name: Reader: geometry3k, geoqa8k-r1v, math, or file (JSONL, CSV or parquet of your own).
        model: Folder or hub name.
        parameters: Of the model, in billions: for the estimate of `--dry-run` where no copy of it is at hand.
        processes: That the batch sizes are written for, usually the GPUs; another number is refused, since every
            update would see another number of rollouts. null = any.
        source: Where the data lies: folder, file, zip or hub name; null = the published hub name.
        columns: For `file`: our name -> the file's, such as {problem: question}.
        train_split, held_out_split: Splits; TRL evaluates on the second if `eval_strategy` says so.
        train_prompts, held_out_prompts: Take the first so many; null = all.
        reward: paper, easyr1_math, r1v or accuracy (`fastrl.rewards`).
        prompt: Template around the problem: a name that ships with FastRL, or a .jinja file; null = the bare problem.
        system: System message; null = none.
        overlong_buffer: DAPO's soft punishment, in tokens before max_completion_length; 0 = none.
        min_pixels, max_pixels: Size of an image for the model, for processors that take it; null = the processor's own.
        keep_good: Leave out rows that do not pass `fastrl data --check`, and say which; false = stop.
    """

    name: str
    model: str
    parameters: float | None = None
    processes: int | None = None
    source: str | None = None
    columns: Mapping[str, str] | None = None
    train_split: str = "train"
    held_out_split: str = "test"
    train_prompts: int | None = None
    held_out_prompts: int | None = None
    reward: str = "paper"
    prompt: str | None = None
    system: str | None = None
    overlong_buffer: int = 0
    min_pixels: int | None = None
    max_pixels: int | None = None
    keep_good: bool = False

    def __post_init__(self) -> None:
        if self.reward not in REWARDS:
            raise ConfigError(
                f"task.reward: {self.reward!r} is unknown.{did_you_mean(self.reward, REWARDS)} All: "
                f"{', '.join(REWARDS)}."
            )
        _check_counts(
            self,
            {
                "train_prompts": 1, "held_out_prompts": 1, "overlong_buffer": 0, "min_pixels": 1, "max_pixels": 1,
                "processes": 1,
            },
        )  # fmt: skip
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"task.min_pixels: {self.min_pixels} is above task.max_pixels: {self.max_pixels}: no image has "
                "such a size. Swap them."
            )
        if self.columns is not None and self.name != "file":
            raise ConfigError(
                f"task.columns: the columns of {self.name} are known; a mapping belongs to name: file. Remove it."
            )
        if self.name == "file" and self.source is None:
            raise ConfigError("task.source: name: file needs the path of a JSONL, CSV or parquet file.")


Task = TestbedTask | DataTask


def parse_task(block: Mapping[str, Any]) -> Task:
    """Validate a `task:` block; without a name it is the testbed.

    Raises:
        ConfigError: an unknown task or key, a value that cannot work, or no model.
    """
    name = block.get("name", TESTBED)
    if name != TESTBED and name not in DATA:
        known = (TESTBED, *DATA)
        raise ConfigError(
            f"task.name: {name!r} is unknown.{did_you_mean(name, known)} All: {', '.join(known)}. Data of your own "
            "is name: file, or give FastGRPOTrainer the data set in a script."
        )
    kind = TestbedTask if name == TESTBED else DataTask
    names = [f.name for f in dataclasses.fields(kind)]
    for key in block:
        if key not in names:
            raise ConfigError(f"task.{key} is unknown.{did_you_mean(key, names)} All: {', '.join(names)}.")
    if kind is DataTask and not block.get("model"):
        raise ConfigError(f"task.model: {name} needs a model: its folder or hub name.")
    return kind(**block)


def _check_counts(task: Any, least: Mapping[str, int]) -> None:
    optional = {f.name for f in dataclasses.fields(task) if f.default is None}
    for name, lowest in least.items():
        value = getattr(task, name)
        if value is None and name in optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ConfigError(f"task.{name}: {value!r} is not a whole number of at least {lowest}.")
