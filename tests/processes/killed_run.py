"""A two-epoch run that can be killed at any moment and goes on from its last whole checkpoint."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

from safetensors.torch import save_file  # noqa: E402
from trl_support import (  # noqa: E402
    grpo_args,
    length_reward,
    parity_reward,
    text_dataset,
    text_model,
    text_tokenizer,
)

from fastrl.config import FastRLConfig  # noqa: E402
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer  # noqa: E402

NUM_PROMPTS, STEPS = 16, 32  # two epochs of eight rounds of two prompts, two optimizer steps each


class Terminated(FastGRPOTrainer):
    """Gets SIGTERM in the middle of saving a checkpoint: the model is written, the optimizer is not."""

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        super()._save_optimizer_and_scheduler(output_dir)


folder, terminated = Path(sys.argv[1]), sys.argv[2:] == ["terminated"]
world = int(os.environ.get("WORLD_SIZE", "1"))
assert world == int(os.environ["EXPECTED_WORLD_SIZE"]), "the launcher started another number of processes"
args = grpo_args(
    folder, max_steps=-1, num_train_epochs=2, num_generations=4, steps_per_generation=4,
    gradient_accumulation_steps=2, per_device_train_batch_size=2 // world, max_completion_length=8,
    optim="adamw_torch", learning_rate=0.02, save_strategy="steps", save_steps=1,
)  # fmt: skip
trainer = (Terminated if terminated else FastGRPOTrainer)(
    model=text_model(), reward_funcs=[parity_reward, length_reward], args=args,
    train_dataset=text_dataset(NUM_PROMPTS), processing_class=text_tokenizer(),
    fastrl=FastRLConfig(tau=0.9, trace=True),
)  # fmt: skip
assert trainer.accelerator.num_processes == world
trainer.train(resume_from_checkpoint=any(folder.glob(f"checkpoint-*/{STATE_FILE}")))
assert trainer.state.global_step == STEPS
if trainer.accelerator.is_main_process:
    save_file(
        {name: value.clone() for name, value in trainer.model.state_dict().items()},
        folder / "end.safetensors",
    )
