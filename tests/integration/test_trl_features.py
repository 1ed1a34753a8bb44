"""Features of GRPOTrainer that users rely on: the same gradient as stock TRL, and a published run that finishes."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from trl import GRPOTrainer
from trl_compare import KEEP_ALL, TOLERANCE, compare, logged, run, train_as_published
from trl_support import (
    NUM_WORDS,
    Scripted,
    ScriptedFast,
    ScriptedStock,
    relative_error,
    saved_text_model,
    text_dataset,
    text_model,
    vision_dataset,
)

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer
from fastrl.types import ConfigError

ROW_BY_ROW = True

REUSED = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1.0}
WITH_REFERENCE = {"beta": 0.3, "learning_rate": 1.0}
ADAPTIVE = {
    "use_adaptive_entropy": True,
    "entropy_coef": 0.5,
    "entropy_coef_delta": 0.05,
    "entropy_target": 9.0,
}


def dropping_model(*_):
    model = text_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.5))
    return model


def moe_model(*_):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": NUM_WORDS + 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    inner = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **heads, **experts, **inner))


def bfloat16_model(*_):
    return text_model().to(torch.bfloat16)


def lora(**settings):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


def adapted_model(*_):
    """A model with an adapter that has already been trained."""
    torch.manual_seed(3)
    return get_peft_model(text_model(), lora(init_lora_weights=False))


def rollouts_of_images(prompts, trainer):
    chat = {"tokenize": True, "add_generation_prompt": True, "return_dict": True}
    ids = trainer.processing_class.apply_chat_template(conversation=prompts, **chat)["input_ids"]
    completions = [[60 + (7 * i) % 50, 61, 62 + i % 5, 1] for i in range(len(ids))]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


# (settings, what switches the feature off again): stock TRL's gradients must differ between the two.
CHANGES_THE_GRADIENT = {
    "delta": ({"delta": 1.0005, "epsilon": 0.2, **REUSED}, {"delta": None}),
    "epsilon": ({"epsilon": 1e-4, "epsilon_high": 2e-4, **REUSED}, {"epsilon": 0.2, "epsilon_high": None}),
    "off_policy_mask": ({"off_policy_mask_threshold": 1e-6, **REUSED}, {"off_policy_mask_threshold": None}),
    "uncorrected_kl": (
        {"use_bias_correction_kl": False, **REUSED, **WITH_REFERENCE},
        {"use_bias_correction_kl": True},
    ),
    "sync_ref_model": (
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 4, **WITH_REFERENCE},
        {"sync_ref_model": False},
    ),
    "ref_model_mixup_alpha": (
        {"sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 4, "ref_model_mixup_alpha": 0.1}
        | WITH_REFERENCE,
        {"ref_model_mixup_alpha": 0.9},
    ),
    # Over the tokens of one micro-batch: comparable where a window has a single one, or all rows are alike.
    "top_entropy_quantile": ({"top_entropy_quantile": 0.3}, {"top_entropy_quantile": 1.0}),
    "entropy_coef": ({"entropy_coef": 0.5}, {"entropy_coef": 0.0}),
    "entropy_coef_in_two_steps": (
        {"entropy_coef": 0.5, "gradient_accumulation_steps": 2, "fixed_length": 5},
        {"entropy_coef": 0.0},
    ),
    "entropy_of_some_tokens": (
        {"entropy_coef": 0.5, "top_entropy_quantile": 0.3},
        {"top_entropy_quantile": 1.0},
    ),
    "adaptive_entropy": ({**ADAPTIVE, "max_steps": 4}, {"use_adaptive_entropy": False}),
    "adaptive_entropy_in_two_steps": (
        {**ADAPTIVE, "max_steps": 4, "gradient_accumulation_steps": 2, "fixed_length": 5},
        {"use_adaptive_entropy": False},
    ),
    "router_aux_loss": ({"model": moe_model, "router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.0}),
    "disable_dropout": ({"model": dropping_model, "disable_dropout": True}, {"disable_dropout": False}),
    "bf16": ({"bf16": True}, {"bf16": False}),
    "temperature": ({"temperature": 0.5}, {"temperature": 1.0}),
    "scale_none": ({"scale_rewards": "none"}, {"scale_rewards": "group"}),
    "scale_batch": ({"scale_rewards": "batch"}, {"scale_rewards": "group"}),
    "reward_weights": ({"reward_weights": [0.2, 3.0]}, {"reward_weights": None}),
    "normalize_then_sum": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"multi_objective_aggregation": "sum_then_normalize"},
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_neg": 4.0, "sapo_temperature_pos": 3.0} | REUSED,
        {"sapo_temperature_neg": 1.0, "sapo_temperature_pos": 1.0},
    ),
    "vespo": (
        {"loss_type": "vespo", "vespo_k_pos": 3.0, "vespo_lambda_neg": 1.0, **REUSED, "learning_rate": 0.2},
        {"vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0},
    ),
    "luspo_by_token": (
        {"loss_type": "luspo"} | REUSED,
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "max_grad_norm": ({"max_grad_norm": 0.01}, {"max_grad_norm": 0.0}),
    "adamw_with_warmup": (
        {"optim": "adamw_torch", "weight_decay": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2}
        | {"max_steps": 4},
        {"optim": "sgd", "weight_decay": 0.0},
    ),
    "shuffle_dataset": ({"shuffle_dataset": False}, {"shuffle_dataset": True}),
    "trained_adapter_as_reference": (
        {"model": adapted_model, "beta": 3.0, "learning_rate": 1.0, "gradient_accumulation_steps": 2},
        {"beta": 1e-6},
    ),
}


@pytest.mark.parametrize("feature", CHANGES_THE_GRADIENT)
def test_feature_gives_the_gradient_of_stock_trl(tmp_path, feature):
    settings, off = CHANGES_THE_GRADIENT[feature]
    _, _, expected = compare(tmp_path, **settings)
    _, without = run(ScriptedStock, tmp_path, **{**settings, **off})
    changes = [relative_error(a, b) for a, b in zip(expected, without, strict=True)]
    assert max(changes) > 10 * TOLERANCE, "the feature was not at work"
    train_as_published(tmp_path, **settings)


# Features that change how a step is computed, or nothing about it.
LEAVES_THE_GRADIENT = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "reentrant_checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        **REUSED,
        **WITH_REFERENCE,
    },
    "checkpointed_adapter": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "trainer_kwargs": {"peft_config": lora()},
        "beta": 0.1,
        "model": lambda _: text_model(),
    },
    "prefix_tuning": {
        "trainer_kwargs": {"peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)},
        "gradient_accumulation_steps": 2,
    },
    "generation_batch_size": {
        "generation_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 8,
    },
    "more_than_an_epoch": {"max_steps": -1, "num_train_epochs": 1.5},
    "activation_checkpointing": {"activation_checkpointing": True},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 1},
    "seeds_and_order_of_the_loader": {"data_seed": 5, "train_sampling_strategy": "group_by_length"},
    "counting_input_tokens": {"include_num_input_tokens_seen": "all"},
    "eval_on_start": {
        "eval_on_start": True,
        "eval_strategy": "epoch",
        "trainer_kwargs": {"eval_dataset": text_dataset(4)},
    },
}


@pytest.mark.parametrize("feature", LEAVES_THE_GRADIENT)
def test_feature_leaves_the_gradient_of_stock_trl(tmp_path, feature):
    settings = LEAVES_THE_GRADIENT[feature]
    compare(tmp_path, **settings)
    train_as_published(tmp_path, **settings)


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])  # slow to end
def test_loader_processes_leave_the_gradient_of_stock_trl(tmp_path, persistent):
    settings = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent, "max_steps": 6}
    compare(tmp_path, **settings)
    train_as_published(tmp_path, **settings)


# The same for a vision-language model: images go with their rows through every extra forward pass.
WITH_IMAGES = {
    "adapter_and_reference": {
        "trainer_kwargs": {"peft_config": lora()},
        "beta": 0.3,
        "learning_rate": 0.05,
        "num_iterations": 2,
        "max_steps": 4,
    },
    "reference": {"beta": 0.3, "learning_rate": 1e-3},
    "entropy": {"entropy_coef": 0.3, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
    "checkpointing_and_padding": {"gradient_checkpointing": True, "pad_to_multiple_of": 16},
    "rollout_func": {"trainer_kwargs": {"rollout_func": rollouts_of_images}},
    "evaluated": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "num_generations_eval": 2,
        "trainer_kwargs": {"eval_dataset": vision_dataset(4)},
    },
}


@pytest.mark.parametrize("feature", WITH_IMAGES)
def test_feature_with_images_gives_the_gradient_of_stock_trl(tmp_path, monkeypatch, feature):
    from fastrl import testbed

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = {"gradient_accumulation_steps": 2, "learning_rate": 1e-4, **WITH_IMAGES[feature]}
    settings |= {"dataset": vision_dataset(), "processing_class": testbed.load()[1]}
    settings["model"] = lambda _: testbed.load()[0]
    compare(tmp_path, **settings)
    train_as_published(tmp_path, **settings)


# TRL deals the rows of a round to windows at random: only their sum, at a fixed policy, is comparable.
DEALT_AT_RANDOM = {
    "windows_and_iterations": {
        "num_iterations": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
    },
    "misaligned": {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 3},
    "misaligned_iterations": {
        "num_iterations": 2,
        "steps_per_generation": 3,
        "gradient_accumulation_steps": 4,
        "max_steps": 3,
    },
}


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("schedule", DEALT_AT_RANDOM)
def test_windows_of_a_round_sum_to_stock_trl(tmp_path, schedule, loss):
    settings = {**DEALT_AT_RANDOM[schedule], "per_device_train_batch_size": 4, "loss_type": loss}
    compare(tmp_path, summed=True, learning_rate=0.0, **settings)
    train_as_published(tmp_path, **settings)


class CutOff(Scripted):
    """Every third rollout ends without an end token."""

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        return [ids[:-1] if i % 3 == 0 and len(ids) > 1 else ids for i, ids in enumerate(completions)], logps


class CutOffStock(CutOff, GRPOTrainer):
    pass


class CutOffFast(CutOff, FastGRPOTrainer):
    pass


@pytest.mark.parametrize("extra", [{}, REUSED, {"top_entropy_quantile": 0.5}], ids=["", "reused", "entropy"])
def test_truncated_completions_are_masked_as_by_stock_trl(tmp_path, extra):
    settings = {"mask_truncated_completions": True, **extra}
    _, _, expected = compare(tmp_path, stock=CutOffStock, fast=CutOffFast, **settings)
    _, unmasked = run(CutOffStock, tmp_path, **{**settings, "mask_truncated_completions": False})
    assert relative_error(expected[0], unmasked[0]) > 1e-3
    train_as_published(tmp_path, fast=CutOffFast, **settings)


def test_head_in_float32_under_bfloat16_weights(tmp_path):
    """Bfloat16 sums depend on the order of rows, so equal up to its rounding only."""
    settings = {"model": bfloat16_model, "cast_lm_head_to_fp32": True, "gradient_accumulation_steps": 2}
    _, trainer, _ = compare(tmp_path, tolerance=0.02, **settings)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.embed_tokens.weight.dtype == torch.bfloat16
    train_as_published(tmp_path, **settings)


def test_embedding_noise_is_applied_and_training_goes_on(tmp_path):
    """Noise is drawn per micro-batch, whose rows are in another order than TRL's: no equal gradients."""
    _, noisy = run(ScriptedFast, tmp_path, KEEP_ALL, neftune_noise_alpha=5.0)
    _, plain = run(ScriptedFast, tmp_path, KEEP_ALL)
    assert relative_error(noisy[0], plain[0]) > 1e-2
    train_as_published(tmp_path, neftune_noise_alpha=5.0)


