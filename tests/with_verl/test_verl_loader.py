"""What verl's own data set class reads from an exported file is the canonical row, images and prompt included."""

import io

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from PIL import Image
from verl.utils.dataset.rl_dataset import RLHFDataset

from fastrl.data.export import write
from fastrl.data.prompts import read_template
from fastrl.data.rows import Picture, Row
from fastrl.testbed import load
from pictures import line_png


def text_of(message):
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in message["content"])


def test_verl_reads_back_the_rows(tmp_path):
    rows = [
        Row(
            id="p1",
            problem="<image>Find x.",
            answer="3",
            images=(Picture(data=line_png(200)),),
            source="geometry3k",
        ),
        Row(
            id="p2",
            problem="Is <image> or <image> larger?",
            answer="145°",
            images=(Picture(data=line_png(90)), Picture(data=line_png(30))),
            source="geometry3k",
        ),
    ]
    template = read_template("paper")
    write(rows, "verl", tmp_path / "train.parquet", template=template, system="Be brief.")
    config = OmegaConf.create(
        {"cache_dir": str(tmp_path / "cache"), "filter_overlong_prompts": False, "max_prompt_length": 4096}
    )
    _, processor = load()
    found = RLHFDataset(str(tmp_path / "train.parquet"), processor.tokenizer, config, processor)
    assert len(found) == len(rows)
    for index, row in enumerate(rows):
        item = found[index]
        assert item["data_source"] == row.source
        assert item["reward_model"]["ground_truth"] == row.answer
        assert item["index"] == index
        assert item["extra_info"]["id"] == row.id
        assert item["extra_info"]["question"] == row.problem
        system, user = item["raw_prompt"]
        assert text_of(system) == "Be brief."
        assert text_of(user) == template(row.problem)
        # verl hands these to qwen_vl_utils, which needs torchvision and rounds sides to the model's patches.
        images = [part["image"] for part in user["content"] if part["type"] == "image"]
        wanted = [Image.open(io.BytesIO(picture.read())) for picture in row.images]
        assert [image.convert("RGB").tobytes() for image in images] == [image.tobytes() for image in wanted]
