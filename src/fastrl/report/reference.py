"""Pages of the documentation that are written from the code: all settings, and all metrics.

`python -m fastrl.report.reference docs` writes them.
"""

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastrl.budgets import BUDGETS
from fastrl.config import FastRLConfig
from fastrl.metric_keys import ENGINES, METRICS, PREFIX, Metric
from fastrl.pruners import PRUNERS
from fastrl.types import ConfigError

SETTINGS: dict[str, tuple[str, ...]] = {
    "Which rollouts are kept": (
        "pruner", "tau", "similarity", "ngram", "compare", "advantage_tol", "representative", "per_cluster",
        "keep_share", "zero_variance", "outcome_key",
    ),
    "What a survivor weighs": ("weighting", "match_weights", "denominator"),
    "How many rollouts are sampled": (
        "budget", "min_rollouts", "max_rollouts", "initial_rollouts", "rollout_cost", "refill", "max_refills",
    ),
    "How the engine trains on them": ("align", "micro_batches", "updates", "share_prompt"),
    "The run": ("max_empty_steps", "trace", "seed"),
}  # fmt: skip
"""All settings by what they decide, in the order of the page."""

_MORE: dict[str, str] = {
    "pruner": "[MDAP](method.md#mdap-which-rollouts-eq-4-9), [experimental](methods.md#experimental-pruners), "
    "[peers](methods.md#peers)",
    "similarity": "[similarities](methods.md#similarities)",
    "weighting": "[unbiased MDAP](methods.md#unbiased-mdap)",
    "denominator": "[TRL](integrations/trl.md#what-the-loss-divides-by), "
    "[verl](integrations/verl.md#what-the-loss-divides-by), [EasyR1](integrations/easyr1.md#what-the-loss-divides-by)",
    "budget": "[ARS](method.md#ars-how-many-rollouts-eq-10-14), [others](methods.md#budgets)",
    "refill": "[refill](methods.md#refill)",
    "align": "[alignment](method.md#alignment)",
    "micro_batches": "[several processes](integrations/trl.md#several-processes)",
    "updates": "[mini-batches in verl](integrations/verl.md#mini-batches)",
    "share_prompt": "[a prompt once per group](performance.md)",
    "max_empty_steps": "[R10](reliability.md#r10-a-run-without-signal-stops-with-an-explanation)",
    "trace": "[the run folder](integrations/trl.md#the-run-folder)",
}
"""Where more is said of a setting."""

_REFUSED: tuple[dict[str, Any], ...] = (
    {"min_rollouts": 6, "max_rollouts": 4},
    {"initial_rollouts": 16, "max_rollouts": 8},
    {"refill": "kept"},
    {"weighting": 1.0},
    {"weighting": 1.0, "align": "dummy"},
)
"""One example of each combination that `FastRLConfig` refuses."""

_WRITTEN = "<!-- Written by `python -m fastrl.report.reference docs`: change the code, not this page. -->\n\n"


def configuration_page() -> str:
    """Return the page of all settings: type, default, allowed values, meaning, and who reads each."""
    fields = {field.name: field for field in dataclasses.fields(FastRLConfig)}
    texts = argument_texts(FastRLConfig)
    parts = [
        f"{_WRITTEN}# Configuration\n\n",
        "Every field of `FastRLConfig`; in a recipe it is a key of the `fastrl:` block, in verl `+fastrl.<key>`. "
        "None given is the published setting. [The method](method.md) and [beyond the paper](methods.md) say what "
        "the words mean; `fastrl config --print-defaults` prints all settings as YAML.\n",
    ]
    for title, names in SETTINGS.items():
        parts.append(f"\n## {title}\n")
        parts += [_setting(fields[name], texts[name]) for name in names]
    return "".join([*parts, "\n", _refusals()])


def argument_texts(kind: type) -> dict[str, str]:
    """Return the text of each argument in the docstring of a class, on one line."""
    section = (inspect.getdoc(kind) or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _setting(field: dataclasses.Field, text: str) -> str:
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    facts = [f"`{kind}`, default `{_yaml(field.default)}`"]
    if field.name in FastRLConfig._choices:
        facts.append("one of " + ", ".join(f"`{choice}`" for choice in FastRLConfig._choices[field.name]))
    if field.name in FastRLConfig._ranges:
        low, high, reason = FastRLConfig._ranges[field.name]
        facts.append(f"from {_number(low)} to {_number(high)}: {reason}")
    readers = [
        f"`{what}: {name}`"
        for what, registry in (("pruner", PRUNERS), ("budget", BUDGETS))
        for name, reader in registry.items()
        if field.name in reader.options and field.name != "seed"  # which seeds everything
    ]
    if readers:
        facts.append("read by " + ", ".join(readers))
    if field.name in _MORE:
        facts.append(f"more: {_MORE[field.name]}")
    listed = "".join(f"- {fact}\n" for fact in facts)
    return f"\n### `{field.name}`\n\n{text}\n\n{listed}"


def _yaml(value: Any) -> str:
    """A default as it is written in a recipe: 0.8, null, false, mdap."""
    return value if isinstance(value, str) else json.dumps(value)


def _number(value: float) -> str:
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:g}"


def _refusals() -> str:
    """The errors of combinations that cannot work, as the code words them."""
    lines = [
        "## What is refused\n\n"
        "An unknown key, a wrong type, a value out of range: a `ConfigError` that says the value, the rule, the reason "
        "and the remedy. So are these combinations; what one engine cannot do is on "
        "[its page](integrations/trl.md).\n\n| settings | error |\n|---|---|\n"
    ]
    for settings in _REFUSED:
        written = ", ".join(f"`{name}: {value}`" for name, value in settings.items())
        lines.append(f"| {written} | {_cell(_error_of(settings))} |\n")
    return "".join(lines)


def _error_of(settings: Mapping[str, Any]) -> str:
    try:
        FastRLConfig.from_dict(settings)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{settings} is refused no longer")


def metrics_page() -> str:
    """Return the page of all metrics: key, meaning, unit, and the engines that log it."""
    parts = [
        f"{_WRITTEN}# Metrics\n\n",
        f"What FastRL adds to the engine's own metrics, through [the engine's own reporting](tracking.md), all under "
        f"`{PREFIX}`. A share lies in [0, 1]. In TRL a value is the mean since the last log. Rewards "
        "and lengths that the engines log themselves are over all rollouts; what their losses report (entropy, KL, "
        "clip ratios) is over survivors.\n",
    ]
    for title, metrics in METRICS.items():
        parts.append(
            f"\n## {title}\n\n| key (`{PREFIX}...`) | meaning | unit | {' | '.join(ENGINES)} |\n"
            f"|---|---|---|{':-:|' * len(ENGINES)}\n"
        )
        parts += [_metric(metric) for metric in metrics]
    return "".join(parts)


def _metric(metric: Metric) -> str:
    meaning = f"{metric.meaning} (`{metric.when}`)" if metric.when else metric.meaning
    marks = " | ".join("yes" if engine in metric.engines else "-" for engine in ENGINES)
    return f"| `{metric.key}` | {_cell(meaning)} | {metric.unit} | {marks} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"configuration.md": configuration_page, "metrics.md": metrics_page}
"""File names of the written pages, and what writes each."""


def write_pages(folder: Path) -> None:
    """Write all pages into the folder of the documentation."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
