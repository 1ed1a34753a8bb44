"""The tables of a comparison, on the console and as markdown."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fastrl.report.estimates import percent, points, ratio

HEADER = (
    "method", "accuracy, sampled", "accuracy, greedy", "difference, sampled [95 %]", "speed-up, equal updates [95 %]",
    "to the final accuracy, sampled [95 %]", "never", "kept", "G_t", "rows / update",
)  # fmt: skip
HEADER_MORE = (
    "method", "IQM, sampled [95 %]", "area, sampled [95 %]", "pass@k", "entropy at the end",
    "tokens trained / generated", "generation", "old and reference", "update", "s / update",
)  # fmt: skip


def comparison_tables(result: Mapping[str, Any]) -> list[Table]:
    """Build one table for each loss of a compare.json, for 80 columns; the markdown says more."""
    found = []
    for loss in result["losses"]:
        table = Table(
            title=f"{result['recipe']}, {loss}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("", no_wrap=True)
        for name in ("sampled", "greedy", "equal updates", "to its accuracy", "kept", "G_t"):
            table.add_column(name, justify="right", no_wrap=True)
        for method in result["methods"]:
            row = result["tables"][loss].get(method["key"])
            if row is not None:
                table.add_row(method["key"], *_short(row))
        found.append(table)
    return found


def _short(row: Mapping[str, Any]) -> Sequence[str]:
    sampled = row["speed"]["to_final_sampled"]
    reached = "-" if sampled["ratio"] is None else f"{sampled['ratio']:.2f}"
    never = f", {sampled['num_never']} never" if sampled["num_never"] else ""
    return (
        *(f"{row['final'][kind]['mean']:.1%}" for kind in ("sampled", "greedy")),
        ratio(row["speed"]["equal_updates"]),
        reached + never,
        f"{row['kept_share']:.0%}",
        f"{row['num_rollouts']:.1f}",
    )


def comparison_markdown(result: Mapping[str, Any]) -> str:
    """Write all tables of a compare.json as markdown, with what they mean and how they were made."""
    parts = []
    for loss in result["losses"]:
        parts.append(f"**{loss}**\n")
        parts.append(_markdown_table(HEADER, _rows(result, loss, _row)))
        parts.append(_markdown_table(HEADER_MORE, _rows(result, loss, _row_more)))
    return "\n".join([*parts, legend(result)]) + "\n"


def legend(result: Mapping[str, Any]) -> str:
    """What the columns mean, in one paragraph."""
    checks = "; ".join(
        f"{check['loss']}: {check['num_updates']} updates of {check['prompts_per_update']:g} prompts"
        for check in result["equal_updates"]
    )
    labels = {method["key"]: method["label"] for method in result["methods"]}
    clock = {
        "wall": "seconds of training",
        "processor": "processor seconds of training, which other work on the machine does not add to",
    }[result["clock"]]
    return (
        f"{result['num_seeds']} seeds; accuracies are the mean of a run's last three evaluations, their mean over "
        f"seeds and their range. Compared with {labels[result['baseline']]}, paired by seed; intervals by an expanded "
        f"bootstrap over seeds. Time: {clock}; evaluations are not counted. Never: seeds that did not reach the "
        f"baseline's final accuracy, left out of that ratio. Area: the mean accuracy over the baseline's training "
        f"time. Entropy: of the rollouts that are trained on, so methods that prune show another sample. Generation, "
        f"old and reference log-probs, update: shares of the training time. Equal updates: {checks}."
    )


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _rows(
    result: Mapping[str, Any], loss: str, row: Callable[[str, Mapping[str, Any]], Sequence[str]]
) -> list[Sequence[str]]:
    table = result["tables"][loss]
    return [
        row(method["label"], table[method["key"]]) for method in result["methods"] if method["key"] in table
    ]


def _row(label: str, row: Mapping[str, Any]) -> Sequence[str]:
    is_baseline = row["difference"] is None
    sampled = row["speed"]["to_final_sampled"]
    return (
        label,
        *(_accuracy(row["final"][kind]) for kind in ("sampled", "greedy")),
        "-" if is_baseline else points(row["difference"].get("sampled")),
        "1" if is_baseline else ratio(row["speed"]["equal_updates"]),
        "1" if is_baseline else ratio(sampled),
        f"{sampled['num_never']} of {row['num_seeds']}",
        f"{row['kept_share']:.0%}",
        f"{row['num_rollouts']:.1f}",
        f"{row['rows_per_update']:.0f}",
    )


def _row_more(label: str, row: Mapping[str, Any]) -> Sequence[str]:
    """Where the time goes, and what the main table has no room for."""
    pass_at_k, tokens, stages = row["final"].get("pass_at_k"), row["tokens"], row["stage_s"]
    total = sum(stages.values())
    return (
        label,
        percent(row["final"]["sampled"], "iqm"),
        percent(row["area"]["sampled"]),
        "-" if pass_at_k is None else f"{pass_at_k['mean']:.1%}",
        "-" if row["entropy_final"] is None else f"{row['entropy_final']:.3f}",
        f"{tokens['trained'] / tokens['generated']:.0%}",
        *(f"{stages[stage] / total:.0%}" for stage in ("generation", "old_ref", "update")),
        f"{row['step_s']:.2f}",
    )


def _accuracy(final: Mapping[str, Any]) -> str:
    return f"{final['mean']:.1%} ({final['min']:.1%} - {final['max']:.1%})"
