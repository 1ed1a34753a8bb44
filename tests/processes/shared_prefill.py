"""On two ranks: prompts with one or two images are prefilled once, and the doubt of one rank stops all."""

import math
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from accelerate import PartialState
from small_machine import small_machine
from transformers import DynamicCache
from trl import GRPOConfig
from trl_support import parity_reward, text_dataset, text_model, text_tokenizer, vision_dataset

from fastrl import FastRLConfig, testbed
from fastrl.integrations import trl as adapter
from fastrl.integrations._trl_prefix import SharedPrefix
from fastrl.integrations.trl import FastGRPOTrainer


def train(share, *, vision=False):
    torch.manual_seed(0)
    args = GRPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=6, num_generations=4, max_completion_length=6, max_steps=3,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no",
        learning_rate=1e-3, top_k=0, gradient_checkpointing=False, temperature=1.0,
    )  # fmt: skip
    model, processor = testbed.load() if vision else (text_model(), text_tokenizer())
    # 3 prompts x 4 rollouts on 2 ranks: the group in the middle lies on both.
    trainer = FastGRPOTrainer(
        model=model, processing_class=processor, reward_funcs=parity_reward, args=args,
        train_dataset=vision_dataset() if vision else text_dataset(),
        fastrl=FastRLConfig(budget="fixed", share_prompt=share),
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[:-1]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a["reward"] == b["reward"], (a["reward"], b["reward"])
        assert abs(a["loss"] - b["loss"]) < 1e-5


def main(done):
    state = PartialState(cpu=True)
    assert state.num_processes == int(os.environ["EXPECTED_WORLD_SIZE"]) == 2
    # This is about generation: log-probs and update compute every row for itself.
    adapter.SharedPrefix = lambda model, is_on: SharedPrefix(model, is_on=False)
    for vision in (False, True):
        shared = train("auto", vision=vision)
        assert_same(shared, train("off", vision=vision))
        assert all(row["fastrl/prompt_tokens_saved"] > 0 for row in shared)

    select = DynamicCache.batch_select_indices
    if state.process_index == 1:
        DynamicCache.batch_select_indices = lambda self, indices: select(self, indices.flip(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = train("auto")
    said = "differ by" if state.process_index == 1 else "on another rank"
    assert sum("share_prompt" in str(w.message) and said in str(w.message) for w in caught) == 1
    DynamicCache.batch_select_indices = select
    # The other rank has sampled once before it heard of it: training goes on, with other rollouts.
    assert len(rows) == 3
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert all(row["fastrl/prompt_tokens_saved"] == 0 for row in rows)
    state.wait_for_everyone()
    if state.is_main_process:
        Path(done).write_text("done", encoding="utf-8")


if __name__ == "__main__":
    with small_machine():
        main(sys.argv[1])
