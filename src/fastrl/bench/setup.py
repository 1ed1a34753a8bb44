"""From the `task:` block of a recipe to what a trainer takes: model, processor, rows, rewards, a held-out measure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastrl.bench.tasks import DataTask, Task, TestbedTask
from fastrl.rewards import RULES, accuracy_reward, format_reward, reward_functions


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a trainer is built from.

    Args:
        arguments: model, processing_class, reward_funcs, train_dataset and, for data sets, eval_dataset.
        measure: (model, whether training has ended) -> row of held-out accuracies; None where TRL's own evaluation
            measures.
        evaluate_every: Steps between measures; None = never.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    measure: Callable[[Any, bool], dict[str, Any]] | None = None
    evaluate_every: int | None = None


def set_up(task: Task, *, seed: int, evaluate: bool, max_tokens: int, has_held_out: bool = False) -> Setup:
    """Prepare a task.

    Args:
        task: The `task:` block.
        seed: Of the prompts that are drawn.
        evaluate: Measure held-out accuracy.
        max_tokens: Most tokens of a completion.
        has_held_out: TRL evaluates too (`eval_strategy`), so it needs the held-out rows.
    """
    if isinstance(task, TestbedTask):
        return _testbed(task, seed, evaluate=evaluate)
    return _data(task, max_tokens=max_tokens, has_held_out=has_held_out)


def _testbed(task: TestbedTask, seed: int, *, evaluate: bool) -> Setup:
    from fastrl import testbed
    from fastrl.data.testbed import PROBLEM_SETS, dataset, problems

    testbed.cpu_settings(task.num_threads)
    model, processor = testbed.load(task.problems)
    num = task.held_out_prompts if evaluate else 0
    held_out = problems("held_out", num, 0, problem_set=task.problems)
    max_new_tokens = PROBLEM_SETS[task.problems].max_tokens

    def measure(model: Any, is_last: bool) -> dict[str, Any]:
        greedy, sampled = (
            testbed.evaluate(
                model, processor, held_out, greedy=is_greedy, seed=0, max_new_tokens=max_new_tokens
            )
            for is_greedy in (True, False)
        )
        row = {
            "greedy": greedy["accuracy"],
            "sampled": sampled["accuracy"],
            "format": sampled["format"],
            "families": greedy["families"],
            "num": greedy["num"],
        }
        if is_last and task.pass_k:
            first = held_out[: task.pass_prompts]
            row["pass_at_k"] = testbed.pass_at(
                model, processor, first, k=task.pass_k, max_new_tokens=max_new_tokens
            )
        return row

    return Setup(
        arguments={
            "model": model,
            "processing_class": processor,
            "reward_funcs": [accuracy_reward, format_reward],
            "train_dataset": dataset("train", task.train_prompts, seed, problem_set=task.problems),
        },
        measure=measure,
        evaluate_every=task.evaluate_every if evaluate else None,
    )


def _data(task: DataTask, *, max_tokens: int, has_held_out: bool) -> Setup:

    rule = RULES[task.reward].with_overlong(task.overlong_buffer, max_tokens)
    arguments: dict[str, Any] = {
        "model": task.model,
        "processing_class": _processor(task),
        "reward_funcs": reward_functions(rule),
        "train_dataset": _dataset(task, task.train_split, task.train_prompts),
    }
    if has_held_out:
        arguments["eval_dataset"] = _dataset(task, task.held_out_split, task.held_out_prompts)
    return Setup(arguments=arguments)


def _dataset(task: DataTask, split: str, num: int | None) -> Any:
    """The rows of a split as TRL takes them; every row has passed the check of `fastrl data`."""
    from fastrl.data.check import checked
    from fastrl.data.export import to_trl
    from fastrl.data.prompts import read_template
    from fastrl.data.readers import load

    rows = load(task.name, source=task.source, split=split, columns=task.columns)
    template = read_template(task.prompt) if task.prompt is not None else None
    return to_trl(checked(rows, keep_good=task.keep_good, limit=num), template=template, system=task.system)


def _processor(task: DataTask) -> Any:
    """The model's processor, with the task's image size; a tokenizer where the model has no other."""
    from transformers import AutoProcessor

    sizes = {name: getattr(task, name) for name in ("min_pixels", "max_pixels")}
    given = {name: value for name, value in sizes.items() if value is not None}
    return AutoProcessor.from_pretrained(task.model, padding_side="left", **given)
