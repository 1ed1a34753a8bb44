"""A folder of `fastrl train` in the shape of a comparison: one loss, one seed, one or two methods."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fastrl.report.page.read import dig, is_finished, number, read_json, read_lines
from fastrl.report.page.rows import STAGES, evaluation_rows, mean, notes_of, step_row, total
from fastrl.types import ConfigError

_LABELS = {"grpo": "stock TRL", "fastrl": "with FastRL"}
"""Until summary.json names them."""
_NUM_LAST = 3
"""Evaluations whose mean is the final accuracy, as in `fastrl.bench.stats`."""


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run, finished or not.

    Returns:
        kind, recipe, settings, versions, seeds, clock, finished, baseline, losses, methods, cells, equal_updates,
        tables, steps, evaluations (both {loss: {method: {seed: rows}}}), notes ({loss: {method: counts}}, of
        reliability) and problems.
    """
    problems: list[str] = []
    settings, summary = _settings(folder), read_json(folder / "summary.json")
    seed = str(summary.get("seed", settings.get("seed", "")))
    loss = _loss(settings)
    logged = {path.parent.name: read_lines(path, problems) for path in _metrics(folder)}
    steps = {key: [step_row(row) for row in rows] for key, rows in logged.items()}
    evaluations = {
        key: evaluation_rows(read_lines(folder / key / "evaluations.jsonl", problems), steps[key])
        for key in steps
    }
    methods = _methods(list(steps), settings, summary)
    by_method = {method["key"]: dig(summary, "methods") or [] for method in methods}
    tables = {
        key: _results(steps[key], evaluations[key], _entry(by_method[key], key), settings) for key in steps
    }
    return {
        "kind": "train",
        "recipe": summary.get("recipe", folder.resolve().name),
        "settings": settings,
        "versions": read_json(folder / "versions.json"),
        "seeds": [seed] if seed else [],
        "clock": "wall",
        "finished": is_finished(folder),
        "baseline": "grpo" if "grpo" in steps else None,
        "losses": [loss],
        "methods": methods,
        "cells": None,
        "aggregate": {},
        "equal_updates": [_equal_updates(loss, steps, settings)] if len(steps) > 1 and summary else [],
        "tables": {loss: tables},
        "steps": {loss: {key: {seed: rows} for key, rows in steps.items()}},
        "evaluations": {loss: {key: {seed: rows} for key, rows in evaluations.items()}},
        "notes": {loss: {key: notes_of(rows) for key, rows in logged.items()}},
        "problems": problems,
    }


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.yaml"
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: not YAML ({error}). fastrl train writes it, so it was changed: restore it."
        ) from error
    return content if isinstance(content, dict) else {}


def _loss(settings: Mapping[str, Any]) -> str:
    """The algorithm by its name where the recipe gives one; sequence-level ratios make GSPO of any loss."""
    is_gspo = settings.get("importance_sampling_level") == "sequence"
    return str(
        settings.get("algorithm") or ("gspo" if is_gspo else settings.get("loss_type", "grpo"))
    ).lower()


def _metrics(folder: Path) -> list[Path]:
    """metrics.jsonl of every method, the baseline first."""
    return sorted(folder.glob("*/metrics.jsonl"), key=lambda path: (path.parent.name != "grpo", path))


def _methods(
    keys: Sequence[str], settings: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "label": _entry(summary.get("methods") or [], key).get("label", _LABELS.get(key, key)),
            "fastrl": None if key == "grpo" else settings.get("fastrl"),
            "trainer": {},
        }
        for key in keys
    ]


def _entry(methods: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    return next((method for method in methods if method.get("key") == key), {})


def _results(
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    entry: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """One method in the layout of a comparison's tables; one seed has no interval."""
    generated, trained = total(steps, "generated_rows"), total(steps, "trained_rows")
    seconds = [row["step_s"] for row in steps if row["step_s"] is not None]
    train_s = steps[-1]["train_s"] if steps else None
    return {
        "num_seeds": 1,
        "final": {kind: _one(_final(evaluations, kind)) for kind in ("greedy", "sampled")},
        "difference": {},
        "train_s": {"mean": train_s, "min": train_s, "max": train_s},
        "step_s": statistics.median(seconds) if seconds else None,
        "speed": {
            "equal_updates": _ratio(entry.get("speedup_equal_steps")),
            "to_final_greedy": _ratio(entry.get("speedup_to_target"), asked=bool(entry)),
        },
        "area": {},
        "kept_share": trained / generated if trained is not None and generated else None,
        "num_rollouts": mean([row["num_rollouts"] for row in steps]),
        "rollouts": {"generated": generated, "trained": trained},
        "tokens": {"generated": total(steps, "generated_tokens"), "trained": total(steps, "trained_tokens")},
        "entropy_final": next((r["entropy"] for r in reversed(steps) if r["entropy"] is not None), None),
        "stage_s": {stage: mean([row[f"stage_{stage}"] for row in steps]) for stage in STAGES},
    }


def _final(evaluations: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    return mean([row[kind] for row in (evaluations[1:] or evaluations)[-_NUM_LAST:]])


def _one(value: float | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        "mean": value, "iqm": value, "low": None, "high": None, "min": value, "max": value, "values": [value],
    }  # fmt: skip


def _ratio(value: Any, *, asked: bool = False) -> dict[str, Any] | None:
    ratio = number(value)
    if ratio is None and not asked:
        return None
    pairs = int(ratio is not None)
    return {"ratio": ratio, "low": None, "high": None, "num_pairs": pairs, "num_never": 1 - pairs}


def _equal_updates(
    loss: str, steps: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes two methods comparable: as many updates, of as many prompts, at the same learning rate."""
    counts = {key: len(rows) for key, rows in steps.items()}
    rows = [settings.get(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    per_prompt, batch = settings.get("num_generations"), [value or 1 for value in rows]
    return {
        "loss": loss,
        "num_updates": max(counts.values()),
        "prompts_per_update": batch[0] * batch[1] // per_prompt if per_prompt else None,
        "learning_rate": settings.get("learning_rate"),
        "ok": len(set(counts.values())) == 1,
        "methods": list(counts),
    }
