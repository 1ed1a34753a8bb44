"""What users rely on: cost follows the survivors, stock stays stock, bad input comes to a clear end."""

import math

import pytest
import torch
from trl import GRPOTrainer
from trl_support import (
    ScriptedFast,
    ScriptedStock,
    length_reward,
    parity_reward,
    relative_error,
    saved_text_model,
    text_dataset,
    text_model,
    text_tokenizer,
    train,
    vision_dataset,
)

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer, FastRLMixin, TimedGRPOTrainer, signature_problems
from fastrl.trace import read_rollouts
from fastrl.types import ConfigError, FastRLError, GroupError, NoSignalError

ROW_BY_ROW = True

PAPER_FIXED = FastRLConfig(budget="fixed", tau=0.9)


def count_rows(model, rows):
    """Append (with gradient?, rows) for every forward pass of the model."""
    return model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append((torch.is_grad_enabled(), len(kwargs["input_ids"]))),
        with_kwargs=True,
    )


# Cost


def test_old_reference_and_current_forwards_see_survivors_only(tmp_path):
    model, rows = saved_text_model(tmp_path / "m"), []
    count_rows(model, rows)
    settings = {"beta": 0.04, "num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 2}

    class CountsReference(ScriptedFast):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            count_rows(self.ref_model, rows)

    trainer, _ = train(
        CountsReference, tmp_path, model=model, trainer_kwargs={"fastrl": PAPER_FIXED}, **settings
    )
    kept = sum(len(m["advantages"]) for m in trainer._micro_batches if m is not None)
    assert 0 < kept < 16
    assert sum(n for grad, n in rows if not grad) == 2 * kept, "old and reference log-probs, once each"
    assert sum(n for grad, n in rows if grad) == 2 * kept, "two iterations over the survivors"


def test_surplus_micro_steps_are_skipped_and_steps_stay_the_same(tmp_path):
    model, rows = text_model(), []
    count_rows(model, rows)
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 3}
    config = FastRLConfig(budget="fixed", tau=1.0)
    trainer, gradients = train(
        ScriptedFast, tmp_path, model=model, trainer_kwargs={"fastrl": config}, **settings
    )
    assert trainer.state.global_step == len(gradients) == 3
    assert len(rows) < 12, "fewer forwards than micro-steps"
    assert all(n <= 4 for _, n in rows)
    skipped = [m is None for m in trainer._micro_batches]
    assert skipped == sorted(skipped, reverse=True), "the last micro-step of a window is real"


def test_micro_batches_are_sorted_by_length_and_trimmed(tmp_path):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 1}
    config = FastRLConfig(pruner="none", budget="fixed")
    trainer, _ = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, **settings)
    batches = [m for m in trainer._micro_batches if m is not None]
    lengths = [(m["prompt_mask"].sum(1) + m["completion_mask"].sum(1)).tolist() for m in batches]
    flat = [length for batch in lengths for length in batch]
    assert flat == sorted(flat, reverse=True)
    for m in batches:
        assert m["completion_mask"].sum(1).max() == m["completion_ids"].shape[1]
        assert m["prompt_mask"].sum(1).max() == m["prompt_ids"].shape[1]


