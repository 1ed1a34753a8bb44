"""Recipes: TRL's own GRPOConfig keys at the top level, a `fastrl:` block, a `task:` block, `baseline:`."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.bench.tasks import Task, TestbedTask, parse_task
from fastrl.config import FastRLConfig, did_you_mean, merge, parse_yaml, read_yaml
from fastrl.types import ConfigError

if TYPE_CHECKING:
    from trl import GRPOConfig

OWN_KEYS = ("algorithm", "baseline", "task", "fastrl")
RUNNER_KEYS = {
    "output_dir": "every run gets a folder of its own; choose it with --out",
    "logging_steps": "the figure and the table need every step, so it is 1",
    "remove_unused_columns": "rewards read the columns of the data set, so it is false",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A validated recipe.

    Args:
        name: Names the run folder.
        trainer: Keys of TRL's GRPOConfig.
        task: What is trained on, see `fastrl.bench.tasks`.
        fastrl: Settings of the FastRL run.
        baseline: Train with stock TRL first, for comparison.
        algorithm: What tables call it; None = TRL's name of the loss.
    """

    name: str
    trainer: Mapping[str, Any]
    task: Task = field(default_factory=TestbedTask)
    fastrl: FastRLConfig = field(default_factory=FastRLConfig)
    baseline: bool = True
    algorithm: str | None = None

    @property
    def seed(self) -> int:
        return int(self.trainer.get("seed", 42))

    def replace(self, **trainer: Any) -> "Recipe":
        """The same recipe with other trainer keys."""
        return dataclasses.replace(self, trainer={**self.trainer, **trainer})

    def to_dict(self) -> dict[str, Any]:
        """The recipe as it would be written down, with the defaults of FastRL and of the task spelled out."""
        return {
            "algorithm": self.algorithm,
            "baseline": self.baseline,
            "task": dataclasses.asdict(self.task),
            **self.trainer,
            "fastrl": self.fastrl.to_dict(),
        }

    def grpo_config(self, output_dir: str | Path) -> "GRPOConfig":
        """Build TRL's configuration. What the recipe leaves open is set for this machine.

        Raises:
            ConfigError: TRL rejects the values; its message is kept.
        """
        import torch
        from trl import GRPOConfig

        has_accelerator = torch.accelerator.is_available()
        settings = {
            "use_cpu": not has_accelerator,
            "dataloader_pin_memory": has_accelerator,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            **self.trainer,
            "output_dir": str(output_dir),
            "logging_steps": 1,
            "remove_unused_columns": False,
        }
        try:
            return GRPOConfig(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.name}: TRL does not accept these settings: {error}") from error


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, changes: Sequence[str | Path] = ()
) -> Recipe:
    """Read a recipe file, change it by other files, and apply `key=value` overrides.

    Args:
        path: YAML file; `base:` in it names the files that it builds on (`fastrl.config.read_yaml`).
        changes: YAML files that change the recipe, the last one most; their names become part of its name.
        overrides: Such as "learning_rate=1e-5" or "fastrl.tau=0.6"; values are read as YAML.

    Raises:
        ConfigError: no such file, not YAML, an unknown key, or a value that cannot work.
    """
    content = read_yaml(path)
    for change in changes:
        content = merge(content, read_yaml(change))
    for override in overrides:
        _apply(content, override)
    return parse_recipe(content, name="-".join(Path(file).stem for file in (path, *changes)))


def check_file(path: str | Path) -> dict[str, Any]:
    """Validate a recipe (a file with a `task:` block), or a file of FastRL settings, and spell it out.

    A file with a `fastrl:` block and no `task:` belongs to a script of the user's: only the block is checked.
    """
    content = read_yaml(path)
    if "task" not in content:
        return FastRLConfig.from_dict(content.get("fastrl", content)).to_dict()
    recipe = parse_recipe(content, name=Path(path).stem)
    recipe.grpo_config("unused")
    return recipe.to_dict()


def parse_recipe(content: Mapping[str, Any], *, name: str) -> Recipe:
    """Validate the content of a recipe file."""
    trainer = {key: value for key, value in content.items() if key not in OWN_KEYS}
    _check_trainer_keys(trainer)
    baseline = content.get("baseline", True)
    if not isinstance(baseline, bool):
        raise ConfigError(f"baseline: {baseline!r} is neither true nor false.")
    algorithm = content.get("algorithm")
    if algorithm is not None and not isinstance(algorithm, str):
        raise ConfigError(f"algorithm: {algorithm!r} is no name, such as GRPO.")
    return Recipe(
        name=name,
        trainer=trainer,
        task=parse_task(_block(content, "task")),
        fastrl=FastRLConfig.from_dict(_block(content, "fastrl")),
        baseline=baseline,
        algorithm=algorithm,
    )


def _check_trainer_keys(trainer: Mapping[str, Any]) -> None:
    from trl import GRPOConfig

    names = [f.name for f in dataclasses.fields(GRPOConfig)]
    for key in trainer:
        if key in RUNNER_KEYS:
            raise ConfigError(f"{key} is set by the runner: {RUNNER_KEYS[key]}. Remove it from the recipe.")
        if key in names:
            continue
        if key in {f.name for f in dataclasses.fields(FastRLConfig)}:
            raise ConfigError(f"{key!r} is a setting of FastRL: write it under `fastrl:` (fastrl.{key}).")
        raise ConfigError(
            f"{key!r} is no key of a recipe.{did_you_mean(str(key), [*names, *OWN_KEYS])} At the top level are the "
            f"fields of TRL's GRPOConfig and {', '.join(OWN_KEYS)}."
        )


def _block(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    block = content.get(key)
    if block is not None and not isinstance(block, dict):
        raise ConfigError(f"{key}: expected a block of settings, found {block!r}.")
    return dict(block or {})


def _apply(content: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: expected key=value, such as --set fastrl.tau=0.6.")
    for depth, key in enumerate(keys[:-1], start=1):
        if content.get(key) is None:
            content[key] = {}
        content = content[key]
        if not isinstance(content, dict):
            raise ConfigError(f"--set {override}: {'.'.join(keys[:depth])} is a value, not a block.")
    content[keys[-1]] = parse_yaml(text, f"--set {override}")
