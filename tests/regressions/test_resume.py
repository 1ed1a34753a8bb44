"""Resumed runs that were other runs: rows and rewards that no longer fitted, a restart at the end of an epoch that
trained nothing and reported success, prompts that no epoch ever reached because the data had run ahead.
"""

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from scars_support import metrics, records
from transformers import TrainerCallback
from trl_support import ScriptedFast, text_dataset, train

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer

pytestmark = pytest.mark.trl

PUBLISHED = {"fastrl": FastRLConfig(tau=1.0, trace=True)}


def settles(prompts, completion_ids, trainer_state, **_):
    """Many different rewards in the first epoch, two afterwards: fewer rollouts are kept, and ARS lowers G_t."""
    num_values = 2 if trainer_state.epoch >= 1 else 8
    return [float(sum(ids) % num_values) for ids in completion_ids]


def assert_same_end(resumed, whole):
    """Parameters, optimizer, history and the method itself are those of the run that was never stopped."""
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [list(trainer.optimizer.optimizer.state.values()) for trainer in (resumed, whole)]
    for a, b in zip(*states, strict=True):
        assert all(torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name])) for name in b)
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.fastrl.state_dict() == whole.fastrl.state_dict()


# k + (N - k) = N (open-r1#450)

WINDOW = 8  # optimizer steps of a round: four micro-steps, two iterations
INSIDE = {
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 1,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 6 * WINDOW,  # three epochs of two rounds of two prompts
    "num_train_epochs": 3,
    "num_generations": 8,
    "reward_funcs": [settles],
    "learning_rate": 0.01,
    "optim": "adamw_torch",
    "weight_decay": 0.01,
}
SAVES = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    settings = {**INSIDE, **SAVES, "dataset": text_dataset(4)}
    return folder, train(FastGRPOTrainer, folder, trainer_kwargs=PUBLISHED, **settings)[0]


def test_open_r1_450_the_run_has_something_to_lose(never_stopped):
    folder, trainer = never_stopped
    rounds = records(folder)
    sizes = [next(r["num_rollouts"] for r in rounds if r["step"] == step) for step in range(6)]
    assert sizes[3] > sizes[4] == sizes[5], "G_t changes where the resumed runs begin"
    assert 0 < sum(r["keep"] for r in rounds) < len(rounds), "something is pruned"
    assert len({round(m["loss"], 9) for m in metrics(folder)}) > WINDOW, "every step has its own rows"
    assert trainer.state.global_step == 6 * WINDOW


