"""The four out-of-domain sets from end to end: the testbed's model, real lmms-eval, ten items of ours each."""

from pathlib import Path

import pytest

from fastrl.bench.answers import Sampling
from fastrl.bench.benchmarks import BENCHMARKS, OutOfDomain
from fastrl.bench.evaluate import judge, summarize
from fastrl.bench.lmms import STATED, Harness, run_task
from fastrl.testbed import checkpoint_path

PYTHON = Path(__file__).parents[2] / ".venv-lmms" / "bin" / "python"

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no lmms-eval here: make venv-lmms"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


@pytest.mark.parametrize("name", [name for name, b in BENCHMARKS.items() if isinstance(b, OutOfDomain)])
def test_a_set_from_end_to_end(tmp_path, name):
    outcome = run_task(
        Harness(python=str(PYTHON)),
        name,
        BENCHMARKS[name].task,
        str(checkpoint_path()),
        Sampling(num_samples=1, max_tokens=24),
        tmp_path,
        source="standin",
    )
    assert [row.id for row in outcome.rows] == [f"{name}-{i:05d}" for i in range(10)]
    assert sum(row.choices is not None for row in outcome.rows) == (10 if name == "wemath" else 5)
    assert any("</think>" in answers.greedy for answers in outcome.answers), (
        "its own words, reasoning included"
    )
    items = [judge(row, answers, STATED) for row, answers in zip(outcome.rows, outcome.answers, strict=True)]
    found = summarize({"base": items}, [1])
    assert found["num"] == 10
    assert set(found["models"]["base"]["kinds"]) <= {"right", "wrong", "no_answer", "unparsable_prediction"}
