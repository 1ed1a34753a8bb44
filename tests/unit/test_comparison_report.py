"""What `fastrl compare` shows: console, markdown and figure, from a comparison whose numbers are known."""

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from fastrl.report.comparison import comparison_markdown, comparison_tables
from fastrl.report.comparison_figure import draw_comparison


def speed(ratio: float | None, *, never: int = 0) -> dict[str, Any]:
    low, high = (None, None) if ratio is None else (0.9 * ratio, 1.1 * ratio)
    return {"ratio": ratio, "low": low, "high": high, "num_pairs": 3 - never, "num_never": never}


def row(accuracy: float, ratio: float | None, *, is_baseline: bool = False, never: int = 0) -> dict[str, Any]:
    final = {
        "mean": accuracy,
        "iqm": accuracy,
        "low": accuracy - 0.02,
        "high": accuracy + 0.02,
        "min": accuracy - 0.01,
        "max": accuracy + 0.01,
    }
    difference = {kind: {"mean": -0.012, "low": -0.03, "high": 0.004} for kind in ("greedy", "sampled")}
    return {
        "num_seeds": 3,
        "final": {"greedy": final, "sampled": final},
        "difference": None if is_baseline else difference,
        "speed": {"equal_updates": speed(2.0), "to_final_sampled": speed(ratio, never=never)},
        "kept_share": 0.25,
        "num_rollouts": 6.5,
        "rows_per_update": 16.0,
        "area": {"sampled": {"mean": 0.7, "low": None, "high": None}},
        "entropy_final": 0.0651,
        "tokens": {"generated": 4000.0, "trained": 1200.0},
        "stage_s": {"generation": 0.3, "old_ref": 0.1, "update": 0.5, "rest": 0.1},
        "step_s": 1.0,
    }


@pytest.fixture
def result() -> dict[str, Any]:
    return {
        "recipe": "study",
        "losses": ["grpo"],
        "clock": "processor",
        "num_seeds": 3,
        "baseline": "grpo",
        "methods": [
            {"key": "grpo", "label": "stock"},
            {"key": "a", "label": "ours"},
            {"key": "b", "label": "late"},
        ],
        "equal_updates": [{"loss": "grpo", "num_updates": 48, "prompts_per_update": 8.0}],
        "tables": {"grpo": {"grpo": row(0.9, 1.0, is_baseline=True), "a": row(0.88, None, never=3)}},
    }


def test_the_markdown_says_what_was_measured(result: dict[str, Any]):
    text = comparison_markdown(result)
    lines = text.splitlines()
    assert (
        "| stock | 90.0% (89.0% - 91.0%) | 90.0% (89.0% - 91.0%) | - | 1 | 1 | 0 of 3 | 25% | 6.5 | 16 |"
        in lines
    )
    assert "| stock | 90.0% [88.0%, 92.0%] | 70.0% | - | 0.065 | 30% | 30% | 10% | 50% | 1.00 |" in lines
    ours = next(line for line in lines if line.startswith("| ours"))
    assert "| -1.2 [-3.0, +0.4] | 2.00 [1.80, 2.20] | - | 3 of 3 |" in ours
    assert not [line for line in lines if line.startswith("| late")], "it has no cell yet"
    assert "48 updates of 8 prompts" in text
    assert "processor seconds" in text


def test_the_console_table_fits_80_columns(result: dict[str, Any]):
    console = Console(width=80, record=True, file=io.StringIO())
    for table in comparison_tables(result):
        console.print(table)
    text = console.export_text()
    assert "90.0%" in text
    assert "…" not in text


def test_the_figure_shows_every_method_that_has_cells(result: dict[str, Any], tmp_path: Path):
    rows = [
        {"loss": loss, "method": method, "seed": seed, "step": step, "train_s": 1.0, "cpu_s": step + seed / 10,
         "sampled": 0.4 + step / 100}
        for loss in ("grpo", "dapo") for method in ("grpo", "a") for seed in range(3) for step in (0, 8, 16)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "evaluations.parquet")
    files = draw_comparison(tmp_path, result, "grpo")
    assert [file.name for file in files] == ["figure-grpo.svg", "figure-grpo.png"]
    with Image.open(files[1]) as picture:
        assert len(picture.getcolors(maxcolors=1 << 24)) > 100
