"""The equal-update check: methods are compared only if they make the same number of updates in the same way."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastrl.bench.plan import batches
from fastrl.bench.recipe import Recipe
from fastrl.bench.training import Method
from fastrl.types import ConfigError

ROLLOUTS_ONLY = ("num_generations", "per_device_train_batch_size", "generation_batch_size")
"""Trainer keys in which methods may differ: rollouts per prompt, with the same prompts per step."""


def check_planned(recipe: Recipe, methods: Sequence[Method]) -> None:
    """Refuse methods that differ from the first one in more than rollouts and FastRL's settings.

    Raises:
        ConfigError: naming the method and what differs.
    """
    first = recipe.replace(**methods[0].trainer)
    for method in methods:
        changed = recipe.replace(**method.trainer)
        changed.grpo_config("unused")
        keys = {*first.trainer, *changed.trainer} - set(ROLLOUTS_ONLY)
        differing = sorted(key for key in keys if first.trainer.get(key) != changed.trainer.get(key))
        ours, theirs = batches(changed, 1), batches(first, 1)
        if ours.prompts != theirs.prompts:
            differing.append(f"prompts per round ({ours.prompts}, not {theirs.prompts})")
        if ours.updates != theirs.updates:
            differing.append(f"updates per round ({ours.updates:g}, not {theirs.updates:g})")
        if differing:
            raise ConfigError(
                f"compare: {method.key} differs from {methods[0].key} in {', '.join(differing)}: the comparison would "
                "be of unequal updates. Change the recipe for all methods instead; only "
                f"{', '.join(ROLLOUTS_ONLY)} may differ, at the same number of prompts."
            )


def equal_updates(
    loss: str, recipe: Recipe, cells: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """Compare the updates that finished cells made.

    Args:
        loss, recipe: Of the cells.
        cells: Finished cells of each method.

    Returns:
        num_updates, prompts_per_update and learning_rate (of the first update) of the first cell, `methods`, `ok`, and
        `unequal`: a sentence for each cell that made other updates.
    """
    rows = [(method, cell) for method, of_method in cells.items() for cell in of_method]
    schedules = [[step["learning_rate"] for step in cell["steps"]] for _, cell in rows]
    shape = batches(recipe, 1)
    unequal = [
        f"{method}, seed {cell['settings']['seed']}: {len(schedule)} updates against {len(schedules[0])}"
        + ("" if len(schedule) != len(schedules[0]) else " at other learning rates")
        for (method, cell), schedule in zip(rows, schedules, strict=True)
        if schedule != schedules[0]
    ]
    return {
        "loss": loss,
        "num_updates": len(schedules[0]) if schedules else None,
        "prompts_per_update": shape.prompts / shape.updates,
        "learning_rate": schedules[0][0] if schedules else None,
        "methods": list(cells),
        "ok": not unequal,
        "unequal": unequal,
    }


def check_done(checks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a comparison whose cells made other numbers of updates, or other ones.

    Raises:
        ConfigError: naming the cells.
    """
    unequal = [f"{check['loss']}: {sentence}" for check in checks for sentence in check["unequal"]]
    if unequal:
        raise ConfigError(
            f"compare: unequal updates, so no claim can be made ({'; '.join(unequal[:5])}). A run may have stopped "
            "early: see its rows; remove its cell to train it again, or leave its method out."
        )
