"""Run folders as `fastrl train` and `fastrl compare` write them, made up in a moment, for tests of `fastrl report`."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fastrl import FastRLConfig
from fastrl.trace import write_rollouts
from fastrl.types import Group, Selection

STAGES = ("generation", "rewards", "old_ref", "select", "update", "rest")
VERSIONS = {
    "python": "3.11.7",
    "packages": {"trl": "1.16.0", "torch": "2.13.0"},
    "machine": {"system": "Linux x86_64", "cpu": "A <CPU> & more", "num_cpus": 2, "accelerator": None},
    "environment": {"OMP_NUM_THREADS": "1"},
    "started": "2026-12-02T10:00:00+00:00",
    "command": ["fastrl", "train", "recipe.yaml"],
}
RECIPE: dict[str, Any] = {
    "algorithm": None,
    "baseline": True,
    "task": {"name": "testbed", "train_prompts": 8, "held_out_prompts": 20, "evaluate_every": 2},
    "seed": 0,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "learning_rate": 1e-4,
    "loss_type": "grpo",
}


def accuracy(step: int, num_steps: int) -> float:
    return 0.3 + 0.6 * (1 - math.exp(-3 * step / num_steps))


def train_folder(
    folder: Path, *, num_steps: int = 8, finished: bool = True, texts: list[str] | None = None
) -> Path:
    """A run of stock GRPO and FastRL; `texts`: the rollouts of its one recorded group, characters as tokens."""
    folder.mkdir(parents=True)
    settings = {**RECIPE, "fastrl": FastRLConfig(trace=texts is not None).to_dict()}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(VERSIONS), encoding="utf-8")
    for key, step_s, share in (("grpo", 2.0, 1.0), ("fastrl", 1.0, 0.25)):
        (folder / key).mkdir()
        metrics = [_logged(step, step_s, share) for step in range(1, num_steps + 1)]
        write_lines(folder / key / "metrics.jsonl", metrics)
        evaluations = [
            {
                "step": step,
                "train_s": step * step_s,
                "greedy": accuracy(step, num_steps),
                "sampled": 0.5,
                "format": 1,
            }
            for step in range(0, num_steps + 1, 2)
        ]
        write_lines(folder / key / "evaluations.jsonl", evaluations)
    if texts is not None:
        write_trace(folder / "fastrl", texts)
    if finished:
        methods = [
            {"key": "grpo", "label": "stock TRL GRPO", "speedup_to_target": 1.0, "speedup_equal_steps": 1.0},
            {"key": "fastrl", "label": "GRPO + FastRL", "speedup_to_target": 2.0, "speedup_equal_steps": 2.0},
        ]
        summary = {"recipe": "made-up", "seed": 0, "target": 0.8, "methods": methods}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def _logged(step: int, step_s: float, share: float) -> dict[str, Any]:
    return {
        "step": step, "train_s": step * step_s, "step_s": step_s, "cpu_s": 2 * step * step_s, "entropy": 1 / step,
        "reward": 1.0, "completions/mean_length": 10.0, "fastrl/num_rollouts/mean": 8.0, "fastrl/rollouts": 16.0,
        "fastrl/trained/rows": 16 * share, "fastrl/trained/tokens": 160 * share, "fastrl/kept/frac": share,
        "fastrl/frac_unscorable": 0.125, "fastrl/frac_zero_variance": 0.5, "fastrl/empty_steps": float(step == 3),
        **{f"fastrl/time/{stage}_s": step_s / 8 for stage in STAGES[:-1]},
    }  # fmt: skip


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_trace(method: Path, texts: list[str], *, num_groups: int = 1) -> None:
    """Groups whose rollouts are these texts (a token is a character's number), the second half of them dropped."""
    half = len(texts) // 2
    group = Group(
        prompt_id='circle-"><script>alert(1)</script>',
        tokens_G=[[ord(c) for c in text] for text in texts],
        rewards_G=np.array([1.5] * half + [np.nan] + [0.5] * (len(texts) - half - 1)),
        advantages_G=np.array([1.0] * half + [0.0] + [-1.0] * (len(texts) - half - 1)),
    )
    keep = np.arange(len(texts)) % 2 == 0
    keep[half] = False
    cluster = np.where(keep, np.arange(len(texts)), np.arange(len(texts)) - 1)
    cluster[half] = -1
    selection = Selection(keep_G=keep, weight_G=keep.astype(float), cluster_G=cluster, reason="mdap")
    for step in range(num_groups):
        write_rollouts(method / "trainer" / "fastrl" / "rollouts.jsonl", [group], [selection], step=step)
    _character_tokenizer(method / "model")


def _character_tokenizer(folder: Path) -> None:
    """A tokenizer whose token n is the character n."""
    folder.mkdir(parents=True, exist_ok=True)
    codes = [code for code in range(0x2100) if not 0xD800 <= code < 0xE000]
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {chr(code): code for code in codes}, "unk_token": "\u0000"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


TAUS = (0.2, 0.5, 0.8)


def compare_folder(
    folder: Path, *, num_seeds: int = 3, num_steps: int = 8, losses: tuple[str, ...] = ("grpo", "dapo")
) -> Path:
    """A comparison of stock GRPO, FastRL at three taus and CPPO, in which one cell failed."""
    folder.mkdir(parents=True)
    fast = {f"tau{tau:g}": FastRLConfig(tau=tau).to_dict() for tau in TAUS}
    fast["fastrl"] = fast.pop("tau0.8")
    methods: list[dict[str, Any]] = [{"key": "grpo", "label": "stock TRL", "fastrl": None, "trainer": {}}]
    methods += [
        {"key": key, "label": f"FastRL, {key}", "fastrl": settings, "trainer": {}}
        for key, settings in fast.items()
    ]
    peer = FastRLConfig(pruner="top_advantage", budget="fixed", refill="kept").to_dict()
    methods.append({"key": "cppo", "label": "CPPO", "fastrl": peer, "trainer": {}})
    keys = [method["key"] for method in methods]
    content = {
        "format": 1, "recipe": "made-up matrix", "settings": RECIPE, "versions": VERSIONS, "clock": "processor",
        "baseline": "grpo", "losses": list(losses), "num_seeds": num_seeds, "seeds": list(range(num_seeds)),
        "methods": methods,
        "cells": {
            "planned": len(losses) * len(keys) * num_seeds, "finished": len(losses) * len(keys) * num_seeds - 1,
            "failed": [{"loss": "grpo", "method": "cppo", "seed": 1, "error": "out of <memory>"}], "ended": True,
        },
        "equal_updates": [
            {"loss": loss, "num_updates": num_steps, "prompts_per_update": 2, "learning_rate": 1e-4,
             "ok": loss == "grpo", "methods": keys, "unequal": [] if loss == "grpo" else ["cppo, seed 1: 7 updates"]}
            for loss in losses
        ],
        "tables": {loss: {key: _results(place, num_seeds) for place, key in enumerate(keys)} for loss in losses},
        "aggregate": {
            key: {"final": {"greedy": {"iqm": 0.9, "low": 0.85, "high": 0.95}}, "speed": {}} for key in keys
        },
    }  # fmt: skip
    (folder / "compare.json").write_text(json.dumps(content), encoding="utf-8")
    _write_tables(folder, losses, keys, num_seeds, num_steps)
    return folder


def _results(place: int, num_seeds: int) -> dict[str, Any]:
    values = [0.9 - 0.01 * place + 0.01 * seed for seed in range(num_seeds)]
    final = {
        "mean": float(np.mean(values)), "iqm": float(np.median(values)), "low": min(values), "high": max(values),
        "min": min(values), "max": max(values), "values": values,
    }  # fmt: skip
    ratio = {"ratio": 1 + 0.4 * place, "low": 1 + 0.3 * place, "high": 1 + 0.6 * place, "num_pairs": num_seeds - 1,
             "num_never": 1}  # fmt: skip
    change = {"mean": -0.01 * place, "low": -0.02 * place, "high": 0.01}
    return {
        "num_seeds": num_seeds, "final": {"greedy": final, "sampled": final, "pass_at_k": final},
        "difference": {"greedy": change, "sampled": change} if place else None,
        "train_s": {"mean": 40.0 / (1 + place), "min": 30.0, "max": 50.0}, "step_s": 2.0,
        "speed": {"equal_updates": ratio, "to_final_greedy": ratio, "to_final_sampled": ratio,
                  "to_fixed": {"0.8": ratio}},
        "area": {"greedy": change, "sampled": change}, "kept_share": 1 / (1 + place), "num_rollouts": 8.0,
        "rollouts": {"generated": 2048.0, "trained": 512.0}, "tokens": {"generated": 25_000.0, "trained": 5_000.0},
        "entropy_final": 0.1, "stage_s": dict.fromkeys(STAGES, 0.5 / (1 + place)),
    }  # fmt: skip


def _write_tables(
    folder: Path, losses: tuple[str, ...], keys: list[str], num_seeds: int, num_steps: int
) -> None:
    import pyarrow
    import pyarrow.parquet

    steps, evaluations = [], []
    for loss in losses:
        for place, key in enumerate(keys):
            for seed in range(num_seeds):
                names = {"loss": loss, "method": key, "seed": seed}
                step_s = (1 + 0.1 * seed) / (1 + 0.5 * place)
                for step in range(1, num_steps + 1):
                    seconds = {
                        "step": step,
                        "train_s": step * step_s,
                        "cpu_s": step * step_s,
                        "step_s": step_s,
                    }
                    steps.append(
                        {
                            **names, **seconds, "num_rollouts": 8.0 - place * step / num_steps, "generated_rows": 16.0,
                            "trained_rows": 16.0 / (1 + place), "generated_tokens": 160.0,
                            "trained_tokens": 160.0 / (1 + place), "kept_frac": 1 / (1 + place), "entropy": 1 / step,
                            "reward": 1.0, **{f"stage_{stage}": step_s / 6 for stage in STAGES},
                        }
                    )  # fmt: skip
                    if step % 2 == 0:
                        evaluations.append(
                            {
                                **names, **seconds, "generated_rows": 16.0 * step,
                                "trained_tokens": 160.0 * step / (1 + place), "greedy": accuracy(step, num_steps),
                                "sampled": accuracy(step, num_steps) - 0.05 - 0.01 * seed, "format": 1.0,
                                "pass_at_k": None,
                            }
                        )  # fmt: skip
    for name, rows in (("steps", steps), ("evaluations", evaluations)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
