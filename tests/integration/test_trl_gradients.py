"""FastRL keeps TRL's own gradient wherever it claims to: the same rollouts through both trainers."""

import functools

import pytest
import torch
from trl_support import (
    ScriptedFast,
    ScriptedStock,
    relative_error,
    saved_text_model,
    text_model,
    train,
    vision_dataset,
)

from fastrl.config import FastRLConfig

TOLERANCE = 1e-5
KEEP_ALL = FastRLConfig(pruner="none", budget="fixed")
DROP_ZERO_VARIANCE = FastRLConfig(pruner="none", budget="fixed", zero_variance="drop", denominator="full")

LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo")},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    """Gradients of a run, computed once per setting."""

    @functools.cache
    def run(trainer_class, fastrl, loss, accumulation, extra=()):
        # TRL's bnpo value depends on which rows share a micro-batch, unless all have one length.
        settings = {**LOSSES[loss], **dict(extra), "gradient_accumulation_steps": accumulation}
        settings["per_device_train_batch_size"] = 16 // accumulation
        kwargs = {"fastrl": fastrl} if fastrl else {}
        fixed = 5 if loss == "bnpo" and accumulation > 1 else None
        folder = tmp_path_factory.mktemp("run")
        model = saved_text_model(folder / "model") if settings.get("beta") else None
        return train(
            trainer_class, folder, model=model, fixed_length=fixed, trainer_kwargs=kwargs, **settings
        )[1]  # fmt: skip

    return run


def assert_equal_gradients(found, expected):
    assert len(found) == len(expected) > 0
    assert max(gradient.norm() for gradient in expected) > 1e-4, "a test of zeros proves nothing"
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < TOLERANCE


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("fastrl", [KEEP_ALL, DROP_ZERO_VARIANCE], ids=["keep_all", "drop_zero_variance"])
def test_gradient_equals_stock_trl(gradients, fastrl, loss, accumulation):
    found = gradients(ScriptedFast, fastrl, loss, accumulation)
    assert_equal_gradients(found, gradients(ScriptedStock, None, loss, accumulation))


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo"])
def test_gradient_equals_stock_trl_with_reference_kl(gradients, loss):
    extra = (("beta", 0.04),)
    found = gradients(ScriptedFast, KEEP_ALL, loss, 2, extra)
    assert_equal_gradients(found, gradients(ScriptedStock, None, loss, 2, extra))


@pytest.mark.parametrize("fastrl", [KEEP_ALL, DROP_ZERO_VARIANCE], ids=["keep_all", "drop_zero_variance"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_gradient_equals_stock_trl_over_two_iterations(gradients, fastrl, loss):
    extra = (("num_iterations", 2), ("max_steps", 4))
    found = gradients(ScriptedFast, fastrl, loss, 2, extra)
    assert_equal_gradients(found, gradients(ScriptedStock, None, loss, 2, extra))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_two_windows_per_round_sum_to_stock_trl(gradients, loss):
    """TRL deals rows to the windows at random, so only their sum (at a fixed policy) is comparable."""
    extra = (("steps_per_generation", 4), ("learning_rate", 0.0), ("per_device_train_batch_size", 4))
    found = gradients(ScriptedFast, DROP_ZERO_VARIANCE, loss, 2, extra)
    expected = gradients(ScriptedStock, None, loss, 2, extra)
    assert len(found) == len(expected) == 2
    assert_equal_gradients([sum(found)], [sum(expected)])


@pytest.mark.parametrize("fastrl", [KEEP_ALL, DROP_ZERO_VARIANCE], ids=["keep_all", "drop_zero_variance"])
def test_gradient_equals_stock_trl_with_one_and_two_images(tmp_path, fastrl):
    from fastrl import testbed

    def run(trainer_class, **trainer_kwargs):
        model, processor = testbed.load()
        settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
        return train(
            trainer_class, tmp_path, model=model, dataset=vision_dataset(), processing_class=processor,
            trainer_kwargs=trainer_kwargs, **settings,
        )[1]  # fmt: skip

    assert_equal_gradients(run(ScriptedFast, fastrl=fastrl), run(ScriptedStock))


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_gradient_of_a_lora_adapter_equals_stock_trl(tmp_path, beta):
    """With an adapter the reference is the same model without it."""
    from peft import LoraConfig

    def run(trainer_class, **trainer_kwargs):
        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        settings = {"beta": beta, "gradient_accumulation_steps": 2, "learning_rate": 0.5}
        return train(
            trainer_class, tmp_path, trainer_kwargs={"peft_config": adapter, **trainer_kwargs}, **settings
        )[1]

    assert_equal_gradients(run(ScriptedFast, fastrl=KEEP_ALL), run(ScriptedStock))


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo"])
@pytest.mark.parametrize("denominator", ["kept", "live", "full"])
def test_pruned_gradient_is_the_sum_over_survivors_by_the_denominator(tmp_path, loss, denominator):
    """The published setting, restated: sum over survivors of TRL's per-row terms, divided as configured."""
    config = FastRLConfig(budget="fixed", denominator=denominator, ngram=1, tau=0.9)
    settings = {"max_steps": 1, "gradient_accumulation_steps": 2, **LOSSES[loss]}
    trainer, found = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, **settings)
    rows = [(m, i) for m in trainer._micro_batches if m is not None for i in range(len(m["advantages"]))]
    assert 0 < len(rows) < 16, "some rollouts must be pruned"
    all_tokens = torch.tensor(trainer._num_tokens)
    advantages = torch.stack([m["advantages"][i] for m, i in rows])
    survivors = float(len(rows))
    tokens = float(sum(m["completion_mask"][i].sum() for m, i in rows))
    live = _live_rows(trainer)
    num_rows = {"kept": survivors, "live": float(sum(live)), "full": 16.0}[denominator]
    num_tokens = {
        "kept": tokens,
        "live": float(all_tokens[torch.tensor(live)].sum()),
        "full": float(all_tokens.sum()),
    }[denominator]

    model = text_model()
    total = torch.zeros(())
    for (micro_batch, i), advantage in zip(rows, advantages, strict=True):
        prompt = micro_batch["prompt_ids"][i][micro_batch["prompt_mask"][i].bool()]
        completion = micro_batch["completion_ids"][i][micro_batch["completion_mask"][i].bool()]
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        term = {
            "grpo": logps.mean() / num_rows,
            "gspo": logps.mean() / num_rows,
            "dr_grpo": logps.sum() / (10 * num_rows),
            "dapo": logps.sum() / num_tokens,
            "bnpo": logps.sum() / num_tokens,
        }[loss]
        total = total - advantage * term
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    assert relative_error(found[0], expected) < TOLERANCE


def _live_rows(trainer):
    """Rows of groups whose scripted rewards differ, in sampling order."""
    rewards = trainer._rewards_per_func.sum(1).view(-1, 4)
    return ((rewards.max(1).values - rewards.min(1).values) > 1e-6).repeat_interleave(4).tolist()
