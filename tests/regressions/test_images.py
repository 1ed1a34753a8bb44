"""Pixels are stored by image, tile or patch, everything else by row: a filter that took rows took the wrong pixels,
and nothing complained, because the shapes still fitted.
"""

import hashlib

import pytest

pytest.importorskip("trl")

import numpy as np
from scars_support import ShownFast, rows_of
from trl_support import train, vision_dataset

from fastrl import testbed
from fastrl.config import FastRLConfig

pytestmark = pytest.mark.trl

WORDS = ["angle", "length", "perimeter", "area", "x", ".", "Find", "the"]
CONFIGS = {
    "published": FastRLConfig(budget="fixed", tau=0.9),
    "keep_all": FastRLConfig(pruner="none", budget="fixed"),
    "unbiased": FastRLConfig(
        budget="fixed", tau=1.0, representative="random", weighting=1.0, align="dummy", zero_variance="drop",
        denominator="full",
    ),
}  # fmt: skip
SCHEDULES = {
    "one": {"per_device_train_batch_size": 32},
    "accumulated": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
    "two_windows": {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "max_steps": 2,
    },
}  # fmt: skip


def checksum(pixels):
    return hashlib.sha256(np.ascontiguousarray(pixels.detach().numpy())).hexdigest()


def dataset_of(image_counts):
    """Eight prompts, each with a word and images that no other has."""
    rows = vision_dataset(image_counts=image_counts).remove_columns("prompt")
    prompts = [[{"role": "user", "content": f"Find the {word} x ."}] for word in WORDS]
    return rows.add_column("prompt", prompts)


def expected_checksums(dataset, processor):
    """Prompt's word -> checksums of its images, in order, straight from the processor."""
    found = {}
    for row, word in zip(dataset, WORDS, strict=True):
        images = row["images"]
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"] if images else []
        found[processor.tokenizer.convert_tokens_to_ids(word)] = [checksum(image) for image in pixels]
    return found


def shown_checksums(inputs):
    """(prompt's word, checksums of the images that stand at its place) of each row of a micro-batch."""
    counts = inputs.get("num_images") or [0] * len(inputs["prompt_ids"])
    ends = np.cumsum(counts)
    assert len(inputs.get("pixel_values", ())) == ends[-1], "as many images as the rows claim"
    for i, prompt, _ in rows_of(inputs):
        own = range(ends[i] - counts[i], ends[i])
        yield (
            prompt[-4],
            [checksum(inputs["pixel_values"][k]) for k in own],
        )  # "Find the <word> x . <assistant>"


def run(folder, config, image_counts, **settings):
    model, processor = testbed.load()
    dataset = dataset_of(image_counts)
    trainer, _ = train(
        ShownFast, folder, model=model, dataset=dataset, processing_class=processor, learning_rate=0.0,
        trainer_kwargs={"fastrl": config}, **{"max_steps": 1, **settings},
    )  # fmt: skip
    shown = [row for _, inputs in trainer.shown for row in shown_checksums(inputs)]
    return shown, expected_checksums(dataset, processor), trainer


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("image_counts", "schedule"),
    [
        ((0, 1, 2), "one"),
        ((0, 1, 2), "accumulated"),
        ((0, 1, 2), "two_windows"),
        ((2, 0, 1, 1), "accumulated"),
    ],
    ids=str,
)
def test_trl_4488_pixels_follow_their_row(tmp_path, image_counts, config, schedule):
    shown, expected, _ = run(tmp_path, config, image_counts, **SCHEDULES[schedule])
    assert len({tuple(images) for images in expected.values() if images}) == sum(map(bool, expected.values()))
    assert len({len(images) for _, images in shown}) > 1, "rows with different numbers of images"
    assert len(shown) > 8
    for word, images in shown:
        assert images == expected[word]


def test_trl_6619_pixels_follow_their_row_over_a_resume_inside_a_round(tmp_path):
    """The second window of a round comes from the checkpoint: its pixels are still those of its prompts."""
    settings = {**SCHEDULES["two_windows"], "save_strategy": "steps", "save_steps": 1}
    _, expected, whole = run(tmp_path, CONFIGS["published"], (0, 1, 2), **settings)
    checkpoint = str(tmp_path / "checkpoint-1")
    shown, _, resumed = run(tmp_path, CONFIGS["published"], (0, 1, 2), resume=checkpoint, **settings)
    assert {step for step, _ in resumed.shown} == {1}
    assert shown == [row for step, inputs in whole.shown if step == 1 for row in shown_checksums(inputs)]
    assert {len(images) for _, images in shown} > {0}
    assert all(images == expected[word] for word, images in shown)


def test_trl_6570_the_checksums_see_two_rows_that_swapped_their_pixels(tmp_path):
    """What the reports did, in the recorded inputs: the shapes still fit, and only the checksums tell."""
    _, expected, trainer = run(tmp_path, CONFIGS["keep_all"], (1,), per_device_train_batch_size=32)
    ((_, inputs),) = trainer.shown
    assert all(images == expected[word] for word, images in shown_checksums(inputs))
    inputs["pixel_values"] = inputs["pixel_values"].flip(0)
    assert any(images != expected[word] for word, images in shown_checksums(inputs))
