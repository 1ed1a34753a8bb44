"""Train one method of a recipe once, and measure it: training seconds only, held-out accuracy, stages."""

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, set_seed

from fastrl.bench.recipe import Recipe
from fastrl.bench.recording import Progress, Recorder, Silent
from fastrl.bench.setup import set_up
from fastrl.config import FastRLConfig

STAGES = ("generation", "rewards", "old_ref", "select", "update")
"""The clocks that both trainers log as fastrl/time/<stage>_s, in the order of a step."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train a recipe.

    Args:
        key: Names its folder and its rows.
        label: What tables and figures call it.
        fastrl: Settings of FastRL; None = stock TRL with clocks.
        trainer: GRPOConfig keys in which it differs from the recipe.
    """

    key: str
    label: str
    fastrl: FastRLConfig | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MethodRun:
    """What one training run gave.

    Args:
        method, seed: What was trained.
        folder: Where its rows lie.
        metrics: One row per optimizer step: TRL's log, `step`, `train_s` (seconds of training so far),
            `step_s` (seconds of this step) and `cpu_s` (processor seconds so far, all threads).
        evaluations: One row per evaluation: `step`, `train_s`, `greedy` and `sampled` accuracy,
            `format`, `families`.
    """

    method: Method
    seed: int
    folder: Path
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def train_s(self) -> float:
        """Seconds of training, evaluations not counted."""
        return float(self.metrics[-1]["train_s"])

    def curve(self, accuracy: str = "greedy") -> list[tuple[float, float]]:
        """(seconds of training, held-out accuracy) pairs; `accuracy` is greedy or sampled."""
        return [(row["train_s"], row[accuracy]) for row in self.evaluations]


def train_method(
    recipe: Recipe,
    method: Method,
    *,
    seed: int,
    folder: Path,
    evaluate: bool = True,
    save: bool = False,
    progress: Progress | None = None,
) -> MethodRun:
    """Train a fresh copy of the task's model with one method.

    Args:
        recipe: What to train.
        method: How.
        seed: Of torch, numpy and random, of the order of the prompts, and of which prompts are drawn.
        folder: Output folder of TRL and of the rows; made here.
        evaluate: Measure held-out accuracy.
        save: Write the trained model and its processor to <folder>/model, where `fastrl eval` finds them.
        progress: Told about every step and evaluation.
    """
    from fastrl.integrations.trl import FastGRPOTrainer, TimedGRPOTrainer

    progress = progress or Silent()
    folder.mkdir(parents=True, exist_ok=True)
    args = recipe.replace(**method.trainer, seed=seed).grpo_config(folder / "trainer")
    set_seed(seed)
    setup = set_up(
        recipe.task, seed=seed, evaluate=evaluate, max_tokens=args.max_completion_length,
        has_held_out=args.eval_strategy != "no",
    )  # fmt: skip
    is_main = args.process_index == 0
    recorder = Recorder(
        method.label,
        setup.measure,
        setup.evaluate_every,
        folder if is_main else None,
        progress if is_main else Silent(),
    )
    arguments = {**setup.arguments, "args": args, "callbacks": [recorder]}
    if method.fastrl is None:
        trainer = TimedGRPOTrainer(**arguments)
    else:
        trainer = FastGRPOTrainer(**arguments, fastrl=method.fastrl)
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        progress.finish()
    if save:
        trainer.save_model(str(folder / "model"))
    return MethodRun(
        method=method,
        seed=seed,
        folder=folder,
        metrics=recorder.metrics,
        evaluations=recorder.evaluations,
    )


def warm_up(recipe: Recipe) -> None:
    """Train one step that nobody looks at.

    The first step of a process pays for what later ones find ready (kernels, memory), and whoever is
    measured first would pay for it alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        stock = Method(key="warm-up", label="warm-up")
        train_method(recipe.replace(max_steps=1), stock, seed=0, folder=Path(folder), evaluate=False)


def with_seed(method: Method, seed: int) -> Method:
    """The same method with FastRL's own random choices drawn from another seed."""
    if method.fastrl is None:
        return method
    return dataclasses.replace(method, fastrl=dataclasses.replace(method.fastrl, seed=seed))
