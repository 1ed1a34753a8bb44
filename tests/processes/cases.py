"""Training runs that must do the same on one process and on two. `CASES[name](folder)` returns gradients."""

import functools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import Qwen2ForCausalLM
from transformers.trainer_callback import PrinterCallback
from trl_support import (
    KeepGradients,
    ScriptedFast,
    ScriptedStock,
    grpo_args,
    length_reward,
    parity_reward,
    scripted_ids,
    text_dataset,
    text_model,
    text_tokenizer,
    vision_dataset,
)

from fastrl.batching import align_top_up
from fastrl.config import FastRLConfig
from fastrl.method import select
from fastrl.types import Selection

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ROWS, GROUP = 16, 4  # of a round, of a group


class OverRanks:
    """Rollouts depend on (prompt, place in the group, step): on no rank, and not on how many there are."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        seen: Counter = Counter()
        completions = []
        for ids in gather_object(prompt_ids):
            key = tuple(ids)
            completions.append(scripted_ids(ids, seen[key], self.state.global_step, None, self.words))
            seen[key] += 1
        first = self.accelerator.process_index * len(prompt_ids)
        return completions[first : first + len(prompt_ids)], None


class Fast(OverRanks, ScriptedFast):
    pass


class Stock(OverRanks, ScriptedStock):
    pass


class SameOnAllRanks(KeepGradients):
    def __init__(self, accelerator):
        super().__init__()
        self.accelerator = accelerator

    def on_pre_optimizer_step(self, *args, **kwargs):
        super().on_pre_optimizer_step(*args, **kwargs)
        copies = self.accelerator.gather(self.gradients[-1][None])
        assert all(torch.equal(copies[0], copy) for copy in copies), "ranks step in different directions"


def train(folder, trainer_class=Fast, *, config=None, choose=None, counts=None, model=None, dataset=None,
          processing_class=None, **settings):  # fmt: skip
    """Train as trl_support does, on this world's share of the batch; returns the trainer and its gradients."""
    settings["per_device_train_batch_size"] = settings.get("per_device_train_batch_size", 8) // WORLD
    trainer = trainer_class(
        model=model if model is not None else text_model(),
        reward_funcs=[parity_reward, length_reward],
        args=grpo_args(folder, **settings),
        train_dataset=dataset if dataset is not None else text_dataset(),
        processing_class=processing_class or text_tokenizer(),
        **({"fastrl": config or KEEP_ALL} if issubclass(trainer_class, ScriptedFast) else {}),
    )
    assert trainer.accelerator.num_processes == WORLD
    trainer.remove_callback(PrinterCallback)
    keep = SameOnAllRanks(trainer.accelerator)
    trainer.add_callback(keep)
    if choose:
        trainer.fastrl.select = lambda groups, num_prompts=None: choose(groups)
    if counts is not None:
        trainer.fastrl.plan = lambda prompt_ids: np.array(counts)
    trainer.train()
    return trainer, keep.gradients


# Selections: functions of the groups alone, so the same on every rank.

# Dummies, because rows that two ranks need added back change the gradient of the two.
KEEP_ALL = FastRLConfig(pruner="none", budget="fixed", align="dummy")
DROP = FastRLConfig(pruner="none", budget="fixed", zero_variance="drop", denominator="full")
MDAP = FastRLConfig(budget="fixed", tau=0.9)


def choose_rows(pick: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """Keep the rows that `pick` chooses by the round's advantages; needs no pruner."""

    def choose(groups):
        sizes = [group.num_rollouts for group in groups]
        keep_N = pick(np.concatenate([group.advantages_G for group in groups]))
        return [
            Selection(keep_G=keep, weight_G=keep.astype(float), cluster_G=np.arange(len(keep)), reason="test")
            for keep in np.split(keep_N, np.cumsum(sizes)[:-1])
        ]

    return choose


def top_three(advantages_N):
    rank_NG = np.argsort(np.argsort(-np.abs(advantages_N.reshape(-1, GROUP)), axis=1, kind="stable"), axis=1)
    return (rank_NG < 3).ravel()


def published(groups):
    """With the rows that two ranks need added back on one rank too."""
    return align_top_up(groups, select(groups, MDAP), 2)[0]


SELECTIONS: dict[str, dict] = {
    "keep_all": {"config": KEEP_ALL},
    "drop": {"config": DROP},
    "top_three": {"choose": choose_rows(top_three)},
    "mdap": {"config": MDAP, "choose": published},
    "rank_1_empty": {"choose": choose_rows(lambda a: np.arange(len(a)) < len(a) // 2)},
    "one_row": {"choose": choose_rows(lambda a: np.arange(len(a)) == np.abs(a).argmax())},
    "nothing": {"choose": choose_rows(lambda a: np.zeros(len(a), bool))},
}
UNEVEN = choose_rows(lambda a: np.arange(len(a)) % 5 < 2)
LOSSES = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "dapo", "dr_grpo", "cispo")},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
SCHEDULES = {
    "two_steps": {"gradient_accumulation_steps": 2},
    "two_windows": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "per_device_train_batch_size": 4, "max_steps": 4,
    },
    "two_iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4},
}  # fmt: skip

