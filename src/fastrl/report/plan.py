"""`fastrl train RECIPE --dry-run`: the plan of a run as one table."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def plan_table(plan: Mapping[str, Any]) -> Table:
    """Build the table of `fastrl.bench.plan.plan`: what, how much."""
    table = Table(show_header=False, title="Plan (nothing was loaded or downloaded)", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    rows, batch, steps, tokens = (plan[key] for key in ("rows", "batch", "steps", "tokens"))
    how = "" if rows["counted"] else " (published, not counted)"
    table.add_row(
        "rows: training, held-out", f"{rows['train']:,}, {rows['held_out']:,}{how}", end_section=True
    )

    table.add_row("processes", f"{batch['processes']}")
    rollouts = (
        f"{batch['prompts_per_round']:,} prompts x {batch['num_rollouts']} = {batch['rollouts_per_round']:,}"
    )
    table.add_row("a round", f"{rollouts} rollouts at the most")
    table.add_row(
        "updates per round", f"{batch['updates_per_round']:g} of {batch['rollouts_per_update']:,} rollouts"
    )
    passes = f"{batch['micro_batches_per_update']} x {batch['rows_per_micro_batch']} rows per process"
    pruned = f"{batch['micro_batches_per_update_pruned']} at {batch['kept_share']:.0%} kept"
    table.add_row("micro-batches per update", f"{passes}; {pruned}", end_section=True)

    left = steps["prompts_left_out_per_epoch"]
    table.add_row(
        "rounds per epoch", f"{steps['rounds_per_epoch']:,}" + (f", {left} prompts left out" if left else "")
    )
    table.add_row(
        "optimizer steps", f"{steps['optimizer_steps']:,} in {steps['rounds']:,} rounds", end_section=True
    )

    table.add_row("tokens sampled per round", f"at most {tokens['sampled_at_most']:,}")
    trained = f"{tokens['trained_at_most']:,}; {tokens['trained_at_most_pruned']:,} at {batch['kept_share']:.0%} kept"
    table.add_row("tokens trained per round", f"at most {trained}")
    if tokens["image_at_most"]:
        table.add_row("tokens of an image", f"at most {tokens['image_at_most']:,}")
    _memory(table, plan["memory"])
    return table


def _memory(table: Table, memory: Mapping[str, Any] | None) -> None:
    table.add_section()
    if memory is None:
        table.add_row("memory", "unknown: no copy of the model here, and no task.parameters")
        return
    table.add_row("parameters of the model", f"{memory['parameters'] / 1e9:.3g} billion")
    for name, size in memory["parts"].items():
        table.add_row(f"memory per process: {name}", f"{size:,.2f} GiB")
    table.add_row("their sum, with full sharding", f"{memory['total']:,.2f} GiB, and generation beside it")