@pytest.mark.parametrize("counts", [(1,), (1, 2), (0, 1, 2)])
def test_an_image_is_processed_once_per_prompt(tmp_path, monkeypatch, counts):
    from fastrl import testbed

    model, processor = testbed.load()
    seen = []
    kind = type(processor.image_processor)
    original = kind.__call__

    def counting(self, images, *args, **kwargs):
        flat = images if not isinstance(images[0], list) else [i for of_row in images for i in of_row or []]
        seen.append(len(flat))
        return original(self, images, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counting)
    dataset = vision_dataset(image_counts=counts)
    settings = {"per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 2, "learning_rate": 0.0}
    trainer, _ = train(
        ScriptedFast, tmp_path, model=model, dataset=dataset, processing_class=processor,
        trainer_kwargs={"fastrl": PAPER_FIXED}, **settings,
    )  # fmt: skip
    images = sum(len(row["images"]) for row in dataset)
    assert sum(seen) == images, "8 prompts in two rounds of 4: each prompt's images once"
    assert trainer.processing_class is processor


# Stock stays stock


def test_identity_samples_and_trains_like_stock_trl(tmp_path):
    """`pruner: none, budget: fixed` draws the same random numbers: the same rollouts, step after step."""

    def run(trainer_class, **trainer_kwargs):
        completions = []

        def remember(completion_ids, **_):
            completions.append([list(ids) for ids in completion_ids])
            return [float(len(set(ids)) % 3) for ids in completion_ids]

        settings = {"reward_funcs": [remember], "max_steps": 6, "learning_rate": 0.01}
        trainer, gradients = train(trainer_class, tmp_path, trainer_kwargs=trainer_kwargs, **settings)
        return completions, gradients, trainer

    stock, stock_gradients, _ = run(GRPOTrainer)
    fast, fast_gradients, trainer = run(FastGRPOTrainer, fastrl=FastRLConfig(pruner="none", budget="fixed"))
    assert fast == stock
    assert all(relative_error(a, b) < 1e-4 for a, b in zip(fast_gradients, stock_gradients, strict=True))
    assert trainer.fastrl.config.is_identity


def test_a_subclass_of_the_users_own_trainer_works(tmp_path):
    class MyTrainer(GRPOTrainer):
        def __init__(self, *args, extra=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.extra = extra

    class Mine(FastRLMixin, MyTrainer):
        pass

    trainer, gradients = train(
        Mine, tmp_path, trainer_kwargs={"fastrl": FastRLConfig(), "extra": 3}, max_steps=1
    )
    assert trainer.extra == 3
    assert torch.isfinite(gradients[0]).all()


def test_schedule_does_not_depend_on_what_is_kept(tmp_path):
    settings = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }
    stock, _ = train(ScriptedStock, tmp_path, **settings)
    fast, _ = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": FastRLConfig(tau=1.0)}, **settings)
    assert fast.state.max_steps == stock.state.max_steps
    assert fast.state.epoch == stock.state.epoch == 2.0
    rates = [[e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (fast, stock)]
    assert rates[0] == rates[1]


def test_baseline_with_clocks_is_stock_trl(tmp_path):
    class ScriptedTimed(ScriptedStock, TimedGRPOTrainer):
        pass

    timed, found = train(ScriptedTimed, tmp_path)
    _, expected = train(ScriptedStock, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert timed.state.log_history[0]["fastrl/time/update_s"] > 0
    assert timed.state.log_history[0]["fastrl/rollouts"] == 8


def test_evaluation_is_trls_own(tmp_path):
    tokenizer = text_tokenizer()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 1}

    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_num_tokens")

    def evaluation(trainer_class, **trainer_kwargs):
        trainer, _ = train(
            trainer_class, tmp_path, processing_class=tokenizer, learning_rate=0.0,
            trainer_kwargs={"eval_dataset": text_dataset(4), **trainer_kwargs}, **settings,
        )  # fmt: skip
        logged = next(entry for entry in trainer.state.log_history if "eval_reward" in entry)
        return {key: value for key, value in logged.items() if key not in timed}

    expected = evaluation(ScriptedStock)
    found = evaluation(ScriptedFast, fastrl=FastRLConfig(budget="fixed", tau=0.9, max_rollouts=3))
    assert math.isfinite(expected["eval_reward"])
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_unused_columns_are_removed_and_ids_stay_inside(tmp_path):
    seen = []

    def reward(completions, **kwargs):
        seen.append(sorted(kwargs))
        return [float(i % 2) for i in range(len(completions))]

    dataset = text_dataset().add_column("unused", ["x"] * 8)
    train(
        ScriptedFast,
        tmp_path,
        dataset=dataset,
        reward_funcs=[reward],
        remove_unused_columns=True,
        max_steps=1,
    )
    assert "fastrl_prompt_id" not in seen[0]
    assert "unused" not in seen[0]


# Metrics and records


def test_metrics_are_logged_beside_trls_own(tmp_path):
    trainer, _ = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": FastRLConfig()}, max_steps=1, num_train_epochs=1
    )
    logged = trainer.state.log_history[0]
    for key in (
        "reward", "num_rollouts/mean", "kept/mean", "kept/frac", "kept/tokens_frac", "top_up/frac", "rollouts",
        "frac_zero_variance", "frac_unscorable", "weight/max", "weight/effective_size", "trained/rows",
        "trained/tokens", "similarity/mean_within_class", "advantage/abs_mean_all", "advantage/abs_mean_kept",
        "budget/ars_current", "budget/ars_reference", "empty_steps", "time/generation_s", "time/rewards_s",
        "time/old_ref_s", "time/select_s", "time/update_s", "time/saved_est_s",
    ):  # fmt: skip
        assert key in logged or f"fastrl/{key}" in logged, key
    assert logged["fastrl/rollouts"] == 8
    assert logged["fastrl/trained/rows"] == logged["fastrl/kept/frac"] * 8


def test_rollout_records_are_written_on_demand(tmp_path):
    config = FastRLConfig(budget="fixed", trace=True)
    train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, max_steps=2)
    groups = read_rollouts(tmp_path / "fastrl")
    assert len(groups) == 4
    assert all(group.num_rollouts == 4 for group in groups)


