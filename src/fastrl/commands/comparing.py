"""The command that trains many methods, and compares them."""

from pathlib import Path
from typing import Annotated, Literal

import tyro


def compare(
    recipe: tyro.conf.Positional[Path],
    /,
    methods: tuple[str, ...] = ("grpo", "fastrl", "unbiased"),
    losses: tuple[str, ...] = ("grpo",),
    seeds: int = 5,
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = (),
    jobs: int = 1,
    clock: Literal["wall", "processor"] = "wall",
    targets: tuple[float, ...] = (0.6, 0.8),
    out: Path | None = None,
) -> int:
    """Train losses x methods x seeds of a recipe, and compare them: tables, tidy files. Run it again to go on.

    Args:
        recipe: YAML file, as for `fastrl train`.
        methods: The first is the baseline. Of grpo (stock TRL), shared, fastrl, unbiased, without_mdap, without_ars,
            cppo, pods, greso, dapo_dynamic, random25, random50, random75, advantage_only, 2grpo, fixed_g4, fixed_g;
            with changes such as fastrl:tau=0.4; or YAML files with a fastrl block.
        losses: Of grpo, dapo, gspo.
        seeds: How many; the same for all methods.
        set: Change settings of the recipe: key=value.
        jobs: Cells at once, each in a process of its own; set task.num_threads so that they do not share cores.
        clock: What speed is measured in: seconds, or processor seconds where the machine has other work.
        targets: Accuracies whose times are compared, beside the baseline's final one.
        out: Folder of the comparison. Default: runs/compare-<recipe>.
    """
    from rich.console import Console

    from fastrl.bench.compare import compare as run
    from fastrl.bench.compare import plan
    from fastrl.bench.recipe import read_recipe
    from fastrl.report.comparison import comparison_markdown, comparison_tables
    from fastrl.report.comparison_figure import draw_comparison
    from fastrl.report.console import CellProgress

    resolved = read_recipe(recipe, [override for group in set for override in group])
    out = out or Path("runs") / f"compare-{resolved.name}"
    matrix = plan(resolved, methods=methods, losses=losses, num_seeds=seeds, clock=clock, targets=targets)
    console = Console()
    result = run(matrix, out=out, jobs=jobs, say=CellProgress(console))
    for table in comparison_tables(result):
        console.print(table)
    (out / "tables.md").write_text(comparison_markdown(result), encoding="utf-8")
    for loss in losses:
        if result["tables"][loss]:
            draw_comparison(out, result, loss)
    cells = result["cells"]
    console.print(
        f"{cells['finished']} of {cells['planned']} cells, {len(cells['failed'])} failed: {out}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    return int(cells["finished"] < cells["planned"])
