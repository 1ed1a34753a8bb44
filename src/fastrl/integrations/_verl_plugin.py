"""Let plain `python -m verl.trainer.main_ppo +fastrl.tau=0.8` train with FastRL: verl's entry point `verl.plugins`.

verl imports this module in each of its processes while it is itself being imported, so nothing heavy happens here:
once verl's trainers are imported, each becomes one that builds FastRL's trainer where the configuration has a block
`fastrl`, and verl's own elsewhere. verl logs a plugin that fails at debug level only; `fastrl doctor` says whether this
one is in place, and a run that uses it prints "FastRL is active".
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

TRAINERS = "verl.trainer.ppo.v1"
STOCK = "_fastrl_stock"
"""Attribute of a trainer that chooses: verl's own."""


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds one module by the finders behind it, and acts when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_offer(module: ModuleType) -> None:
                execute(module)
                offer(module.trainer_base.TRAINER_REGISTRY)

            spec.loader.exec_module = execute_and_offer  # type: ignore[method-assign]
        return spec


def offer(registry: dict[str, type]) -> None:
    """Replace each trainer by one that looks at the configuration first."""
    for mode, host in list(registry.items()):
        registry[mode] = _choosing(host)


def _choosing(host: type) -> type:
    def build(cls: type, config: Any) -> Any:
        if config.get("fastrl") is None:
            return host(config=config)
        from fastrl.integrations.verl import with_fastrl

        return with_fastrl(host)(config=config)

    return type(host.__name__, (host,), {"__new__": build, STOCK: host})


def is_waiting_or_done() -> bool:
    """Whether this process offers FastRL to verl: after `import verl`, with the plug-in loaded by it."""
    if TRAINERS in sys.modules:
        registry = sys.modules[TRAINERS].trainer_base.TRAINER_REGISTRY
        return all(STOCK in vars(trainer) for trainer in registry.values())
    return any(isinstance(finder, _WhenImported) for finder in sys.meta_path)


if TRAINERS in sys.modules:
    offer(sys.modules[TRAINERS].trainer_base.TRAINER_REGISTRY)
else:
    sys.meta_path.insert(0, _WhenImported())
