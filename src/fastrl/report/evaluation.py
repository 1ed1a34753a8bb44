"""`fastrl eval` as tables: one per benchmark, the base model first."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from fastrl.report.estimates import percent, points


def evaluation_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Build a table per benchmark of `fastrl.bench.evaluation.evaluate_run`."""
    for name, found in result["benchmarks"].items():
        models = found["models"]
        measures = list(dict.fromkeys(key for values in models.values() for key in _measures(values)))
        table = Table(title=f"{name}: {found['num']} problems", title_justify="left")
        table.add_column("model", no_wrap=True)
        for measure in measures:
            table.add_column(measure, justify="right")
        table.add_column("no answer", justify="right")
        table.add_column("in format", justify="right")
        for label, values in models.items():
            cells = [percent(values.get(measure)) for measure in measures]
            no_answer = values["kinds"].get("no_answer", 0.0) + values["kinds"].get(
                "unparsable_prediction", 0.0
            )
            in_format = values.get("in_format")
            table.add_row(label, *cells, f"{no_answer:.1%}", "-" if in_format is None else f"{in_format:.1%}")
        for label, values in found["gain"].items():
            table.add_row(f"{label} - base", *(points(values.get(measure)) for measure in measures), "", "")
        judged = {label: scores for label, scores in found.get("judged", {}).items() if scores}
        if judged:
            table.caption = "by lmms-eval's judge: " + "; ".join(f"{k} {v}" for k, v in judged.items())
        yield table


def _measures(values: Mapping[str, Any]) -> list[str]:
    return [key for key, value in values.items() if isinstance(value, Mapping) and "mean" in value]
