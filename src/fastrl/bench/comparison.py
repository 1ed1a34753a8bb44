"""From finished cells to the tables of a comparison: accuracies, differences, speed-ups, all with intervals."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrl.bench.catalogue import LOSSES
from fastrl.bench.cells import curve
from fastrl.bench.equal import equal_updates
from fastrl.bench.stats import (
    bootstrap,
    final_accuracy,
    iqm,
    mean_accuracy,
    paired_difference,
    paired_speedup,
    time_to_accuracy,
)
from fastrl.bench.tidy import run_row

if TYPE_CHECKING:
    from fastrl.bench.compare import Matrix

Cell = Mapping[str, Any]
KINDS = ("greedy", "sampled")


def tables(matrix: "Matrix", finished: Mapping[tuple[str, str, int], Cell]) -> dict[str, Any]:
    """Compute every table of compare.json.

    Args:
        matrix: What is compared.
        finished: Cells by (loss, method, seed); more may come.

    Returns:
        equal_updates (one per loss, see `fastrl.bench.equal`); tables {loss: {method: row}}, see `_row`; and
        aggregate {method: {final, speed}} over the seeds of all losses.
    """
    by_loss = {
        loss: {
            method.key: {
                s: finished[loss, method.key, s] for s in matrix.seeds if (loss, method.key, s) in finished
            }
            for method in matrix.methods
        }
        for loss in matrix.losses
    }
    found: dict[str, dict[str, Any]] = {}
    for loss, cells in by_loss.items():
        base = cells[matrix.baseline]
        found[loss] = {key: _row(base, of_method, matrix) for key, of_method in cells.items() if of_method}
        if matrix.baseline in found[loss]:
            found[loss][matrix.baseline]["difference"] = None
    return {
        "equal_updates": [
            equal_updates(
                loss,
                matrix.recipe.replace(**LOSSES[loss]),
                {key: list(of_method.values()) for key, of_method in cells.items() if of_method},
            )
            for loss, cells in by_loss.items()
        ],
        "tables": found,
        "aggregate": _aggregate(by_loss, matrix),
    }


def _row(base: Mapping[int, Cell], cells: Mapping[int, Cell], matrix: "Matrix") -> dict[str, Any]:
    """One method of one loss: means over its seeds, and what is paired with the baseline by seed."""
    runs = [run_row(cell) for cell in cells.values()]
    clock = clock_column(matrix.clock)
    pairs = [seed for seed in cells if seed in base]
    seconds = [float(run[clock]) for run in runs]
    num_updates = runs[0]["num_updates"]
    return {
        "num_seeds": len(cells),
        "final": {kind: _final(cells.values(), kind) for kind in KINDS} | _pass_at_k(runs),
        "difference": {
            kind: _numbers(
                paired_difference(
                    [final_accuracy(curve(base[s], kind)) for s in pairs],
                    [final_accuracy(curve(cells[s], kind)) for s in pairs],
                    rng=_rng(),
                )
            )
            for kind in KINDS
            if pairs
        },
        "train_s": {"mean": float(np.mean(seconds)), "min": min(seconds), "max": max(seconds)},
        "step_s": float(np.median([second / num_updates for second in seconds])),
        "speed": _speed(base, cells, pairs, matrix),
        "area": {kind: _area(base, cells, pairs, kind, clock) for kind in KINDS if pairs},
        "kept_share": _mean(runs, "trained_rows") / _mean(runs, "generated_rows"),
        "num_rollouts": _mean(runs, "num_rollouts"),
        "rollouts": {name: _mean(runs, f"{name}_rows") for name in ("generated", "trained")},
        "tokens": {name: _mean(runs, f"{name}_tokens") for name in ("generated", "trained")},
        "rows_per_update": _mean(runs, "trained_rows") / num_updates,
        "entropy_final": _entropy(cells.values()),
        "stage_s": {
            stage.removeprefix("stage_"): _mean(runs, stage) / num_updates
            for stage in runs[0]
            if stage.startswith("stage_")
        },
    }


def _final(cells: Any, kind: str) -> dict[str, Any]:
    return _spread([final_accuracy(curve(cell, kind)) for cell in cells])


def _pass_at_k(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [run["pass_at_k"] for run in runs if run["pass_at_k"] is not None]
    return {"pass_at_k": _spread(values)} if values else {}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, IQM with its interval over seeds, range and the values themselves."""
    array = np.array(values, dtype=float)
    low = high = None
    if len(array) > 1:
        low, high = bootstrap([array], rng=_rng(), statistic=iqm)
    return {
        "mean": float(array.mean()),
        "iqm": float(iqm(array)),
        "low": low,
        "high": high,
        "min": float(array.min()),
        "max": float(array.max()),
        "values": array.tolist(),
    }


