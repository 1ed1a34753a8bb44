"""A folder of `fastrl compare` as a dictionary: its compare.json, with its tables of rows put in order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.report.page.read import cells_are_done, number, read_json, read_lines, read_table
from fastrl.report.page.rows import EVALUATION, STEP, notes_of
from fastrl.types import ConfigError

FORMAT = 1


def read_comparison(folder: Path) -> dict[str, Any]:
    """Read a comparison, finished or not; the result is that of `run_folder.read_run`.

    One that has not written its compare.json yet, which comes with its first minute, has no method and no loss.

    Raises:
        ConfigError: a format that this version does not know.
    """
    content = read_json(folder / "compare.json")
    if content and content.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / 'compare.json'}: format {content.get('format')!r}, this FastRL reads {FORMAT}. Use the version "
            "that wrote it, or compare again."
        )
    problems: list[str] = []
    steps = read_table(folder / "steps.parquet", problems)
    evaluations = read_table(folder / "evaluations.parquet", problems)
    tables = _tables(content.get("tables"))
    methods = _methods(content.get("methods"), tables)
    return {
        "kind": "compare",
        "recipe": content.get("recipe") or folder.resolve().name,
        "settings": content.get("settings") or {},
        "versions": content.get("versions") or {},
        "seeds": [str(seed) for seed in content.get("seeds") or range(content.get("num_seeds") or 0)],
        "clock": content.get("clock") or "wall",
        "finished": cells_are_done(content.get("cells")),
        "baseline": content.get("baseline"),
        "losses": content.get("losses") or list(tables),
        "methods": methods,
        "cells": content.get("cells"),
        "aggregate": content.get("aggregate") or {},
        "equal_updates": content.get("equal_updates") or [],
        "tables": tables,
        "steps": _nested(steps, STEP, methods),
        "evaluations": _nested(evaluations, EVALUATION, methods),
        "notes": _notes(folder, methods, problems),
        "problems": problems,
    }


def _tables(tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, Mapping):
        return {}
    return {str(loss): dict(methods) for loss, methods in tables.items() if isinstance(methods, Mapping)}


def _methods(methods: Any, tables: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The methods as described, then those that only tables know, by their key."""
    described = [dict(method) for method in methods or [] if isinstance(method, Mapping) and "key" in method]
    known = {method["key"] for method in described}
    others = dict.fromkeys(key for results in tables.values() for key in results if key not in known)
    described += [{"key": key} for key in others]
    return [{"label": method["key"], "fastrl": None, "trainer": {}, **method} for method in described]


def _nested(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], methods: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, dict[str, list[dict[str, float | None]]]]]:
    """{loss: {method: {seed: rows}}}, methods in their order, rows by step."""
    order = {method["key"]: place for place, method in enumerate(methods)}
    nested: dict[str, dict[str, dict[str, list[dict[str, float | None]]]]] = {}
    last = len(order)
    for row in sorted(
        rows, key=lambda row: (order.get(row.get("method"), last), number(row.get("step")) or 0)
    ):
        of_loss = nested.setdefault(str(row.get("loss")), {})
        of_seed = of_loss.setdefault(str(row.get("method")), {}).setdefault(str(row.get("seed")), [])
        of_seed.append({name: number(row.get(name)) for name in columns})
    return nested


def _notes(
    folder: Path, methods: Sequence[Mapping[str, Any]], problems: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """{loss: {method: counts of reliability}} from the logs of the cells, cells/<loss>/<method>-seed<k>/."""
    keys = {str(method["key"]) for method in methods}
    logged: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("cells/*/*/metrics.jsonl")):
        key = path.parent.name.rpartition("-seed")[0]
        if key in keys:
            of_loss = logged.setdefault(path.parents[1].name, {})
            of_loss.setdefault(key, []).extend(read_lines(path, problems))
    return {
        loss: {key: notes_of(rows) for key, rows in by_method.items()} for loss, by_method in logged.items()
    }
