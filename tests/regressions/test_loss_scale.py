"""What the loss divides by: rows and tokens that nobody trains on were counted, a batch of nothing gave 0 / 0, and
the size of the step depended on how many micro-batches it was cut into.
"""

import functools

import pytest

pytest.importorskip("trl")

import torch
from scars_support import LOSSES, ShownFast, rows_of
from trl import GRPOTrainer
from trl_support import (
    Scripted,
    ScriptedFast,
    ScriptedStock,
    relative_error,
    saved_text_model,
    text_model,
    train,
)

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer

ROW_BY_ROW = True

pytestmark = pytest.mark.trl

TOLERANCE = 1e-5
KEEP_SCORABLE = {"pruner": "none", "budget": "fixed", "zero_variance": "drop"}
each_loss = pytest.mark.parametrize("loss", LOSSES)


def assert_equal_gradients(found, expected):
    assert len(found) == len(expected) > 0
    assert max(float(gradient.norm()) for gradient in expected) > 1e-4, "a test of zeros proves nothing"
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < TOLERANCE


# Rows whose every token is masked (trl PR 6439, miles PR 2796)


class CutOff(Scripted):
    """Rollouts from `first_cut` on in each group end without an end token, so that TRL masks all their tokens."""

    first_cut = 2

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        place = [i % self.args.num_generations for i in range(len(prompt_ids))]
        cut = [[5] * 7 if p >= self.first_cut else ids for p, ids in zip(place, completions, strict=True)]
        return cut, logps


class CutOffFast(CutOff, FastGRPOTrainer):
    pass


class CutOffStock(CutOff, GRPOTrainer):
    pass


def fair(completion_ids, prompts, **_):
    """0 and 1 for the two real rollouts, and their mean for the cut off ones: these leave the baseline as it is."""
    size = len(prompts) // len(dict.fromkeys(prompts))
    return [(0.0, 1.0, 0.5, 0.5)[i % size] for i in range(len(prompts))]


@functools.cache
def with_masked_rows(folder, loss, denominator, num_masked, accumulation):
    size = 2 + num_masked
    config = FastRLConfig(**KEEP_SCORABLE, denominator=denominator)
    return train(
        CutOffFast, folder, reward_funcs=[fair], num_generations=size, scale_rewards="none",
        mask_truncated_completions=True, gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=4 * size // accumulation, trainer_kwargs={"fastrl": config}, **LOSSES[loss],
    )[1]  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "denominator"), [*((loss, "kept") for loss in LOSSES), ("dapo", "full"), ("cispo", "full")]
)
def test_miles_2796_masked_rows_count_for_nothing(tmp_path_factory, loss, denominator):
    """`full` counts sampled rows, masked or not, but never a masked token: so it is here for the token sums."""
    folder = tmp_path_factory.getbasetemp()
    expected = with_masked_rows(folder, loss, denominator, 0, 1)
    for accumulation in (1, 2):
        found = with_masked_rows(folder, loss, denominator, 2, accumulation)
        assert_equal_gradients(found, expected)


# A batch of nothing (unsloth-zoo PR 1286)


def optimizer_state(trainer):
    return [(s["step"], s["exp_avg"], s["exp_avg_sq"]) for s in trainer.optimizer.optimizer.state.values()]