@pytest.mark.parametrize("k", range(4 * WINDOW, 5 * WINDOW))
def test_open_r1_450_k_and_the_rest_equal_the_whole_at_every_offset(never_stopped, tmp_path, k):
    """From the boundary (k = 32, also the end of an epoch) to the last step of the round. Rollouts are sampled."""
    folder, whole = never_stopped
    settings = {**INSIDE, "dataset": text_dataset(4), "resume": str(folder / f"checkpoint-{k}")}
    resumed, gradients = train(FastGRPOTrainer, tmp_path, trainer_kwargs=PUBLISHED, **settings)
    assert len(gradients) == 6 * WINDOW - k
    assert records(tmp_path) == records(folder, from_step=-(-k // WINDOW)), "prompts, G_t, rewards, fates"
    assert metrics(tmp_path) == metrics(folder, after_step=k), "losses, lengths, rewards"
    assert_same_end(resumed, whole)


# A checkpoint at the end of an epoch (verl#7401, PR 5725)

EPOCHS = {
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "num_train_epochs": 3,  # of four rounds of two prompts
    "max_steps": -1,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "reward_funcs": [settles],
}


@pytest.mark.parametrize("boundary", [4, 8])
def test_verl_7401_resume_at_the_epoch_boundary_trains_the_rest(tmp_path, boundary):
    config = {"fastrl": FastRLConfig(tau=1.0, trace=True)}
    whole, _ = train(ScriptedFast, tmp_path / "a", trainer_kwargs=config, **EPOCHS, **SAVES)
    assert whole.state.global_step == 12
    resume = str(tmp_path / "a" / f"checkpoint-{boundary}")
    resumed, gradients = train(ScriptedFast, tmp_path / "b", trainer_kwargs=config, resume=resume, **EPOCHS)
    assert len(gradients) == 12 - boundary, "steps that were done, not steps that were counted"
    assert any(float(gradient.norm()) > 0 for gradient in gradients)
    assert_same_end(resumed, whole)

    # ARS ends each epoch once: the same G_t in every round, and no G_t that changes inside an epoch.
    rounds = [
        {(r["step"], r["num_rollouts"]) for r in records(tmp_path / run, from_step=boundary)} for run in "ab"
    ]
    assert rounds[1] == rounds[0]
    sizes = dict(sorted({(r["step"], r["num_rollouts"]) for r in records(tmp_path / "a")}))
    assert len(sizes) == 12
    per_epoch = [{sizes[step] for step in range(4 * epoch, 4 * epoch + 4)} for epoch in range(3)]
    assert all(len(found) == 1 for found in per_epoch)
    assert per_epoch[1] != per_epoch[2], "a G_t that never changes would hide a second change"
    assert resumed.fastrl.state_dict()["budget"]["steps_seen"] == 12


def test_verl_5725_a_finished_run_that_is_resumed_does_nothing_and_says_so(tmp_path):
    """The other side of it: no step is left, none is done, and the count is that of the whole run."""
    config = {"fastrl": FastRLConfig(tau=1.0)}
    train(ScriptedFast, tmp_path, trainer_kwargs=config, **EPOCHS, **SAVES)
    again, gradients = train(ScriptedFast, tmp_path, trainer_kwargs=config, resume=True, **EPOCHS)
    assert gradients == []
    assert again.state.global_step == 12
    assert again.fastrl.step == 12


# Every prompt once per epoch (NeMo-RL PR 3599)


class Ends(TrainerCallback):
    """Ends a run: asked to, with a checkpoint; killed; or killed while it writes one, of which half is left."""

    def __init__(self, at, how):
        self.at, self.how = at, how

    def on_step_begin(self, args, state, control, **_):
        if self.how == "killed" and state.global_step >= self.at:
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **_):
        if self.how != "killed" and state.global_step >= self.at:
            control.should_save = control.should_training_stop = True


class DiesInSaving(ScriptedFast):
    def _save_rng_state(self, output_dir):
        ends = next((c for c in self.callback_handler.callbacks if isinstance(c, Ends)), None)
        if ends is not None and ends.how == "saving" and self.state.global_step >= ends.at:
            raise KeyboardInterrupt
        super()._save_rng_state(output_dir)


def whole_checkpoints(folder):
    return [int(path.parent.name.partition("-")[2]) for path in folder.glob(f"checkpoint-*/{STATE_FILE}")]


SCHEDULES = {  # optimizer steps of a round of two prompts
    "rounds": (1, {"per_device_train_batch_size": 8}),
    "two_per_round": (2, {"per_device_train_batch_size": 4, "steps_per_generation": 2}),
    "two_windows": (
        2, {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    ),
}  # fmt: skip
NUM_PROMPTS, NUM_EPOCHS = 8, 3


def run_with_restarts(folder, schedule, rng):
    """Stop and resume at random until the run is over; returns the number of restarts."""
    updates, settings = SCHEDULES[schedule]
    total = updates * NUM_EPOCHS * NUM_PROMPTS // 2
    settings = {
        "gradient_accumulation_steps": 1, **settings, "max_steps": -1, "num_train_epochs": NUM_EPOCHS,
        "save_strategy": "steps", "save_steps": int(rng.integers(1, 4)), "save_total_limit": 1,
    }  # fmt: skip
    at = restarts = 0
    while True:
        at += int(rng.integers(1, 1 + total // 3))
        try:
            trainer, _ = train(
                DiesInSaving, folder, resume=True if whole_checkpoints(folder) else None,
                callbacks=[Ends(at, rng.choice(["asked", "killed", "saving"]))],
                trainer_kwargs={"fastrl": FastRLConfig(tau=1.0, trace=True)}, **settings,
            )  # fmt: skip
        except KeyboardInterrupt:
            at = max(whole_checkpoints(folder), default=0)
        else:
            if trainer.state.global_step == total:
                return restarts
            at = trainer.state.global_step
        restarts += 1
        assert restarts < 50, "the run does not come to an end"


def prompts_by_epoch(folder):
    seen = dict.fromkeys((r["step"], r["group"], r["prompt_id"]) for r in records(folder))
    rounds = NUM_PROMPTS // 2
    return [[p for step, _, p in seen if step // rounds == epoch] for epoch in range(NUM_EPOCHS)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nemo_rl_3599_every_prompt_once_per_epoch_whatever_stops_the_run(tmp_path, schedule, seed):
    restarts = run_with_restarts(tmp_path, schedule, np.random.default_rng([seed, len(schedule)]))
    assert restarts >= 2, "a run that was never stopped proves nothing"
    epochs = prompts_by_epoch(tmp_path)
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i) for i in range(NUM_PROMPTS)]] * NUM_EPOCHS
    assert epochs[0] != epochs[1], "each epoch has an order of its own"


def test_nemo_rl_3599_rewards_see_every_prompt_once_per_epoch_too(tmp_path):
    """Not from our own records: what the reward function was asked to score, over three clean restarts."""
    asked = []

    def reward(prompts, completion_ids, **_):
        asked.extend(dict.fromkeys(prompts))
        return [float(sum(ids) % 2) for ids in completion_ids]

    settings = {"max_steps": -1, "num_train_epochs": NUM_EPOCHS, "reward_funcs": [reward], **SAVES}
    for at in (3, 4, 9, 99):  # inside an epoch, at its end, inside the last
        train(
            ScriptedFast, tmp_path, resume=at != 3 or None, callbacks=[Ends(at, "asked")],
            trainer_kwargs={"fastrl": FastRLConfig(tau=1.0)}, **settings,
        )  # fmt: skip
    everything = sorted(text_dataset(NUM_PROMPTS)["prompt"])
    epochs = [sorted(asked[NUM_PROMPTS * e : NUM_PROMPTS * (e + 1)]) for e in range(NUM_EPOCHS)]
    assert len(asked) == NUM_EPOCHS * NUM_PROMPTS
    assert epochs == [everything] * NUM_EPOCHS
