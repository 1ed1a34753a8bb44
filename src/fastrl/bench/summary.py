"""From the rows of training runs to the numbers of the table: accuracy, time, rollouts, share of each stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastrl.bench.stats import NUM_LAST, final_accuracy, time_to_accuracy
from fastrl.bench.training import STAGES, MethodRun


def summarize_runs(runs: Sequence[MethodRun]) -> dict[str, Any]:
    """Summarize the methods of one seed.

    The baseline is the first run without FastRL. The target is its final accuracy: greedy, held-out,
    the mean of its last three evaluations.

    Returns:
        `seed`, `target` (None without a baseline) and `methods`: one dict per run, see `summarize_run`,
        plus `time_to_target_s`, `speedup_to_target` and `speedup_equal_steps` (baseline / this one; None
        where the target was never reached or there is no baseline).
    """
    baseline = next((run for run in runs if run.method.fastrl is None), None)
    target = None
    if baseline is not None and baseline.evaluations:
        target = final_accuracy(baseline.curve())
    return {
        "seed": runs[0].seed,
        "target": target,
        "target_rule": f"held-out greedy accuracy, mean of the baseline's last {NUM_LAST} evaluations",
        "methods": [
            {**summarize_run(run), **_comparison(run, baseline=baseline, target=target)} for run in runs
        ],
    }


def summarize_run(run: MethodRun) -> dict[str, Any]:
    """Summarize one run.

    Returns:
        key, label, folder (its name in the run folder), num_steps; train_s, cpu_s, step_s (median);
        accuracy {greedy, sampled: {before, after}}, after = mean of the last three evaluations;
        rollouts {generated, trained} of the whole run; stage_s {generation, rewards, old_ref, select,
        update, rest} in seconds of the whole run, and stage_frac, the same as shares of train_s.
    """
    stage_s = {stage: _total(run, f"fastrl/time/{stage}_s") for stage in STAGES}
    stage_s["rest"] = max(0.0, run.train_s - sum(stage_s.values()))
    return {
        "key": run.method.key,
        "label": run.method.label,
        "folder": run.folder.name,
        "num_steps": len(run.metrics),
        "train_s": run.train_s,
        "cpu_s": float(run.metrics[-1]["cpu_s"]),
        "step_s": float(np.median([row["step_s"] for row in run.metrics])),
        "accuracy": {
            kind: {"before": run.evaluations[0][kind], "after": final_accuracy(run.curve(kind))}
            for kind in ("greedy", "sampled")
            if run.evaluations
        },
        "rollouts": {
            "generated": _total(run, "fastrl/rollouts"),
            "trained": _total(run, "fastrl/trained/rows"),
        },
        "stage_s": stage_s,
        "stage_frac": {stage: seconds / run.train_s for stage, seconds in stage_s.items()},
    }


def _total(run: MethodRun, key: str) -> float:
    """Sum over steps. What a trainer does not log was not done."""
    return float(sum(row.get(key, 0.0) for row in run.metrics))


def _comparison(run: MethodRun, *, baseline: MethodRun | None, target: float | None) -> dict[str, Any]:
    if baseline is None:
        return {"time_to_target_s": None, "speedup_to_target": None, "speedup_equal_steps": None}
    time_s = base_s = None
    if target is not None:
        time_s = time_to_accuracy(run.curve(), target)
        base_s = time_to_accuracy(baseline.curve(), target)
    # At step 0 the target is met in no time at all: no ratio says anything then.
    has_ratio = time_s is not None and base_s is not None and time_s > 0
    equal_steps = len(run.metrics) == len(baseline.metrics)
    return {
        "time_to_target_s": time_s,
        "speedup_to_target": base_s / time_s if has_ratio and base_s and time_s else None,
        "speedup_equal_steps": baseline.train_s / run.train_s if equal_steps else None,
    }
