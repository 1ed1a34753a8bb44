"""The shipped checkpoint: it loads, it reads the picture, and it is what the warm-up makes."""

import json
from dataclasses import replace
from itertools import islice

import pytest

pytestmark = pytest.mark.trl
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image  # noqa: E402

from fastrl import testbed  # noqa: E402
from fastrl.data.testbed import problems, stream  # noqa: E402
from fastrl.rewards import format_reward  # noqa: E402
from fastrl.testbed import warmup  # noqa: E402
from fastrl.testbed.model import build_processor  # noqa: E402


@pytest.fixture(autouse=True)
def plain_float32():
    """Keep the process-wide precision of matrix products at torch's default."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    before = getattr(matmul, "fp32_precision", None)
    if matmul is not None:
        matmul.fp32_precision = "ieee"
    yield
    if matmul is not None:
        matmul.fp32_precision = before


@pytest.fixture(scope="module")
def model_and_processor():
    return testbed.load()


@pytest.fixture(scope="module")
def held_out():
    return problems("held_out", 64)


@pytest.fixture(scope="module")
def record():
    return json.loads((testbed.checkpoint_path() / "warmup.json").read_text())


def test_the_model_is_tiny_and_real(model_and_processor):
    model, processor = model_and_processor
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "eager"
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert type(processor).__name__ == "LlavaProcessor"
    assert processor.tokenizer.padding_side == "left"
    assert processor.tokenizer.pad_token_id != processor.tokenizer.eos_token_id


def test_the_checkpoint_is_small_and_holds_no_code():
    files = list(testbed.checkpoint_path().iterdir())
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".jinja"}
    assert sum(file.stat().st_size for file in files) < 4e6


def test_accuracy_is_in_the_stated_band(model_and_processor, held_out, record):
    """64 problems, greedy: four standard errors about what the warm-up measured on 400."""
    result = testbed.evaluate(*model_and_processor, held_out)
    expected = record["held_out_greedy"]["accuracy"]
    assert result["accuracy"] == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 64) ** 0.5)
    assert result["format"] > 0.95
    assert result["num"] == 64
    assert sum(result["families"].values()) / 8 == pytest.approx(result["accuracy"])


def test_the_picture_is_needed(model_and_processor, held_out):
    blank = [replace(problem, image=Image.new("L", problem.image.size, 255)) for problem in held_out]
    assert testbed.evaluate(*model_and_processor, blank)["accuracy"] < 0.1


def test_evaluating_changes_nothing(model_and_processor, held_out):
    model, processor = model_and_processor
    model.train()
    before = torch.random.get_rng_state()
    first = testbed.evaluate(model, processor, held_out[:16], greedy=False, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    torch.manual_seed(99)
    assert testbed.evaluate(model, processor, held_out[:16], greedy=False, seed=1) == first
    model.eval()
    testbed.evaluate(model, processor, held_out[:8])
    assert not model.training


def test_nothing_to_evaluate_is_an_error(model_and_processor):
    with pytest.raises(ValueError, match="no problems"):
        testbed.evaluate(*model_and_processor, [])


@pytest.mark.parametrize("split", ["warmup", "train", "held_out"])
def test_every_word_is_in_the_vocabulary_and_fits(split):
    processor = build_processor()
    tokenizer = processor.tokenizer
    for problem in problems(split, 400):
        ids = tokenizer(f"{problem.question} {problem.solution}")["input_ids"]
        assert tokenizer.unk_token_id not in ids
        solution_ids = tokenizer(problem.solution)["input_ids"]
        assert len(solution_ids) + 1 <= 24  # with the end token: evaluate()'s max_new_tokens
        decoded = tokenizer.decode(solution_ids, skip_special_tokens=True)
        assert decoded == problem.solution
        assert format_reward([decoded]) == [0.5]


def test_only_the_solution_and_its_end_are_learned():
    processor = build_processor()
    batch = list(islice(stream("warmup"), 8))
    inputs = warmup.collate(processor, batch)
    for row, ids in zip(batch, inputs["labels"], strict=True):
        assert processor.tokenizer.decode(ids[ids != -100]) == f"{row.solution} <|end|>"


def test_the_first_steps_of_the_warm_up_give_the_recorded_losses(record):
    recorded = record["first_losses_float32"][:4]
    assert warmup.first_losses(record["seed"], num=4) == pytest.approx(recorded, abs=2e-3)
    assert recorded[-1] < recorded[0] - 0.05  # the tolerance could not hide a loop that does not learn


def test_the_command_writes_what_ships(monkeypatch, tmp_path, record):
    threads = torch.get_num_threads()
    monkeypatch.setattr(warmup, "NUM_EVALUATION", 8)
    monkeypatch.setattr(warmup, "BATCH_SIZE", 4)
    monkeypatch.setattr(warmup, "first_losses", lambda seed, problem_set: [float(seed)])
    monkeypatch.setattr("sys.argv", ["warmup", "--seed", "3", "--steps", "2", "--out", str(tmp_path)])
    try:
        warmup.main()
    finally:
        torch.set_num_threads(threads)
    shipped = testbed.checkpoint_path()
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in shipped.iterdir()}
    written = json.loads((tmp_path / "warmup.json").read_text())
    assert written.keys() == record.keys()
    assert written["first_losses_float32"] == [3.0]
    same = (
        "chat_template.jinja",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
    )
    for name in same:
        assert (tmp_path / name).read_text() == (shipped / name).read_text(), name
    assert (tmp_path / "model.safetensors").stat().st_size == (shipped / "model.safetensors").stat().st_size


def test_cpu_settings_say_what_they_set(monkeypatch):
    threads = torch.get_num_threads()
    try:
        for has_bf16, expected in ((False, "ieee"), (True, "bf16")):
            monkeypatch.setattr("fastrl.testbed.model._has_bf16", lambda answer=has_bf16: answer)
            assert testbed.cpu_settings(1) == {"num_threads": 1, "matmul": expected}
            assert torch.get_num_threads() == 1
            assert torch.backends.mkldnn.matmul.fp32_precision == expected
        assert testbed.cpu_settings()["num_threads"] == 1
    finally:
        torch.set_num_threads(threads)