# Degenerate steps


@pytest.mark.parametrize(
    "loss", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "vespo", "luspo"]
)
def test_a_step_in_which_nothing_survives_changes_nothing(tmp_path, loss):
    settings = (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        if loss == "gspo"
        else {"loss_type": loss}
    )
    config = FastRLConfig(budget="fixed", zero_variance="drop")
    trainer, gradients = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, gradient_accumulation_steps=2,
        reward_funcs=[lambda completions, **_: [1.0] * len(completions)], **settings,
    )  # fmt: skip
    assert len(gradients) == 2
    assert all(float(g.abs().max()) == 0.0 for g in gradients)
    assert trainer.state.log_history[0]["loss"] == 0.0
    assert trainer.state.log_history[-2]["fastrl/empty_steps"] == 2.0


def test_a_step_in_which_nothing_survives_keeps_images_consistent(tmp_path):
    from fastrl import testbed

    model, processor = testbed.load()
    _, gradients = train(
        ScriptedFast, tmp_path, model=model, dataset=vision_dataset(), processing_class=processor,
        trainer_kwargs={"fastrl": FastRLConfig(budget="fixed", zero_variance="drop")},
        reward_funcs=[lambda completions, **_: [1.0] * len(completions)],
    )  # fmt: skip
    assert all(float(g.abs().max()) == 0.0 for g in gradients)


def test_a_step_with_one_survivor(tmp_path):
    def one_scorable(completions, prompts, **_):
        return [1.0 if i == 1 else 0.0 if i == 2 else None for i in range(len(completions))]

    config = FastRLConfig(budget="fixed", pruner="random", keep_share=0.3, zero_variance="drop")
    trainer, gradients = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, reward_funcs=[one_scorable], max_steps=1
    )
    assert trainer.state.log_history[0]["fastrl/trained/rows"] == 1.0
    assert float(gradients[0].norm()) > 0
    assert torch.isfinite(gradients[0]).all()


def test_training_without_signal_stops_with_the_causes(tmp_path):
    config = FastRLConfig(budget="fixed", max_empty_steps=3)
    with pytest.raises(NoSignalError, match="64 all at 0"):
        train(
            ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, max_steps=40,
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        )  # fmt: skip


# Reward functions that fail


class BrokenReward:
    """Raises for the prompts that hold a word, as a function, an object, or a coroutine."""

    __name__ = "broken_reward"

    def __call__(self, prompts, **_):
        if any("w2" in prompt for prompt in prompts):  # the prompt with id 0
            raise RuntimeError("no such answer")
        return [0.0] * len(prompts)


async def broken_async(prompts, **_):
    return BrokenReward()(prompts)


def broken_function(prompts, **_):
    return BrokenReward()(prompts)


@pytest.mark.parametrize(
    ("reward", "name", "where"),
    [
        (broken_function, "broken_function", "prompt '0'"),
        (BrokenReward(), "broken_reward", "prompt '0'"),
        (broken_async, "broken_async", "prompts 7, 0"),
    ],
    ids=["function", "object", "async"],
)
def test_reward_that_raises_names_function_and_prompt(tmp_path, reward, name, where):
    with pytest.raises(RuntimeError, match="no such answer") as raised:
        train(ScriptedFast, tmp_path, reward_funcs=[parity_reward, reward])
    note = " ".join(raised.value.__notes__)
    assert repr(name) in note
    assert f"while scoring {where}" in note


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_unscorable_rollouts_are_never_kept_and_leave_their_siblings_alone(tmp_path, missing):
    def reward(completion_ids, **_):
        return [missing if i % 4 == 0 else float(i % 2) for i in range(len(completion_ids))]

    config = FastRLConfig(pruner="none", budget="fixed", denominator="kept")
    trainer, gradients = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, reward_funcs=[reward]
    )
    logged = trainer.state.log_history[0]
    assert logged["fastrl/frac_unscorable"] == 0.25
    assert logged["fastrl/trained/rows"] == 6
    assert all(torch.isfinite(g).all() for g in gradients)