def test_an_adapter_that_is_trained_on_is_its_own_frozen_reference(tmp_path):
    settings = {"model": adapted_model, "beta": 0.3, "learning_rate": 1.0}
    trainer = train_as_published(tmp_path, **settings)
    before = dict(adapted_model().named_parameters())
    moved = {"default": [], "ref": []}
    for name, value in trainer.model.named_parameters():
        for adapter in moved:
            if f".{adapter}." in name:
                start = before[name.replace(".ref.", ".default.")]
                moved[adapter].append(not torch.equal(value, start))
    assert any(moved["default"])
    assert moved["ref"]
    assert not any(moved["ref"])


def test_adaptive_entropy_goes_on_from_a_checkpoint(tmp_path):
    """Its coefficient and last entropy are TRL's own file beside ours: a resumed run equals a whole one."""
    settings = {**ADAPTIVE, "max_steps": 6, "save_strategy": "steps", "save_steps": 1}
    config = FastRLConfig(budget="fixed", tau=0.9)
    whole, gradients = run(ScriptedFast, tmp_path, config, **settings)
    resumed, tail = run(ScriptedFast, tmp_path, config, resume=str(tmp_path / "checkpoint-3"), **settings)
    assert whole.entropy_coef == pytest.approx(0.8)
    assert resumed.entropy_coef == whole.entropy_coef
    assert len(tail) == 3
    assert all(torch.equal(a, b) for a, b in zip(tail, gradients[3:], strict=True))


