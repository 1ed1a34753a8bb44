"""A tiny real vision-language model with a warm-started checkpoint, trained and evaluated on a CPU."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrl.testbed.evaluation import evaluate, pass_at
    from fastrl.testbed.model import checkpoint_path, cpu_settings, load

__all__ = ["checkpoint_path", "cpu_settings", "evaluate", "load", "pass_at"]

_HOME = {
    "checkpoint_path": "model",
    "cpu_settings": "model",
    "evaluate": "evaluation",
    "load": "model",
    "pass_at": "evaluation",
}


def __getattr__(name: str) -> object:
    """Import torch and transformers when something is asked for, not before."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"fastrl.testbed.{_HOME[name]}")
    except ImportError as error:
        raise ImportError(
            f'fastrl.testbed needs more packages: pip install "fastrl-grpo[trl]" ({error})'
        ) from error
    return getattr(module, name)