def test_all_rollouts_unscorable_trains_nothing(tmp_path):
    trainer, gradients = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": FastRLConfig(budget="fixed")},
        reward_funcs=[lambda completions, **_: [None] * len(completions)],
    )  # fmt: skip
    assert all(float(g.abs().max()) == 0.0 for g in gradients)
    assert trainer.state.log_history[0]["fastrl/frac_unscorable"] == 1.0


def test_too_few_rewards_are_an_error_with_both_counts(tmp_path):
    def lazy_reward(completions, **_):
        return [1.0]

    with pytest.raises(ValueError, match=r"'lazy_reward' returned 1 rewards, but 8 were expected"):
        train(ScriptedFast, tmp_path, reward_funcs=[lazy_reward])


def test_infinite_reward_names_function_prompt_and_rollout(tmp_path):
    def explosive(completions, **_):
        return [float("inf") if i == 5 else 0.0 for i in range(len(completions))]

    with pytest.raises(GroupError, match="'explosive' returned inf for rollout 1 of prompt"):
        train(ScriptedFast, tmp_path, reward_funcs=[parity_reward, explosive])


def test_outcome_key_decides_zero_variance(tmp_path):
    """Shaped rewards differ in a group whose answers are all wrong: no signal, and A = 0 exactly."""

    def accuracy(completions, **_):
        return [0.0] * len(completions)

    config = FastRLConfig(budget="fixed", outcome_key="accuracy")
    trainer, gradients = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, reward_funcs=[accuracy, length_reward]
    )
    assert trainer.state.log_history[0]["fastrl/frac_zero_variance"] == 1.0
    assert all(float(g.abs().max()) == 0.0 for g in gradients)


# Refusals


def test_installed_trl_has_the_signatures_we_override():
    assert signature_problems() == []


def test_a_trainer_with_other_signatures_is_refused(tmp_path):
    class Drifted(GRPOTrainer):
        def _compute_loss(self, model, inputs_of_tomorrow):
            raise AssertionError

    class Mine(FastRLMixin, Drifted):
        pass

    with pytest.raises(FastRLError, match=r"Drifted._compute_loss takes \['model', 'inputs_of_tomorrow'\]"):
        train(Mine, tmp_path)


def test_unknown_outcome_key_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="'acc' is none of the reward functions parity_reward, length_reward"
    ):
        train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": FastRLConfig(outcome_key="acc")})


def test_iterable_datasets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="IterableDataset"):
        train(ScriptedFast, tmp_path, dataset=text_dataset().to_iterable_dataset())


def test_too_few_prompts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has 1 prompts, fewer than the 2 of one round"):
        train(ScriptedFast, tmp_path, dataset=text_dataset(1))


def test_dropping_zero_variance_groups_warns_about_their_kl(tmp_path):
    with pytest.warns(UserWarning, match="also drops the KL term"):
        train(
            ScriptedFast, tmp_path, model=saved_text_model(tmp_path / "m"), beta=0.1, max_steps=1, num_train_epochs=1,
            trainer_kwargs={"fastrl": FastRLConfig(budget="fixed", zero_variance="drop")},
        )  # fmt: skip


def test_ars_without_a_second_epoch_warns(tmp_path):
    with pytest.warns(UserWarning, match="this run has only 2: G_t stays at 4"):
        train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": FastRLConfig()}, max_steps=2)


def test_a_mixin_of_the_users_own_may_stand_behind_ours(tmp_path):
    class Logs:
        def log(self, logs, *args, **kwargs):
            super().log({**logs, "mine": 1.0}, *args, **kwargs)

    class Mine(FastRLMixin, Logs, ScriptedStock):
        pass

    trainer, _ = train(Mine, tmp_path, trainer_kwargs={"fastrl": PAPER_FIXED}, max_steps=1)
    assert trainer.state.log_history[0]["mine"] == 1.0


def test_a_sampler_of_the_users_own_that_is_not_used_is_named(tmp_path):
    class Curriculum(ScriptedStock):
        def _get_train_sampler(self, dataset=None):
            return super()._get_train_sampler(dataset)

    class Mine(FastRLMixin, Curriculum):
        pass

    with pytest.warns(UserWarning, match=r"Curriculum._get_train_sampler is not called"):
        train(Mine, tmp_path, trainer_kwargs={"fastrl": PAPER_FIXED}, max_steps=1)
