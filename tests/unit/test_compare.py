"""`fastrl compare` without training: a made-up trainer whose runs are known. What is resumed, refused, and reported."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastrl.bench import cells, compare, workers
from fastrl.bench.recipe import Recipe, read_recipe
from fastrl.bench.training import Method, MethodRun
from fastrl.types import ConfigError

pytestmark = pytest.mark.trl
ROOT = Path(__file__).parents[2]
NUM_STEPS, EVERY = 8, 2
METHODS = ("grpo", "fastrl", "unbiased", "fixed_g")
SPEED = {"grpo": 1.0, "fastrl": 2.0, "unbiased": 4.0, "fixed_g": 1.0}
"""How much faster than stock each method is made up to be."""


class MadeUp:
    """Trains nothing: a run's rows are a function of (loss, method, seed). It may fail, or be interrupted."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, str, int]] = []
        self.fail: set[tuple[str, str, int]] = set()
        self.interrupt_at: int | None = None
        self.num_steps = {"grpo": NUM_STEPS}

    def __call__(
        self, recipe: Recipe, method: Method, *, seed: int, folder: Path, progress: Any = None
    ) -> MethodRun:
        key = (str(recipe.trainer["loss_type"]), method.key, seed)
        folder.mkdir(parents=True)  # refuses rows of an interrupted run
        if self.interrupt_at == len(self.trained):
            self.interrupt_at = None
            raise KeyboardInterrupt
        if key in self.fail:
            raise RuntimeError("out of memory\nat 0x7f")
        self.trained.append(key)
        num = self.num_steps.get(method.key, NUM_STEPS)
        second = (1 + seed / 10) / SPEED[method.key]
        num_rollouts = int({**recipe.trainer, **method.trainer}["num_generations"])
        metrics = [
            {
                "step": step,
                "train_s": step * second,
                "cpu_s": 2 * step * second,
                "step_s": second,
                "learning_rate": 1e-4,
                # As of the adapters: only the first update of a round tells what was sampled for it.
                "fastrl/num_rollouts/mean": (3.4 if method.key == "unbiased" else num_rollouts)
                if step % 2
                else None,
                "fastrl/rollouts": 16.0 * num_rollouts if step % 2 else 0.0,
                "fastrl/trained/rows": 8.0 * num_rollouts / SPEED[method.key],
                "fastrl/trained/tokens": 80.0 * num_rollouts / SPEED[method.key],
                "completions/mean_length": 10.0 if step % 2 else None,
                "entropy": 0.1,
                "fastrl/time/update_s": second / 2,
            }
            for step in range(1, num + 1)
        ]
        evaluations = [
            {
                "step": step,
                "train_s": step * second,
                "cpu_s": 2 * step * second,
                "greedy": min(0.9, 0.3 + step / 10),
                "sampled": min(0.8, 0.3 + step / 10) + seed / 100,
                "format": 1.0,
                **({"pass_at_k": 0.95} if step == num else {}),
            }
            for step in range(0, num + 1, EVERY)
        ]
        return MethodRun(method=method, seed=seed, folder=folder, metrics=metrics, evaluations=evaluations)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    trainer = MadeUp()
    monkeypatch.setattr(cells, "train_method", trainer)
    monkeypatch.setattr(workers, "warm_up", lambda recipe: None)
    return trainer


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return read_recipe(ROOT / "recipes/testbed/study.yaml")


def matrix(recipe: Recipe, methods: tuple[str, ...] = METHODS, **changes: Any) -> compare.Matrix:
    options = {"losses": ("grpo", "dapo"), "num_seeds": 3, **changes}
    return compare.plan(recipe, methods=methods, **options)


def without_machine(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "versions"}


