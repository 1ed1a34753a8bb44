"""On two ranks: packed survivors give the gradients of the ordinary path, and the doubt of one rank stops all."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import PartialState
from small_machine import small_machine
from transformers import Qwen2ForCausalLM
from trl_support import ScriptedFast, relative_error, text_model, train, vision_dataset

from fastrl import FastRLConfig, testbed
from fastrl.integrations._trl_prefix import Packing


def gradients(share, **settings):
    config = FastRLConfig(
        budget="fixed",
        pruner="random",
        keep_share=0.75,
        align="dummy",
        denominator="full",
        share_prompt=share,
    )
    trainer, found = train(ScriptedFast, tempfile.mkdtemp(), trainer_kwargs={"fastrl": config}, **settings)
    saved = [row["fastrl/prompt_tokens_saved"] for row in trainer.state.log_history if "loss" in row]
    return trainer, found, saved


def assert_same(**settings):
    trainer, packed, saved = gradients("auto", **{name: make() for name, make in settings.items()})
    assert trainer._prefix.is_active
    assert trainer._prefix.is_checked
    assert min(saved) > 0
    _, ordinary, _ = gradients("off", **{name: make() for name, make in settings.items()})
    for a, b in zip(packed, ordinary, strict=True):
        assert b.norm() > 0
        assert relative_error(a, b) <= 1e-5


def main(done):
    state = PartialState(cpu=True)
    assert state.num_processes == int(os.environ["EXPECTED_WORLD_SIZE"]) == 2
    assert_same()
    reference = str(Path(done).parent / "reference")
    if state.is_main_process:
        text_model().save_pretrained(reference)
    state.wait_for_everyone()
    assert_same(
        model=lambda: Qwen2ForCausalLM.from_pretrained(reference),
        beta=lambda: 0.1,
        num_iterations=lambda: 2,
    )
    assert_same(
        model=lambda: testbed.load()[0],
        processing_class=lambda: testbed.load()[1],
        dataset=lambda: vision_dataset(8, (1, 2)),
    )

    allowed = Packing.allowed
    if state.process_index == 1:
        Packing.allowed = property(lambda self: torch.ones_like(allowed.fget(self)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _, saved = gradients("auto", model=text_model())
    assert (
        sum("share_prompt: log-probs of the first micro-batch differ" in str(w.message) for w in caught) == 1
    )
    assert not trainer._prefix.is_active
    assert max(saved) == 0
    state.wait_for_everyone()
    if state.is_main_process:
        Path(done).write_text("done", encoding="utf-8")


if __name__ == "__main__":
    with small_machine():
        main(sys.argv[1])
