"""Estimates with their intervals, as cells of a table: {mean or another, low, high}; low is None without one."""

from collections.abc import Callable, Mapping
from typing import Any


def percent(estimate: Mapping[str, Any] | None, middle: str = "mean") -> str:
    """A share: 90.0% [88.0%, 92.0%]."""
    return _text(estimate, middle, lambda value: f"{value:.1%}")


def points(estimate: Mapping[str, Any] | None) -> str:
    """A difference of shares, in percentage points: -1.2 [-3.0, +0.4]."""
    return _text(estimate, "mean", lambda value: f"{100 * value:+.1f}")


def ratio(estimate: Mapping[str, Any]) -> str:
    """A speed-up: 2.00 [1.80, 2.20]."""
    return _text(estimate, "ratio", lambda value: f"{value:.2f}")


def _text(estimate: Mapping[str, Any] | None, middle: str, form: Callable[[float], str]) -> str:
    if estimate is None or estimate[middle] is None:
        return "-"
    if estimate["low"] is None or estimate["high"] is None:
        return form(estimate[middle])
    return f"{form(estimate[middle])} [{form(estimate['low'])}, {form(estimate['high'])}]"