def _speed(
    base: Mapping[int, Cell], cells: Mapping[int, Cell], pairs: Sequence[int], matrix: "Matrix"
) -> dict[str, Any]:
    """Paired speed-ups: for the same updates, to the baseline's final accuracy of each seed, to fixed accuracies."""
    clock = clock_column(matrix.clock)

    def to(target_of: Any, kind: str) -> dict[str, Any]:
        targets = [target_of(seed) for seed in pairs]
        times = [
            [time_to_accuracy(curve(of[s], kind, clock), t) for s, t in zip(pairs, targets, strict=True)]
            for of in (base, cells)
        ]
        return _numbers(paired_speedup(*(_positive(t) for t in times), rng=_rng()))

    totals = [[float(of[s]["summary"][clock]) for s in pairs] for of in (base, cells)]
    return {
        "equal_updates": _numbers(paired_speedup(totals[0], totals[1], rng=_rng())),
        **{
            f"to_final_{kind}": to(lambda seed, kind=kind: final_accuracy(curve(base[seed], kind)), kind)
            for kind in KINDS
        },
        "to_fixed": {f"{target:g}": to(lambda _, t=target: t, "greedy") for target in matrix.targets},
    }


def _positive(times: Sequence[float | None]) -> list[float | None]:
    """A target that is met before training takes no time, and no time has no ratio: such a seed is left out."""
    return [time if time else None for time in times]


def _area(
    base: Mapping[int, Cell], cells: Mapping[int, Cell], pairs: Sequence[int], kind: str, clock: str
) -> dict[str, Any]:
    """Mean accuracy over the baseline's training time, seed by seed."""
    values = [mean_accuracy(curve(cells[s], kind, clock), float(base[s]["summary"][clock])) for s in pairs]
    low = high = None
    if len(values) > 1:
        low, high = bootstrap([np.array(values)], rng=_rng())
    return {"mean": float(np.mean(values)), "low": low, "high": high}


def _entropy(cells: Any) -> float | None:
    """Mean policy entropy of the last tenth of the steps, over seeds."""
    tails = [[row["entropy"] for row in cell["steps"]][-max(1, len(cell["steps"]) // 10) :] for cell in cells]
    values = [value for tail in tails for value in tail if value is not None]
    return float(np.mean(values)) if values else None


def _aggregate(by_loss: Mapping[str, Mapping[str, Mapping[int, Cell]]], matrix: "Matrix") -> dict[str, Any]:
    """Over all losses: IQM of final accuracies with an interval stratified by loss; speed-up of all pairs."""
    clock = clock_column(matrix.clock)
    rows: dict[str, Any] = {}
    for method in matrix.methods:
        of = {loss: cells[method.key] for loss, cells in by_loss.items()}
        if any(len(cells) < 2 for cells in of.values()):
            continue  # an interval stratified by loss needs two seeds of each
        rows[method.key] = {"final": {}, "speed": {}}
        for kind in KINDS:
            strata = [
                np.array([final_accuracy(curve(c, kind)) for c in cells.values()]) for cells in of.values()
            ]
            low, high = bootstrap(strata, rng=_rng(), statistic=iqm)
            rows[method.key]["final"][kind] = {
                "iqm": float(iqm(np.concatenate(strata))), "low": low, "high": high
            }  # fmt: skip
        pairs = [
            (by_loss[loss][matrix.baseline][s], cell)
            for loss, cells in of.items()
            for s, cell in cells.items()
            if s in by_loss[loss][matrix.baseline]
        ]
        times = [[float(cell["summary"][clock]) for cell in side] for side in zip(*pairs, strict=True)]
        if times:
            rows[method.key]["speed"]["equal_updates"] = _numbers(paired_speedup(*times, rng=_rng()))
    return rows


def clock_column(clock: str) -> str:
    """The column of a clock: train_s (wall) or cpu_s (processor)."""
    return {"wall": "train_s", "processor": "cpu_s"}[clock]


def _mean(runs: Sequence[Mapping[str, Any]], column: str) -> float:
    return float(np.mean([run[column] for run in runs]))


def _rng() -> np.random.Generator:
    """The same draws for every interval, so that a table is a function of its cells."""
    return np.random.default_rng(0)


def _numbers(result: Any) -> dict[str, Any]:
    """A dataclass of numbers as JSON values: NaN, which JSON has not, becomes null."""
    return {key: None if value != value else value for key, value in dataclasses.asdict(result).items()}