def test_the_tables_hold_what_the_runs_were(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    result = compare.compare(matrix(recipe), out=tmp_path)
    assert result["cells"] == {"planned": 24, "finished": 24, "failed": [], "not_run": [], "ended": True}
    row = result["tables"]["dapo"]["unbiased"]
    assert row["num_seeds"] == 3
    assert row["final"]["greedy"]["values"] == pytest.approx([(0.7 + 0.9 + 0.9) / 3] * 3)
    assert row["final"]["sampled"]["values"][2] == pytest.approx((0.7 + 0.8 + 0.8) / 3 + 0.02)
    assert row["final"]["pass_at_k"]["mean"] == pytest.approx(0.95)
    assert row["difference"]["greedy"] == pytest.approx({"mean": 0.0, "low": 0.0, "high": 0.0})
    assert row["speed"]["equal_updates"]["ratio"] == pytest.approx(4.0)
    assert row["speed"]["to_final_greedy"]["ratio"] == pytest.approx(4.0)
    assert row["speed"]["to_fixed"]["0.6"]["num_never"] == 0
    assert row["num_rollouts"] == pytest.approx(3.4)
    assert row["rows_per_update"] == pytest.approx(16.0)
    assert row["tokens"]["generated"] == pytest.approx(4 * 16 * 8 * 10)
    assert row["stage_s"]["update"] == pytest.approx((1 + 1.1 + 1.2) / 3 / 4 / 2)
    assert result["tables"]["grpo"]["grpo"]["difference"] is None
    assert result["aggregate"]["fastrl"]["speed"]["equal_updates"]["num_pairs"] == 6
    assert json.loads((tmp_path / "compare.json").read_text()) == json.loads(json.dumps(result))


def test_the_processors_clock_gives_its_own_seconds(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    small = {"methods": ("grpo", "fastrl"), "losses": ("grpo",), "num_seeds": 2}
    wall = compare.compare(matrix(recipe, **small), out=tmp_path)
    processor = compare.compare(matrix(recipe, **small, clock="processor"), out=tmp_path)
    for method in ("grpo", "fastrl"):
        rows = [found["tables"]["grpo"][method] for found in (wall, processor)]
        assert rows[1]["train_s"]["mean"] == pytest.approx(2 * rows[0]["train_s"]["mean"])
        assert rows[1]["area"]["greedy"]["mean"] == pytest.approx(rows[0]["area"]["greedy"]["mean"])
    assert len(made_up.trained) == 4, "nothing was trained again"


def test_tidy_files_have_a_row_for_each_run_step_and_evaluation(
    made_up: MadeUp, recipe: Recipe, tmp_path: Path
):
    compare.compare(matrix(recipe), out=tmp_path)
    rows = {
        name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        for name in ("runs", "steps", "evaluations")
    }
    assert {name: len(content) for name, content in rows.items()} == {
        "runs": 24, "steps": 24 * NUM_STEPS, "evaluations": 24 * (NUM_STEPS // EVERY + 1),
    }  # fmt: skip
    last = [
        row for row in rows["evaluations"] if (row["method"], row["seed"], row["step"]) == ("fastrl", 0, 8)
    ]
    assert {row["loss"] for row in last} == {"grpo", "dapo"}
    assert last[0]["generated_rows"] == 4 * 16 * 8
    assert last[0]["trained_tokens"] == pytest.approx(8 * 80 * 8 / 2)


def test_g_is_fixed_at_the_mean_of_the_method_that_it_follows(
    made_up: MadeUp, recipe: Recipe, tmp_path: Path
):
    compare.compare(matrix(recipe), out=tmp_path)
    cell = json.loads((tmp_path / "cells/grpo/fixed_g-seed1.json").read_text())
    assert (cell["settings"]["num_generations"], cell["settings"]["per_device_train_batch_size"]) == (3, 24)


@pytest.mark.parametrize("at", [0, 1, 7, 17, 18, 23])
def test_interrupted_anywhere_it_gives_the_same(made_up: MadeUp, recipe: Recipe, tmp_path: Path, at: int):
    whole = compare.compare(matrix(recipe), out=tmp_path / "whole")
    made_up.trained.clear()
    made_up.interrupt_at = at
    with pytest.raises(KeyboardInterrupt):
        compare.compare(matrix(recipe), out=tmp_path / "parts")
    assert len(made_up.trained) == at
    parts = compare.compare(matrix(recipe), out=tmp_path / "parts")
    assert sorted(made_up.trained) == sorted(set(made_up.trained)), "a finished cell was run again"
    assert without_machine(parts) == without_machine(whole)
    for name in ("runs", "steps", "evaluations"):
        tables = [pq.read_table(tmp_path / folder / f"{name}.parquet") for folder in ("whole", "parts")]
        assert tables[0].equals(tables[1])


def test_a_cell_that_fails_loses_no_other(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    made_up.fail = {("grpo", "fastrl", 1), ("grpo", "unbiased", 0)}
    said = []
    result = compare.compare(
        matrix(recipe), out=tmp_path, say=lambda done, num, of: said.append((done.error, num, of))
    )
    assert [(f["method"], f["seed"]) for f in result["cells"]["failed"]] == [("unbiased", 0), ("fastrl", 1)]
    assert result["cells"]["failed"][0]["error"] == "RuntimeError: out of memory\nat 0x7f"
    assert result["cells"]["not_run"] == [["grpo", "fixed_g", 0]], "it waits for the cell that it follows"
    assert result["cells"]["finished"] == 21
    assert "Traceback" in (tmp_path / "cells/grpo/fastrl-seed1.failed.txt").read_text()
    assert result["tables"]["grpo"]["fastrl"]["num_seeds"] == 2
    assert len(said) == 23
    assert said[-1][1:] == (23, 24)
    made_up.fail = set()
    made_up.trained.clear()
    again = compare.compare(matrix(recipe), out=tmp_path)
    assert sorted(made_up.trained) == [("grpo", "fastrl", 1), ("grpo", "fixed_g", 0), ("grpo", "unbiased", 0)]
    assert again["cells"] == {"planned": 24, "finished": 24, "failed": [], "not_run": [], "ended": True}
    assert not list(tmp_path.rglob("*.failed.txt"))


def test_the_order_within_a_seed_is_drawn_and_repeats(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    for folder in ("one", "other"):
        compare.compare(matrix(recipe, methods=METHODS[:3]), out=tmp_path / folder)
    one, other = made_up.trained[:18], made_up.trained[18:]
    assert one == other
    assert [seed for _, _, seed in one] == sorted(seed for _, _, seed in one), "seeds stay outside"
    orders = {tuple((loss, method) for loss, method, of in one if of == seed) for seed in range(3)}
    assert len(orders) == 3


def test_seeds_can_be_added(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    compare.compare(matrix(recipe, num_seeds=2), out=tmp_path)
    made_up.trained.clear()
    compare.compare(matrix(recipe, num_seeds=3), out=tmp_path)
    assert {seed for _, _, seed in made_up.trained} == {2}


def test_cells_of_other_settings_are_refused_before_training(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    compare.compare(matrix(recipe, num_seeds=1), out=tmp_path)
    made_up.trained.clear()
    with pytest.raises(ConfigError, match=r"other settings \(learning_rate\)"):
        compare.compare(matrix(recipe.replace(learning_rate=1e-5), num_seeds=2), out=tmp_path)
    assert made_up.trained == []


def test_methods_with_other_updates_are_refused_before_training(recipe: Recipe, tmp_path: Path):
    path = tmp_path / "slower.yaml"
    path.write_text("learning_rate: 1.0e-5\nfastrl: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"slower differs from grpo in learning_rate: .* unequal updates"):
        matrix(recipe, methods=("grpo", str(path)))
    path.write_text("per_device_train_batch_size: 32\nfastrl: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts per round \(8, not 16\)"):
        matrix(recipe, methods=("grpo", str(path)))
    path.write_text("per_device_train_batch_size: 32\nsteps_per_generation: 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"updates per round \(4, not 2\)"):
        matrix(recipe, methods=("grpo", str(path)))


def test_a_run_that_stopped_early_is_refused_after_training(made_up: MadeUp, recipe: Recipe, tmp_path: Path):
    made_up.num_steps["fastrl"] = NUM_STEPS - 2
    with pytest.raises(ConfigError, match="fastrl, seed 0: 6 updates against 8"):
        compare.compare(matrix(recipe), out=tmp_path)
    checks = json.loads((tmp_path / "compare.json").read_text())["equal_updates"]
    assert [check["ok"] for check in checks] == [False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("grpo", "grpo")}, "one is named twice"),
        ({"methods": ("grpo", "fixed_g")}, "takes its G from unbiased"),
        ({"methods": ()}, "One of each at least"),
        ({"losses": ("gspoo",)}, "Did you mean 'gspo'"),
        ({"num_seeds": 0}, "0 seeds"),
    ],
)
def test_what_cannot_be_compared_is_refused(recipe: Recipe, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        matrix(recipe, **changes)


def test_no_job_is_refused(recipe: Recipe, tmp_path: Path):
    with pytest.raises(ConfigError, match="at least one cell"):
        compare.compare(matrix(recipe), out=tmp_path, jobs=0)
