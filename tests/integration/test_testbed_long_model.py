"""The checkpoint of the long problem set: its words, its accuracy, and that it is what the warm-up makes."""

import json
from dataclasses import replace

import pytest

pytestmark = pytest.mark.trl
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image  # noqa: E402

from fastrl import testbed  # noqa: E402
from fastrl.bench import setup, tasks  # noqa: E402
from fastrl.data.testbed import PROBLEM_SETS, problems  # noqa: E402
from fastrl.rewards import format_reward  # noqa: E402
from fastrl.testbed import warmup  # noqa: E402
from fastrl.testbed.evaluation import conversation  # noqa: E402
from fastrl.testbed.model import build_processor  # noqa: E402

MAX_TOKENS = PROBLEM_SETS["long"].max_tokens
NUM_AROUND = 38  # tokens of a prompt around the question: 36 of the image, and who speaks


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
    return testbed.load("long")


@pytest.fixture(scope="module")
def held_out():
    return problems("held_out", 63, problem_set="long")


@pytest.fixture(scope="module")
def record():
    return json.loads((testbed.checkpoint_path("long") / "warmup.json").read_text())


def test_it_is_the_model_of_the_short_set_with_more_words(model_and_processor):
    model, processor = model_and_processor
    short, short_processor = testbed.load("short")
    num_words = len(processor.tokenizer) - len(short_processor.tokenizer)
    assert 80 < num_words < 150
    assert processor.tokenizer.get_vocab().items() > short_processor.tokenizer.get_vocab().items()
    sizes = [sum(parameter.numel() for parameter in m.parameters()) for m in (model, short)]
    assert sizes[0] - sizes[1] == num_words * model.config.text_config.hidden_size
    assert model.config._attn_implementation == "eager"


def test_the_checkpoint_is_small_and_holds_no_code():
    files = list(testbed.checkpoint_path("long").iterdir())
    assert {file.name for file in files} == {file.name for file in testbed.checkpoint_path().iterdir()}
    assert sum(file.stat().st_size for file in files) < 4e6


def test_an_unknown_set_has_no_checkpoint():
    with pytest.raises(ValueError, match="problem_set='longest' is unknown; choose one of short, long"):
        testbed.load("longest")


@pytest.mark.parametrize("split", ["warmup", "train", "held_out"])
def test_every_word_is_in_the_vocabulary_and_completions_outweigh_prompts(split):
    processor = build_processor("long")
    tokenizer = processor.tokenizer
    lengths, prompts = [], set()
    for problem in problems(split, 350, problem_set="long"):
        assert tokenizer.unk_token_id not in tokenizer(problem.question)["input_ids"]
        ids = tokenizer(problem.solution)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        lengths.append(len(ids) + 1)  # with the end token
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        assert decoded == problem.solution
        assert format_reward([decoded]) == [0.5]
        prompts.add(len(tokenizer(problem.question)["input_ids"]) + NUM_AROUND)
    assert 30 <= min(lengths) <= max(lengths) <= 60 < MAX_TOKENS
    prompt = processor.apply_chat_template(
        [conversation(problem)], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert prompts == {42, 43}
    assert len(prompt["input_ids"][0]) in prompts
    assert sum(lengths) / len(lengths) > 43


def test_accuracy_is_in_the_stated_band(model_and_processor, held_out, record):
    """63 problems, sampled: four standard errors about what the warm-up measured on 400."""
    result = testbed.evaluate(*model_and_processor, held_out, greedy=False, max_new_tokens=MAX_TOKENS)
    expected = record["held_out_sampled"]["accuracy"]
    assert 0.35 <= expected <= 0.5
    assert result["accuracy"] == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 63) ** 0.5)
    assert result["format"] > 0.95
    assert set(result["families"]) == set(PROBLEM_SETS["long"].mistakes)


def test_the_picture_is_needed(model_and_processor, held_out):
    blank = [replace(problem, image=Image.new("L", problem.image.size, 255)) for problem in held_out]
    assert testbed.evaluate(*model_and_processor, blank, max_new_tokens=MAX_TOKENS)["accuracy"] < 0.12


def test_the_first_steps_of_the_warm_up_give_the_recorded_losses(record):
    recorded = record["first_losses_float32"][:4]
    assert warmup.first_losses(record["seed"], num=4, problem_set="long") == pytest.approx(recorded, abs=2e-3)
    assert recorded[-1] < recorded[0] - 0.05  # the tolerance could not hide a loop that does not learn


def test_the_command_writes_what_ships(monkeypatch, tmp_path, record):
    monkeypatch.setattr(warmup, "NUM_EVALUATION", 7)
    monkeypatch.setattr(warmup, "BATCH_SIZE", 4)
    monkeypatch.setattr(warmup, "first_losses", lambda seed, problem_set: [problem_set])
    argv = ["warmup", "--problems", "long", "--steps", "2", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    threads = torch.get_num_threads()
    try:
        warmup.main()
    finally:
        torch.set_num_threads(threads)
    written = json.loads((tmp_path / "warmup.json").read_text())
    assert written.keys() == record.keys()
    assert written["first_losses_float32"] == ["long"]
    assert written["command"] == "python -m fastrl.testbed.warmup --problems long --seed 0 --steps 2"
    assert set(written["held_out_greedy"]["families"]) == set(PROBLEM_SETS["long"].mistakes)
    shipped = testbed.checkpoint_path("long")
    assert (tmp_path / "model.safetensors").stat().st_size == (shipped / "model.safetensors").stat().st_size
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / name).read_text() == (shipped / name).read_text(), name


def test_a_task_of_the_long_set_trains_and_measures_with_it():
    threads = torch.get_num_threads()
    task = tasks.TestbedTask(problems="long", train_prompts=7, held_out_prompts=7, num_threads=1)
    try:
        made = setup.set_up(task, seed=1, evaluate=True, max_tokens=MAX_TOKENS)
        row = made.measure(made.arguments["model"], is_last=False)
    finally:
        torch.set_num_threads(threads)
    assert set(made.arguments["train_dataset"]["family"][:]) == set(PROBLEM_SETS["long"].mistakes)
    assert row["format"] > 0.5  # completions are not cut off
    assert row["num"] == 7