@pytest.mark.parametrize("in_window", [1, 2], ids=["", "two micro-batches"])
def test_a_step_that_trains_on_nothing_says_nothing_about_entropy(tmp_path, in_window):
    """The coefficient would take an entropy of 0 for a collapse, and rise."""
    settings = {**ADAPTIVE, "max_steps": 2, "gradient_accumulation_steps": in_window}
    config = FastRLConfig(budget="fixed", zero_variance="drop")
    same = {"reward_funcs": [lambda completions, **_: [1.0] * len(completions)]}
    trainer, _ = run(ScriptedFast, tmp_path, config, **same, **settings)
    assert trainer.entropy_coef == 0.5
    steps = trainer.state.log_history[:2]
    assert all(row["fastrl/trained/rows"] == 0 for row in steps)
    assert all(
        row["entropy"] is row["clip_ratio/region_mean"] is None for row in steps
    )  # TRL's word for no value

    trainer, _ = run(ScriptedFast, tmp_path, config, **settings)
    assert trainer.entropy_coef == pytest.approx(0.6)
    assert all(row["entropy"] > 0 for row in trainer.state.log_history[:2])


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_model_given_by_its_path(tmp_path, beta):
    def gradients(trainer_class, fastrl=None):
        model = str(tmp_path / "model")
        settings = {"beta": beta, "model_init_kwargs": {"dtype": "float32"}, "learning_rate": 1.0}
        return run(trainer_class, tmp_path, fastrl, model=lambda _: model, **settings)[1]

    saved_text_model(tmp_path / "model")
    expected, found = gradients(ScriptedStock), gradients(ScriptedFast, KEEP_ALL)
    assert float(expected[1].norm()) > 1e-3
    assert max(relative_error(a, b) for a, b in zip(found, expected, strict=True)) < TOLERANCE


