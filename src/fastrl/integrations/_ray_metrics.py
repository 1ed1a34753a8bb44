"""Metrics of a Ray trainer (verl, EasyR1) over all rollouts, beside those over the trained ones."""

from collections.abc import Mapping
from typing import Any

_SHOWN_TWICE = ("critic/score/", "critic/rewards/", "critic/advantages/", "response_length/")


def all_and_trained(of_all: Mapping[str, Any], of_trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's metrics of data over all rollouts; those of the trained ones go under `fastrl/trained/`."""
    trained = {f"fastrl/trained/{name}": of_trained[name] for name in of_all if name.startswith(_SHOWN_TWICE)}
    return {**of_all, **trained}
