"""How many rollouts each prompt gets: decided from past steps only.

A budget has `plan(prompt_ids, step) -> counts_P` (0 = skip this prompt), `observe(groups, selections, seconds=...)`,
`weights(counts_P)`, `state_dict()`, `load_state_dict()` and `metrics()`. To add one: a class in a module here, a line
in `BUDGETS`; the contract tests then cover it.
"""

from fastrl.budgets.ars import ARS
from fastrl.budgets.base import Budget, FixedBudget, check_keys, check_unchanged
from fastrl.budgets.discovery import Discovery
from fastrl.budgets.greso import GRESO
from fastrl.budgets.per_prompt import PerPrompt

__all__ = [
    "ARS",
    "BUDGETS",
    "GRESO",
    "REMEMBERING",
    "Budget",
    "Discovery",
    "FixedBudget",
    "PerPrompt",
    "check_keys",
    "check_unchanged",
]

BUDGETS: dict[str, type[Budget]] = {
    "fixed": FixedBudget,
    "ars": ARS,
    "discovery": Discovery,
    "per_prompt": PerPrompt,
    "greso": GRESO,
}

REMEMBERING = ("per_prompt", "greso")
"""Budgets that need to recognise a prompt in a later epoch, and may skip it."""
