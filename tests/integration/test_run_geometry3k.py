"""Two steps of the Geometry3K recipe from end to end: original problems, images included, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

pytest.importorskip("trl")

from fastrl.testbed import load

pytestmark = pytest.mark.trl

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT.parent / "shared" / "data" / "geometry3k_sample"
# What a machine with one CPU changes: the model, sizes, and vLLM. Everything else is the published recipe.
SMALL = """
max_steps: 2
num_generations: 4
generation_batch_size: 8
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_completion_length: 12
gradient_checkpointing: false
bf16: false
use_vllm: false
use_cpu: true
model_init_kwargs: {dtype: float32}
eval_strategy: steps
eval_steps: 2
per_device_eval_batch_size: 2
save_strategy: "no"
task: {processes: 1, min_pixels: null, max_pixels: null, held_out_split: train, held_out_prompts: 2}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The testbed's model with a processor that brings every image to the size it knows."""
    folder = tmp_path_factory.mktemp("model")
    tiny, processor = load()
    processor.image_processor.do_resize = True
    tiny.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def drawn(folder):
    """Ten problems of our own in the original layout."""
    for number in range(1, 11):
        (folder / str(number)).mkdir()
        values = {
            "id": number, "annotat_text": f"Find x in figure {number}.", "answer": "B", "data_type": "train",
            "choices": ["5", f"{number} \\sqrt {{ 3 }}", "7.5", "90"],
        }  # fmt: skip
        (folder / str(number) / "data.json").write_text(json.dumps(values), encoding="utf-8")
        image = Image.new("RGB", (200 + number, 150), "white")
        ImageDraw.Draw(image).polygon([(10, 140), (190, 140), (20 * number, 10)], outline="black", width=3)
        image.save(folder / str(number) / "img_diagram.png")
    return folder


@pytest.mark.parametrize("problems", ["drawn", "original"])
def test_two_steps_of_the_recipe(tmp_path, model, problems):
    if problems == "original" and not SAMPLE.exists():
        pytest.skip("the ten original problems are not on this machine")
    (tmp_path / "data").mkdir()
    source = SAMPLE if problems == "original" else drawn(tmp_path / "data")
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    command = [
        sys.executable, "-m", "fastrl.cli", "train", str(ROOT / "recipes/geometry3k/qwen2_5_vl_7b_grpo.yaml"),
        "--with", str(tmp_path / "small.yaml"), "--set", f"task.model={model}", f"task.source={source}",
        "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    folder = tmp_path / "run" / "fastrl"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["fastrl/rollouts"] == 8
        assert "rewards/accuracy_reward/mean" in row
        assert "rewards/format_reward/mean" in row
        assert row["loss"] == row["loss"], "not NaN"
    validations = (folder / "validations.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(validations) == 1
    assert "eval_rewards/accuracy_reward/mean" in json.loads(validations[0])
    assert (folder / "model" / "config.json").is_file()
    assert (folder / "model" / "tokenizer.json").is_file()
