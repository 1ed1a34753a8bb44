"""With `pruner: none` FastGRPOTrainer is GRPOTrainer: what people expect of it holds, and the names stay TRL's."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl_compare import KEEP_ALL, chat_model, chat_tokenizer, logged, run
from trl_support import length_reward, parity_reward, text_dataset, text_model

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import FastGRPOTrainer

LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo"]


def state_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(before, model):
    return {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}


def trained(folder, *, trainer_class=FastGRPOTrainer, fastrl=KEEP_ALL, make=None, **settings):
    """Train with real sampling; returns the trainer and the names of the parameters that moved."""
    before = {}

    def model(path):
        made = (make or (lambda _: text_model()))(path)
        before.update(state_of(made))
        return made

    trainer, _ = run(trainer_class, folder, fastrl, model=model, **{"max_steps": 3, **settings})
    return trainer, changed(before, trainer.model) if before.keys() == state_of(
        trainer.model
    ).keys() else None


# Training


@pytest.mark.parametrize("loss", LOSSES)
def test_training_moves_every_parameter(tmp_path, loss):
    trainer, moved = trained(tmp_path, loss_type=loss)
    assert moved == set(dict(trainer.model.named_parameters()))
    assert all(abs(value) < 10 for value in logged(trainer, "loss"))
    assert trainer.state.global_step == 3
    assert logged(trainer, "train_loss")


def test_steps_and_epochs_are_those_of_the_arguments(tmp_path):
    trainer, _ = trained(tmp_path, max_steps=-1, num_train_epochs=3)
    assert trainer.state.global_step == 12  # 8 prompts, 2 in a step
    assert trainer.state.epoch == 3.0


def test_only_the_adapter_is_trained(tmp_path):
    base = state_of(text_model())
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer, _ = trained(tmp_path, trainer_kwargs={"peft_config": adapter}, learning_rate=1.0)
    moved = []
    for name, value in trainer.model.named_parameters():
        if "lora_" in name:
            moved.append("lora_B" in name and bool(value.detach().abs().max() > 0))
        else:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(base[plain], value), name
    assert sum(moved) == 4  # two layers, two projections; they start at zero


# Reward functions


def none_for_some(completion_ids, **_):
    return [None if i % 4 == 0 else float(len(ids) % 3) for i, ids in enumerate(completion_ids)]


REWARDS = {
    "one": ([length_reward], None),
    "two": ([length_reward, parity_reward], None),
    "weighted": ([length_reward, parity_reward], [0.7, 0.3]),
    "none_for_some": ([none_for_some], None),
    "none_from_one_of_two": ([none_for_some, length_reward], None),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_reward_functions(tmp_path, kind):
    functions, weights = REWARDS[kind]
    trainer, moved = trained(
        tmp_path, reward_funcs=functions, reward_weights=weights, max_completion_length=6
    )
    assert moved
    means = [logged(trainer, f"rewards/{function.__name__}/mean") for function in functions]
    assert all(len(values) == 3 for values in means)
    if kind != "none_from_one_of_two":  # there the mean of a sum is not the sum of the means
        weighted = [w * sum(values) for w, values in zip(weights or [1.0] * len(means), means, strict=True)]
        assert sum(logged(trainer, "reward")) == pytest.approx(sum(weighted), rel=1e-5)


def test_a_reward_list_of_wrong_length_is_refused_with_both_counts(tmp_path):
    with pytest.raises(ValueError, match="returned 7 rewards, but 8 were expected"):
        trained(tmp_path, reward_funcs=[lambda completions, **_: [0.0] * (len(completions) - 1)])


def test_weights_for_other_functions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Number of reward weights"):
        trained(tmp_path, reward_funcs=[length_reward], reward_weights=[0.5, 0.5])


def test_columns_of_the_data_set_reach_the_reward_function_beside_their_prompt(tmp_path):
    prompts = text_dataset()["prompt"]
    columns = {"solution": [f"of {prompt}" for prompt in prompts], "id": [f"row-{i}" for i in range(8)]}
    seen = []

    def reward(prompts, completions, completion_ids, solution, id, **others):
        assert solution == [f"of {prompt}" for prompt in prompts]
        assert sorted(others) == ["log_extra", "log_metric", "trainer_state"]
        assert all(isinstance(text, str) for text in completions)
        seen.extend(zip(prompts, id, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trained(tmp_path, dataset=Dataset.from_dict({"prompt": prompts, **columns}), reward_funcs=[reward])
    assert len(seen) == 24
    assert all(prompts[int(row.removeprefix("row-"))] == prompt for prompt, row in seen)
    runs = [seen[i][1] for i in range(0, 24, 4)]
    assert [row for row in runs for _ in range(4)] == [row for _, row in seen], "groups lie together"


# Prompts and completions


@pytest.mark.parametrize("limit", [1, 4])
def test_completions_keep_to_the_limit(tmp_path, limit):
    lengths = []

    def reward(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [float(sum(ids) % 2) for ids in completion_ids]

    trainer, _ = trained(tmp_path, reward_funcs=[reward], max_completion_length=limit)
    assert len(lengths) == 24
    assert max(lengths) <= limit
    assert max(logged(trainer, "completions/max_length")) == max(lengths)


def test_chat_prompts_give_chat_completions(tmp_path):
    prompts = [[{"role": "user", "content": f"start w{i}"}] for i in range(8)]

    def reward(prompts, completions, completion_ids, **_):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        assert all([message["role"] for message in messages] == ["assistant"] for messages in completions)
        assert all(isinstance(messages[0]["content"], str) for messages in completions)
        return [float(sum(ids) % 2) for ids in completion_ids]

    settings = {"reward_funcs": [reward], "processing_class": chat_tokenizer(), "make": chat_model}
    _, moved = trained(tmp_path, dataset=Dataset.from_dict({"prompt": prompts}), **settings)
    assert moved


def test_settings_of_the_chat_template_reach_it(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ 'w7 ' * times }}" + tokenizer.chat_template
    lengths = []
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": "start"}]] * 8})
    for times in (1, 5):
        settings = {"processing_class": tokenizer, "make": chat_model, "max_steps": 1}
        trainer, _ = trained(
            tmp_path,
            dataset=prompts,
            chat_template_kwargs={"times": times},
            max_completion_length=2,
            **settings,
        )
        lengths.append(logged(trainer, "num_tokens")[0])
    assert lengths[1] - lengths[0] >= 8 * 4 - 8, (
        "8 rollouts, 4 more words each; completions differ by 8 at most"
    )


# What is logged


LOGGED = {
    "plain": {},
    "reference": {"beta": 0.1},
    "cispo": {"loss_type": "cispo"},
    "vespo": {"loss_type": "vespo"},
    "sapo": {"loss_type": "sapo"},
    "entropy": {"entropy_coef": 0.1},
    "evaluated": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "trainer_kwargs": {"eval_dataset": text_dataset(2)},
    },
}


@pytest.mark.parametrize("config", [KEEP_ALL, FastRLConfig()], ids=["keep_all", "published"])
@pytest.mark.parametrize("kind", LOGGED)
def test_metrics_are_those_of_trl_and_ours_beside_them(tmp_path, kind, config):
    settings = {**LOGGED[kind], "make": None, "gradient_accumulation_steps": 2}
    if "beta" in settings:
        text_model().save_pretrained(tmp_path / "model")
        settings["make"] = lambda path: type(text_model()).from_pretrained(path)
    stock, _ = trained(tmp_path, trainer_class=GRPOTrainer, fastrl=None, **settings)
    fast, _ = trained(tmp_path, fastrl=config, **settings)
    assert len(fast.state.log_history) == len(stock.state.log_history)
    for ours, trls in zip(fast.state.log_history, stock.state.log_history, strict=True):
        assert {key for key in ours if not key.startswith("fastrl/")} == set(trls)
        assert ("fastrl/kept/frac" in ours) == ("reward" in trls)
    if kind == "evaluated":
        assert len(logged(fast, "eval_reward")) == 3


# Sampling: the same settings reach generation, so the same random numbers give the same rollouts.


class Sampled(GRPOTrainer):
    """Remembers what was sampled."""

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        self.sampled = [*getattr(self, "sampled", []), *completions]
        return completions, logps


class SampledFast(Sampled, FastGRPOTrainer):
    pass


SAMPLING = {
    "greedy": {"generation_kwargs": {"do_sample": False}},
    "min_new_tokens": {"generation_kwargs": {"min_new_tokens": 7, "top_k": 5}},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.3},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "cache": {"cache_implementation": "static", "top_k": 2},
    "max_completion_length": {"max_completion_length": 3},
    "left_padding": {"pad_to_multiple_of": 8, "top_k": 2},
}


def sample(trainer_class, folder, fastrl=None, **settings):
    rewards = [parity_reward, length_reward]
    trainer, gradients = run(
        trainer_class, folder, fastrl, reward_funcs=rewards, learning_rate=0.01, **settings
    )
    return trainer.sampled, gradients


@pytest.fixture(scope="module")
def sampled_by_default(tmp_path_factory):
    return sample(Sampled, tmp_path_factory.mktemp("run"))[0]


@pytest.mark.filterwarnings("ignore:share_prompt.*cache_implementation:UserWarning")
@pytest.mark.parametrize("setting", SAMPLING)
def test_sampling_settings_give_the_rollouts_of_stock_trl(tmp_path, sampled_by_default, setting):
    expected, gradients = sample(Sampled, tmp_path, **SAMPLING[setting])
    found, equal = sample(SampledFast, tmp_path, KEEP_ALL, **SAMPLING[setting])
    assert found == expected
    assert found != sampled_by_default, "the setting was not at work"
    assert all(float((a - b).norm()) < 1e-4 for a, b in zip(equal, gradients, strict=True))


@pytest.mark.slow
def test_continuous_batching_of_transformers(tmp_path):
    """It runs on a CPU, though slowly, and draws its random numbers in threads: no equal rollouts."""
    settings = {"use_transformers_continuous_batching": True, "max_steps": 1}
    for config in (KEEP_ALL, FastRLConfig(budget="fixed")):
        completions, gradients = sample(SampledFast, tmp_path, config, **settings)
        assert len(completions) == 8
        assert all(0 < len(ids) <= 10 for ids in completions)
        assert float(gradients[0].norm()) > 1e-4


# What was looked at

# Every setting that TRL adds to transformers' own. A new one fails the test below: look at it, then list it.
LOOKED_AT = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations
num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations
epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile
entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print log_unique_prompts
log_completions_hub_repo use_transformers_continuous_batching transformers_continuous_batching_config
use_transformers_paged vllm_importance_sampling_cap
"""


def test_every_setting_of_trl_was_looked_at():
    own = {field.name for field in dataclasses.fields(GRPOConfig)}
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert own - inherited == set(LOOKED_AT.split()) - inherited
