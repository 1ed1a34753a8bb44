"""What filters did to a run: one batch in which nothing was left killed it, sometimes after hours and without a
checkpoint; and rewards of the unfiltered batch were trained on with the rows of the filtered one.
"""

import numpy as np
import pytest

pytest.importorskip("trl")

from scars_support import ShownFast, records, rows_of
from trl_support import ScriptedFast, length_reward, parity_reward, text_dataset, text_tokenizer, train

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE
from fastrl.types import NoSignalError

pytestmark = pytest.mark.trl

DROP = {"budget": "fixed", "zero_variance": "drop"}


# A batch without signal (EasyR1#497, EasyR1#500, verl#953)


def dead_in(calls_without_signal):
    """A reward whose every rollout earns the same in some rounds, and whatever its length is worth in others."""
    calls = []

    def reward(prompts, completion_ids, **_):
        calls.append(1)
        if len(calls) - 1 in calls_without_signal:
            return [1.0] * len(prompts)
        return [float(len(ids)) for ids in completion_ids]

    return reward


SCHEDULES = {
    "one_step": {},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "two_steps_per_round": {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 8},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_easyr1_497_a_batch_without_signal_completes_its_step(tmp_path, schedule):
    """Two batches in a row, with a patience of one: so few groups are no stretch yet."""
    trainer, gradients = train(
        ScriptedFast, tmp_path, reward_funcs=[dead_in({1, 2})],
        trainer_kwargs={"fastrl": FastRLConfig(**DROP, max_empty_steps=1)},
        **{"max_steps": 4, "gradient_accumulation_steps": 1, **SCHEDULES[schedule]},
    )  # fmt: skip
    per_round = len(gradients) // 4
    assert trainer.state.global_step == len(gradients) == trainer.args.max_steps
    moved = [float(g.norm()) > 0 for g in gradients]
    assert moved == [True] * per_round + [False] * (2 * per_round) + [True] * per_round
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.isfinite(losses).all()


STRETCH = {"num_generations": 2, "dataset": text_dataset(32), "num_train_epochs": 4}  # 16 prompts a round
ROUND_SCHEDULES = {
    "rounds": {"per_device_train_batch_size": 32, "max_steps": 8},
    "two_steps_per_round": {
        "per_device_train_batch_size": 16, "steps_per_generation": 2, "gradient_accumulation_steps": 1,
        "max_steps": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("schedule", ROUND_SCHEDULES)
def test_easyr1_500_a_run_that_is_stopped_leaves_a_checkpoint_to_go_on_from(tmp_path, schedule):
    """After four rounds of 16 groups: 64 is the least that counts as a stretch."""
    settings = {**STRETCH, **ROUND_SCHEDULES[schedule], "save_strategy": "no"}
    stops = FastRLConfig(**DROP, max_empty_steps=4, trace=True)
    with pytest.raises(NoSignalError, match="4 steps in a row had no group to learn from"):
        train(
            ScriptedFast, tmp_path, reward_funcs=[dead_in(range(1, 99))], trainer_kwargs={"fastrl": stops},
            **settings,
        )  # fmt: skip
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / STATE_FILE).is_file()

    # Mended, the run goes on where it was: what it has sampled is neither lost nor sampled again.
    more = FastRLConfig(**DROP, max_empty_steps=1000, trace=True)
    resumed, gradients = train(
        ScriptedFast, tmp_path, resume=True, reward_funcs=[dead_in({})], trainer_kwargs={"fastrl": more},
        **settings,
    )  # fmt: skip
    assert resumed.state.global_step == resumed.args.max_steps
    assert float(gradients[-1].norm()) > 0
    seen = dict.fromkeys((r["step"], r["prompt_id"]) for r in records(tmp_path))
    assert len(seen) == 8 * 16
    for epoch in range(4):
        assert len({prompt for step, prompt in seen if step // 2 == epoch}) == 32


def test_verl_953_a_step_with_signal_ends_the_stretch(tmp_path):
    """Three rounds of 32 groups without signal, twice: neither is four, and only a stretch in a row counts."""
    config = FastRLConfig(**DROP, max_empty_steps=4)
    trainer, _ = train(
        ScriptedFast, tmp_path, reward_funcs=[dead_in({0, 1, 2, 4, 5, 6})], trainer_kwargs={"fastrl": config},
        num_generations=2, dataset=text_dataset(32), per_device_train_batch_size=64, max_steps=8,
    )  # fmt: skip
    assert trainer.state.global_step == 8


# Every column follows its row (NeMo-RL PR 3794), through TRL's batch


FATES = {
    "published": FastRLConfig(budget="fixed", tau=0.9, trace=True),
    "weights": FastRLConfig(
        budget="fixed", tau=1.0, representative="random", weighting=1.0, align="dummy", trace=True
    ),
    "random": FastRLConfig(budget="fixed", pruner="random", keep_share=0.4, trace=True),
}
MICRO_STEPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}


@pytest.mark.parametrize("config", FATES.values(), ids=FATES)
def test_nemo_rl_3794_what_reaches_the_loss_belongs_together(tmp_path, config):
    """Prompt, completion and advantage of each row that is trained on are recomputed from its tokens alone."""
    trainer, _ = train(
        ShownFast, tmp_path, trainer_kwargs={"fastrl": config}, max_steps=4, scale_rewards="none", **MICRO_STEPS
    )  # fmt: skip
    expected = expected_rows(tmp_path, text_dataset())
    found = []
    for step, inputs in trainer.shown:
        for i, prompt, completion in rows_of(inputs):
            found.append(
                (step // 2, tuple(prompt), tuple(completion), round(float(inputs["advantages"][i]), 4))
            )
    assert len(found) > 8
    assert sorted(found) == sorted(expected)


def expected_rows(folder, dataset):
    tokenizer = text_tokenizer()
    rewards: dict = {}
    for r in records(folder):
        text = dataset[int(r["prompt_id"])]["prompt"]
        (parity,), (length,) = parity_reward([text], [r["tokens"]]), length_reward([r["tokens"]], [text])
        rewards.setdefault((r["step"], r["prompt_id"]), []).append(parity + length)
    rows = []
    for r in records(folder):
        text, of_group = dataset[int(r["prompt_id"])]["prompt"], rewards[r["step"], r["prompt_id"]]
        advantage = of_group[r["rollout"]] - np.mean(of_group)
        if r["keep"]:
            prompt = tokenizer(text)["input_ids"]
            weighted = round(float(np.float32(advantage * r["weight"])), 4) + 0.0
            rows.append((r["step"], tuple(prompt), tuple(r["tokens"]), weighted))
    return rows