MATRIX = {
    f"{loss}-{selection}-{schedule}": functools.partial(
        train, **LOSSES[loss], **SELECTIONS[selection], **SCHEDULES[schedule]
    )
    for loss, selection, schedule in product(LOSSES, SELECTIONS, SCHEDULES)
}
# Every loss with every selection, the schedules in turn: what `make test` runs of the matrix.
QUICK = [
    f"{loss}-{selection}-{list(SCHEDULES)[(i + j) % 3]}"
    for (i, loss), (j, selection) in product(enumerate(LOSSES), enumerate(SELECTIONS))
]


def vision(folder, **kwargs):
    from fastrl import testbed

    model, processor = testbed.load()
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 1e-6, **kwargs}
    dataset = vision_dataset(image_counts=(1, 2, 0))
    return train(folder, model=model, processing_class=processor, dataset=dataset, **settings)


def with_reference(folder, **kwargs):
    saved = Path(folder).parent / "reference_model"
    if PartialState().is_main_process:
        text_model().save_pretrained(saved)
    PartialState().wait_for_everyone()
    return train(folder, model=Qwen2ForCausalLM.from_pretrained(saved), beta=0.04, **kwargs)


RAGGED = {"counts": [3, 2, 4, 3], "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
SCALES = [
    *({"scale_rewards": scale} for scale in ("group", "batch", "none")),
    {"multi_objective_aggregation": "normalize_then_sum"},
]
OTHER = {
    **{
        f"vision-{name}": functools.partial(vision, **SELECTIONS[name])
        for name in ("keep_all", "mdap", "rank_1_empty")
    },
    **{
        f"ragged-{loss}-{'-'.join(scale.values())}": functools.partial(train, loss_type=loss, **scale, **RAGGED)
        for loss, scale in product(("grpo", "dapo"), SCALES)
    },
    "ragged-pruned": functools.partial(train, choose=UNEVEN, **RAGGED),
    "reference": functools.partial(with_reference, choose=UNEVEN, **SCHEDULES["two_iterations"]),
    **{  # waves: rows of a rank are no longer one contiguous slice of the round
        name: functools.partial(train, config=config, dataset=text_dataset(24), gradient_accumulation_steps=2)
        for name, config in {
            "dynamic": FastRLConfig(
                pruner="none", budget="fixed", refill="signal", zero_variance="drop", denominator="live",
                align="dummy",
            ),
            "cppo": FastRLConfig(pruner="top_advantage", budget="fixed", refill="kept", align="dummy"),
        }.items()
    },
    "shrink": functools.partial(
        train, config=replace(KEEP_ALL, micro_batches="shrink"), choose=UNEVEN,
        gradient_accumulation_steps=2,
    ),
}  # fmt: skip

ACCUMULATIONS = (1, 2, 4, 8)
ACCUMULATED = {
    f"accumulate-{loss}-{steps}": functools.partial(
        train, choose=UNEVEN, gradient_accumulation_steps=steps, per_device_train_batch_size=ROWS // steps,
        max_steps=1, **LOSSES[loss],
    )
    for loss, steps in product(LOSSES, ACCUMULATIONS)
}  # fmt: skip

# A quantile over the tokens of all ranks: its micro-batches must hold the same rows, as stock TRL's do.
ENTROPY = {
    f"entropy-{kind.__name__}": functools.partial(
        train, trainer_class=kind, top_entropy_quantile=0.5, gradient_accumulation_steps=1, max_steps=1,
        per_device_train_batch_size=16,
    )
    for kind in (Fast, Stock)
}  # fmt: skip

CASES = {**MATRIX, **OTHER, **ACCUMULATED, **ENTROPY}
SUITES = {
    "quick": [
        *QUICK,
        *OTHER,
        *ENTROPY,
        *(name for name in ACCUMULATED if "-dapo-" in name or "-gspo-" in name),
    ],
    "all": list(CASES),
}
