"""What a run leaves behind in `output_dir/fastrl/`, beside the trainer's own checkpoints and reports.

    run.json            settings of FastRL and of the trainer that decide what was trained, versions, ranks
    metrics.jsonl       one line per training log: the step and all metrics of TRL and FastRL
    evaluations.jsonl   one line per evaluation
    rollouts.jsonl      with `trace: true`: a record of every rollout and its fate (see `fastrl.trace`)

A resumed run goes on with these files: lines of steps that it does again are removed first.
"""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback

from fastrl.method import FastRL
from fastrl.trace import forget_steps, write_rollouts
from fastrl.types import Group, Selection

_PACKAGES = (
    "fastrl-grpo",
    "numpy",
    "trl",
    "transformers",
    "accelerate",
    "torch",
    "datasets",
    "peft",
    "vllm",
    "deepspeed",
)
_SETTINGS = (
    "loss_type", "importance_sampling_level", "beta", "epsilon", "epsilon_high", "scale_rewards", "num_generations",
    "num_iterations", "steps_per_generation", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "max_completion_length", "temperature", "max_steps", "num_train_epochs", "seed", "use_vllm",
)  # fmt: skip


class RunFolder(TrainerCallback):
    """Writes the run folder on the main process.

    Args:
        output_dir: The trainer's.
        method: Whose settings and steps are recorded.
        num_ranks: World size.
        is_main: Whether this process writes.
    """

    def __init__(self, output_dir: str | Path, method: FastRL, *, num_ranks: int, is_main: bool) -> None:
        self.folder = Path(output_dir) / "fastrl"
        self.method = method
        self.num_ranks = num_ranks
        self.is_main = is_main

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            forget_steps(self.folder / name, from_step=state.global_step + 1)
        forget_steps(self.folder / "rollouts.jsonl", from_step=self.method.step)
        self._write("run.json", json.dumps(self._description(args), indent=2) + "\n")

    def _description(self, args: Any) -> dict[str, Any]:
        return {
            "fastrl": self.method.config.to_dict(),
            "trainer": {name: getattr(args, name) for name in _SETTINGS},
            "num_processes": self.num_ranks,
            "versions": {"python": platform.python_version(), **_versions()},
        }

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self.is_main or not logs or "train_runtime" in logs:  # the summary of a run is no step
            return
        is_evaluation = any(name.startswith("eval_") for name in logs)
        row = {"step": state.global_step, **{name: _plain(value) for name, value in logs.items()}}
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ("evaluations.jsonl" if is_evaluation else "metrics.jsonl")
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def write_rollouts(self, groups: Sequence[Group], selections: Sequence[Selection], *, step: int) -> None:
        """Append the records of a step, if the settings ask for them."""
        if self.is_main and self.method.config.trace:
            write_rollouts(self.folder / "rollouts.jsonl", groups, selections, step=step)

    def _write(self, name: str, text: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / name)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


MODEL_CARD = """
## FastRL

This model was trained with [FastRL](https://pypi.org/project/fastrl-grpo): rollouts were pruned by advantage and
similarity after their rewards were known, and sampled as often as recent pruning showed to be worth their cost, with
these settings.

```yaml
{settings}```

```bibtex
@article{{yang2026learn,
    title        = {{Learn from the Gap: Differential-Aware Advantage Pruning with Adaptive Rollout Sampling for GRPO}},
    author       = {{Yang, J. and Yang, Z. and Zhang, X. and Chen, D. and Chen, X. and Su, T. and Lu, H. and
                     Guan, Q. and Tang, K. and Wang, C.}},
    year         = {{2026}},
    eprint       = {{arXiv:2609.36932}},
}}
```
"""


def model_card_section(settings: Mapping[str, Any]) -> str:
    """Return what a model card says of FastRL: the method, its settings, and how to cite it."""
    return MODEL_CARD.format(settings=yaml.safe_dump(dict(settings), sort_keys=False))
