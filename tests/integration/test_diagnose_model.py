"""`fastrl diagnose` on a user's own model and rollouts."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer
from trl_support import text_model, text_tokenizer

from fastrl.bench.diagnose import measure, read_gram
from fastrl.bench.gradients import mean_logp
from fastrl.bench.rollouts import read_sample
from fastrl.types import ConfigError, GroupError

GRADIENTS = {"parameters": "all", "num_coordinates": None, "seed": 0}


@pytest.fixture
def model(tmp_path, monkeypatch):
    text_model().save_pretrained(tmp_path / "model")
    # For a folder with a Qwen2 model, transformers would make Qwen2's own tokenizer of our word list.
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder: text_tokenizer())
    return str(tmp_path / "model")


def write(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


RECORDS = (
    {"id": "a", "prompt": "w1 w2", "completions": ["w3 w4", "w5", [2, 3, 1]], "rewards": [1, 0, None]},
    {"prompt": "w7", "completions": ["w3", "w4 w4"], "rewards": [1, 0], "outcomes": [1, 0]},
)


def test_texts_and_token_ids_become_rollouts_of_the_model(model, tmp_path):
    sample = read_sample(model, write(tmp_path / "data.jsonl", *RECORDS))
    assert [group.prompt_id for group in sample.groups] == ["a", "2"]
    ids = text_tokenizer().convert_tokens_to_ids
    assert sample.groups[0].tokens_G == [ids(["w3", "w4"]), ids(["w5"]), [2, 3, 1]]
    assert np.isnan(sample.groups[0].rewards_G[2])
    rollout = sample.rollouts_PG[0][0]
    assert rollout.inputs["input_ids"].tolist() == [ids(["w1", "w2", "w3", "w4"])]
    assert float(mean_logp(sample.model, rollout)) < 0


def test_gradients_are_measured_once_and_kept(model, tmp_path):
    data = write(tmp_path / "data.jsonl", *RECORDS)
    _, grams = measure(model=model, data=data, gram=None, testbed=(1, 2), out=tmp_path, **GRADIENTS)
    groups, again = measure(
        model=None, data=None, gram=tmp_path / "gram.json", testbed=(1, 2), out=tmp_path, **GRADIENTS
    )
    assert [group.prompt_id for group in groups] == ["a", "2"]
    for one, two in zip(grams, again, strict=True):
        np.testing.assert_allclose(one, two)
        assert np.linalg.eigvalsh(one).min() > -1e-9 * np.trace(one)
    assert read_gram(tmp_path / "gram.json")[0][1].outcomes_G.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "w1", "rewards": [1]}', r"line 1: the field 'completions' is missing"),
        (
            '{"prompt": "w1", "completions": ["w2"], "rewards": [1, 0]}',
            r"line 1: .*rewards_G has shape \(2,\)",
        ),
        ("not json", r"line 1: "),
        ("", r"holds no rollouts"),
    ],
)
def test_a_line_that_is_no_record_is_named(model, tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(GroupError, match=message):
        read_sample(model, tmp_path / "data.jsonl")


def test_gradients_from_a_file_leave_no_place_for_a_model(tmp_path):
    with pytest.raises(ConfigError, match="--gram brings gradients along"):
        measure(model="m", data=None, gram=tmp_path / "g.json", testbed=(1, 2), out=tmp_path, **GRADIENTS)