def assert_same_optimizer(fast, stock):
    for found, expected in zip(optimizer_state(fast), optimizer_state(stock), strict=True):
        assert float(found[0]) == float(expected[0]), "steps that the optimizer has counted"
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert relative_error(a, b) < 1e-4
    for a, b in zip(fast.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def dies_after_one_step():
    """Every rollout of the second and third round earns the same."""
    calls = []

    def reward(completion_ids, **_):
        calls.append(1)
        return [float(len(ids)) if len(calls) == 1 else 1.0 for ids in completion_ids]

    return reward


ADAM = {
    "optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1, "adam_epsilon": 1e-4, "max_steps": 3,
    "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4,
}  # fmt: skip


@each_loss
def test_unsloth_zoo_1286_all_rows_dropped_is_a_step_of_zero(tmp_path, loss):
    """The optimizer ends where stock TRL's does: it steps on gradients that are exactly 0."""
    settings = {**ADAM, **LOSSES[loss]}
    config = FastRLConfig(**KEEP_SCORABLE, denominator="full")
    stock, _ = train(ScriptedStock, tmp_path, reward_funcs=[dies_after_one_step()], **settings)
    fast, gradients = train(
        ScriptedFast, tmp_path, reward_funcs=[dies_after_one_step()], trainer_kwargs={"fastrl": config}, **settings
    )  # fmt: skip
    assert float(gradients[0].norm()) > 1e-4
    assert [float(g.abs().max()) for g in gradients[1:]] == [0.0, 0.0]
    losses = [entry["loss"] for entry in fast.state.log_history if "loss" in entry]
    assert losses[1:] == [0.0, 0.0]
    assert_same_optimizer(fast, stock)


@pytest.mark.parametrize(
    ("loss", "beta"), [*((loss, 0.0) for loss in LOSSES), ("grpo", 0.04), ("dapo", 0.04)]
)
def test_unsloth_zoo_1286_all_tokens_masked_is_finite(tmp_path, monkeypatch, loss, beta):
    """No token to average over, not even for the KL term."""
    monkeypatch.setattr(CutOff, "first_cut", 0)
    settings = {**ADAM, **LOSSES[loss], "mask_truncated_completions": True, "beta": beta}
    fast, gradients = train(
        CutOffFast, tmp_path, model=saved_text_model(tmp_path / "m") if beta else text_model(), **settings,
        trainer_kwargs={"fastrl": FastRLConfig(budget="fixed", tau=0.9)},
    )  # fmt: skip
    assert [float(g.abs().max()) for g in gradients] == [0.0] * 3
    assert [entry["loss"] for entry in fast.state.log_history if "loss" in entry] == [0.0] * 3
    if not beta:
        stock, _ = train(CutOffStock, tmp_path, **settings)
        assert_same_optimizer(fast, stock)


# Cut into micro-batches (ms-swift#10117, trl#5619, open-instruct PR 1161)


@functools.cache
def accumulated(folder, loss, denominator, accumulation):
    """Two optimizer steps of 16 rollouts; the published pruner leaves an uneven number of them."""
    config = FastRLConfig(budget="fixed", tau=0.9, denominator=denominator)
    trainer, gradients = train(
        ShownFast, folder, gradient_accumulation_steps=accumulation, per_device_train_batch_size=16 // accumulation,
        trainer_kwargs={"fastrl": config}, **LOSSES[loss],
    )  # fmt: skip
    sizes = [(step, len(list(rows_of(inputs)))) for step, inputs in trainer.shown]
    parameters = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return gradients, parameters, sizes


@each_loss
@pytest.mark.parametrize("denominator", ["kept", "full"])
@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_trl_5619_accumulation_does_not_change_the_step(tmp_path_factory, loss, denominator, accumulation):
    folder = tmp_path_factory.getbasetemp()
    expected, parameters, _ = accumulated(folder, loss, denominator, 1)
    found, found_parameters, sizes = accumulated(folder, loss, denominator, accumulation)
    assert_equal_gradients(found, expected)
    assert relative_error(found_parameters, parameters) < TOLERANCE
    for step in (0, 1):
        in_step = [size for s, size in sizes if s == step]
        assert 0 < sum(in_step) < 16, "something is pruned"
        assert len(in_step) > 1, "and what is left is cut"
    if accumulation < 8:
        assert any(len({size for s, size in sizes if s == step}) > 1 for step in (0, 1)), "unevenly"


@each_loss
def test_open_instruct_1161_the_sum_of_two_windows_does_not_depend_on_the_cut(tmp_path, loss):
    """At a fixed policy: rows are dealt to windows at random, so their sum is what can be compared."""
    sums = []
    for micro_steps, accumulation in ((2, 1), (4, 2), (8, 4)):
        config = FastRLConfig(budget="fixed", tau=0.9, denominator="full")
        _, gradients = train(
            ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, learning_rate=0.0,
            per_device_train_batch_size=16 // micro_steps, steps_per_generation=micro_steps,
            gradient_accumulation_steps=accumulation, **LOSSES[loss],
        )  # fmt: skip
        assert len(gradients) == 2
        sums.append(sum(gradients))
    assert_equal_gradients(sums[1:], [sums[0]] * 2)


# Fewer rows than a micro-batch (verl#2505)


@pytest.mark.parametrize(
    ("loss", "num_kept"), [*(("grpo", n) for n in range(9)), *(("dapo", n) for n in (0, 1, 5, 8))]
)
def test_verl_2505_any_number_of_rows_from_none_to_two_micro_batches(tmp_path, loss, num_kept):
    """One group of eight; micro-batches of four, of one, and one of eight that holds everything."""

    def reward(completion_ids, **_):
        return [float(i if num_kept else 1) for i in range(len(completion_ids))]

    config = FastRLConfig(
        budget="fixed", pruner="random", keep_share=max(num_kept, 1) / 8, zero_variance="drop", align="dummy"
    )
    gradients, shown = [], []
    for accumulation in (1, 2, 8):
        trainer, found = train(
            ShownFast, tmp_path, reward_funcs=[reward], num_generations=8, max_steps=1,
            per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
            trainer_kwargs={"fastrl": config}, **LOSSES[loss],
        )  # fmt: skip
        gradients += found
        shown.append(trainer.shown)
        assert sum(len(list(rows_of(inputs))) for _, inputs in trainer.shown) == num_kept
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    if num_kept:
        assert_equal_gradients(gradients[1:], [gradients[0]] * 2)
    else:
        assert [float(gradient.abs().max()) for gradient in gradients] == [0.0] * 3
    used = [max(1, -(-num_kept // (8 // accumulation))) for accumulation in (1, 2, 8)]
    assert [len(forwards) for forwards in shown] == used, "no micro-batch of nothing but the one that must be"