def test_layer_kernels_of_liger_are_asked_for_and_nothing_else(tmp_path, monkeypatch):
    """Liger needs a package and a GPU. TRL 1.16 uses its layer kernels only, never its fused loss."""
    from transformers import trainer as transformers_trainer

    asked = []
    monkeypatch.setattr(transformers_trainer, "is_liger_kernel_available", lambda: True, raising=False)
    monkeypatch.setattr(
        transformers_trainer, "apply_liger_kernel", lambda _, config: asked.append(config), raising=False
    )
    _, found = run(ScriptedFast, tmp_path, KEEP_ALL, use_liger_kernel=True)
    _, plain = run(ScriptedFast, tmp_path, KEEP_ALL)
    assert asked == [{"fused_linear_cross_entropy": False}]
    assert torch.equal(found[0], plain[0])


@pytest.mark.slow
def test_compiled_model(tmp_path):
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 2}
    compare(tmp_path, **settings)
    trainer, gradients = run(ScriptedFast, tmp_path, FastRLConfig(), **settings)
    assert 0 < logged(trainer, "fastrl/trained/rows")[0] < 16
    assert torch.isfinite(gradients[0]).all()


# What is refused, by TRL or by FastRL


REFUSED = {
    "iterable": ({"dataset": text_dataset().to_iterable_dataset()}, ConfigError, "Give a map-style datasets"),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, ConfigError, "split_batches: true"),
    "dispatch_batches": (
        {"accelerator_config": {"dispatch_batches": True}},
        ConfigError,
        "dispatch_batches: true",
    ),
    "auto_find_batch_size": (
        {"auto_find_batch_size": True},
        ValueError,
        "auto_find_batch_size is not support",
    ),
    "adapter_on_the_head": (
        {"trainer_kwargs": {"peft_config": LoraConfig(target_modules=["lm_head"])}},
        ValueError,
        "adapter to `lm_head` is not supported",
    ),
    "synced_adapter": (
        {"sync_ref_model": True, "beta": 0.1, "trainer_kwargs": {"peft_config": lora()}},
        NotImplementedError,
        "currently not supported",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_work_is_refused_when_the_trainer_is_built(tmp_path, setting):
    settings, kind, message = REFUSED[setting]
    with pytest.raises(kind, match=message):
        run(ScriptedFast, tmp_path, KEEP_ALL, **settings)
