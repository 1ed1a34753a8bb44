"""Whole runs of real verl on CPU processes, started as a user starts them."""

import json
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("verl")

import tiny_task
import verl_runs

from fastrl.bench.logs import find_log, read_log, whitespace_ids
from fastrl.trace import read_rollouts

pytestmark = pytest.mark.timeout(3 * verl_runs.LIMIT_S)

PRUNE = ["+fastrl.tau=0.9", "+fastrl.trace=true"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return tiny_task.make(tmp_path_factory.mktemp("task"))


def assert_pruned_and_in_step(run: verl_runs.Run, num_steps: int) -> None:
    assert len(run.steps) == num_steps
    assert "FastRL is active" in run.output
    assert all(
        kept < sampled
        for kept, sampled in zip(run["fastrl/trained/rows"], run["fastrl/rollouts"], strict=True)
    )
    # Sampler and actor agree on every token, after each transfer of weights.
    assert max(run["training/rollout_probs_diff_max"]) < 1e-5


def test_without_pruning_a_run_is_stock_verls(task, tmp_path):
    same = ["trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.optimizer=SGD"]
    stock = verl_runs.run(task, tmp_path / "stock", *same, module="verl.trainer.main_ppo")
    ours = verl_runs.run(task, tmp_path / "ours", *same, "+fastrl.pruner=none", "+fastrl.budget=fixed")
    for metric in ("critic/score/mean", "response_length/mean", "prompt_length/mean", "training/global_step"):
        assert ours[metric] == pytest.approx(stock[metric]), metric
    for metric in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert ours[metric] == pytest.approx(stock[metric], rel=1e-3, abs=1e-6), metric


def test_grpo_on_real_vllm_with_rollout_correction(task, tmp_path):
    pytest.importorskip("vllm")
    correction = [
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
    ]
    run = verl_runs.run(
        task, tmp_path / "run", "trainer.total_training_steps=3", *PRUNE, *correction, rollout="vllm"
    )
    assert_pruned_and_in_step(run, 3)
    assert run["rollout_corr/rollout_is_mean"] == pytest.approx([1.0] * 3, abs=1e-4)


GSPO_RUN = [
    *verl_runs.GSPO,
    *verl_runs.REFERENCE,
    *verl_runs.TWO_RANKS,
    # What is kept must not depend on the order of a group's rollouts: verl's sessions ask the sampler in any order, so
    # the same answers come back in another one.
    "+fastrl.pruner=none",
    "+fastrl.zero_variance=drop",
    "+fastrl.align=dummy",
    "+fastrl.trace=true",
    "+fastrl.budget=per_prompt",
    "+fastrl.initial_rollouts=3",
    "actor_rollout_ref.rollout.n=6",
    "data.shuffle=True",
    "trainer.total_training_steps=12",
    "trainer.total_epochs=3",
    "trainer.save_freq=1",
]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(task, tmp_path):
    """GSPO, reference KL, two ranks, a count per prompt; killed in the first epoch, resumed, through the third."""
    folder = f"trainer.default_local_dir={tmp_path}/checkpoints"
    resumed = [folder, "trainer.resume_mode=auto"]
    whole = verl_runs.run(task, tmp_path / "whole", *GSPO_RUN, f"trainer.rollout_data_dir={tmp_path}/dump")
    assert min(whole["fastrl/kept/frac"]) < 1
    assert max(whole["training/rollout_probs_diff_max"]) < 1e-5
    process = verl_runs.start(task, tmp_path / "first", *GSPO_RUN, *resumed)
    until = time.monotonic() + verl_runs.LIMIT_S
    while len(verl_runs.read(tmp_path / "first")) < 3 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    verl_runs.kill(process, tmp_path / "first")
    first = verl_runs.read(tmp_path / "first")
    assert 3 <= len(first) < 12, (tmp_path / "first" / "output.txt").read_text()[-3000:]
    rest = verl_runs.run(task, tmp_path / "rest", *GSPO_RUN, *resumed)
    assert rest.steps[-1]["step"] == 12
    by_step = {record["step"]: record for record in [*first, *rest.steps]}
    for record in whole.steps:
        again = by_step[record["step"]]
        for metric, value in record.items():
            if metric.startswith("fastrl/") and "/time/" not in metric:
                assert again[metric] == pytest.approx(value, nan_ok=True), (record["step"], metric)
        assert again["actor/grad_norm"] == pytest.approx(record["actor/grad_norm"], rel=1e-4)
    records = "checkpoints/fastrl/rollouts.jsonl"
    groups = [read_rollouts(path / records) for path in (tmp_path / "whole", tmp_path)]
    assert [(g.prompt_id, g.num_rollouts) for g in groups[0]] == [
        (g.prompt_id, g.num_rollouts) for g in groups[1]
    ]
    answers = [[sorted(map(list, group.tokens_G)) for group in run] for run in groups]
    assert answers[0] == answers[1]
    assert len({g.num_rollouts for g in groups[0]}) > 1  # the budget did give prompts different counts
    _assert_dump_is_whole(tmp_path / "dump", whole)


def _assert_dump_is_whole(folder: Path, run: verl_runs.Run) -> None:
    """verl's own dump of rollouts holds all of them, not only the survivors; `fastrl analyze` finds their groups."""
    lines = {int(path.stem): path.read_text().splitlines() for path in folder.glob("*.jsonl")}
    for step in run.steps:
        assert len(lines[step["step"]]) == step["fastrl/rollouts"]
        scores = [json.loads(line)["score"] for line in lines[step["step"]]]
        assert sum(scores) / len(scores) == pytest.approx(step["critic/score/mean"], abs=1e-6)
    found = {step.step: step for step in read_log(find_log(folder), whitespace_ids())}
    for step in run.steps:
        sizes = [group.num_rollouts for group in found[step["step"]].groups]
        assert sum(sizes) == step["fastrl/rollouts"]
        assert max(sizes) == step["fastrl/num_rollouts/max"]
        assert found[step["step"]].problems == {}


def test_colocated_async_training_leaves_no_dropped_row_in_the_queue(task, tmp_path, monkeypatch):
    monkeypatch.setitem(verl_runs.ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES", "cpu_verl,watch_queue")
    monkeypatch.setenv("FASTRL_TEST_QUEUE", os.fspath(tmp_path / "queue.jsonl"))
    run = verl_runs.run(
        task,
        tmp_path / "run",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.total_training_steps=4",
        *PRUNE,
        "+fastrl.budget=discovery",
        "+fastrl.rollout_cost=0.5",
    )
    assert len(run.steps) == 4
    assert max(run["fastrl/kept/frac"]) < 1
    left = [json.loads(line).get("train", 0) for line in (tmp_path / "queue.jsonl").read_text().splitlines()]
    # One batch of prompts is sampled ahead: 4 prompts and at most 16 rollouts. Dropped rows would add up.
    assert len(left) == 4
    assert max(left) <= 20


def test_rows_keep_their_images(tmp_path):
    """A tiny Qwen2.5-VL: sampler and actor agree on every token only if each survivor still has its own image."""
    task = tiny_task.make_with_images(tmp_path)
    images = ["data.image_key=images", "data.max_prompt_length=64"]
    run = verl_runs.run(task, tmp_path / "run", "trainer.total_training_steps=2", *PRUNE, *images)
    assert_pruned_and_in_step(run, 2)


def test_lora(task, tmp_path):
    adapter = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=True"]
    run = verl_runs.run(task, tmp_path / "run", "trainer.total_training_steps=2", *PRUNE, *adapter)
    assert_pruned_and_in_step(run, 2)
