"""`fastrl eval` on a run of the testbed, as a user runs it, and its sampler against the testbed's own evaluation."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("trl")

from fastrl import testbed
from fastrl.bench.answers import Sampling, TransformersSampler
from fastrl.bench.benchmarks import BENCHMARKS, rows_of
from fastrl.data.testbed import problems
from fastrl.rewards import extract_boxed, grade_answer

pytestmark = pytest.mark.trl

RECIPE = """
task: {train_prompts: 2, held_out_prompts: 4, evaluate_every: 0, num_threads: 1}
baseline: false
max_steps: 1
per_device_train_batch_size: 8
num_generations: 4
max_completion_length: 16
top_k: 0
bf16: false
gradient_checkpointing: false
"""


@pytest.fixture(scope="module")
def sampler():
    return TransformersSampler(str(testbed.checkpoint_path()), batch_size=16)


def test_greedy_answers_are_those_of_the_testbed(sampler):
    held_out = problems("held_out", 24, 0)
    model, processor = testbed.load()
    wanted = testbed.evaluate(model, processor, held_out)["accuracy"]
    rows = rows_of(BENCHMARKS["testbed"], limit=24)
    found = list(sampler.answer(rows, Sampling(max_tokens=24)))
    right = [grade_answer(extract_boxed(a.greedy), row.answer) for a, row in zip(found, rows, strict=True)]
    assert sum(right) / 24 == wanted


def test_samples_are_repeated_by_their_seed_and_leave_torch_alone(sampler):
    import torch

    rows = rows_of(BENCHMARKS["testbed"], limit=6)
    state = torch.get_rng_state()

    def draw(seed):
        return [a.samples for a in sampler.answer(rows, Sampling(num_samples=3, max_tokens=24, seed=seed))]

    first = draw(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert first == draw(0)
    assert first != draw(1)
    assert {len(samples) for samples in first} == {3}
    assert any(len(set(samples)) > 1 for samples in first)


def test_a_run_is_evaluated_beside_its_base_model(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE, encoding="utf-8")

    def fastrl(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "fastrl.cli", *map(str, arguments)],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
            capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    fastrl("train", "tiny.yaml", "--out", "run")
    shown = fastrl("eval", "run", "--benchmarks", "testbed", "--k", 2, "--limit", 8)
    assert "testbed: base, 8 problems" in shown
    assert "fastrl - base" in shown
    result = json.loads((tmp_path / "run" / "eval" / "evaluation.json").read_text(encoding="utf-8"))
    models = result["benchmarks"]["testbed"]["models"]
    assert list(models) == ["base", "fastrl"]
    for values in models.values():
        assert {"greedy", "sampled", "pass@2", "kinds", "in_format"} <= set(values)
    answers = (tmp_path / "run" / "eval" / "testbed" / "base.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(answers) == 9
