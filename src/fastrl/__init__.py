"""FastRL: GRPO-family training on the rollouts that teach something.

Importing this package costs numpy only; each name below is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastrl.config import FastRLConfig as FastRLConfig
    from fastrl.method import FastRL as FastRL
    from fastrl.method import select as select
    from fastrl.method import summarize as summarize
    from fastrl.trace import read_rollouts as read_rollouts
    from fastrl.trace import write_rollouts as write_rollouts
    from fastrl.types import ConfigError as ConfigError
    from fastrl.types import FastRLError as FastRLError
    from fastrl.types import Group as Group
    from fastrl.types import GroupError as GroupError
    from fastrl.types import NoSignalError as NoSignalError
    from fastrl.types import Selection as Selection
    from fastrl.types import StateError as StateError

__version__ = "0.1.0"

_HOME = {
    "ConfigError": "types",
    "FastRL": "method",
    "FastRLConfig": "config",
    "FastRLError": "types",
    "Group": "types",
    "GroupError": "types",
    "NoSignalError": "types",
    "Selection": "types",
    "StateError": "types",
    "read_rollouts": "trace",
    "select": "method",
    "summarize": "method",
    "write_rollouts": "trace",
}
__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastrl' has no attribute {name!r}")
    return getattr(import_module(f"fastrl.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
