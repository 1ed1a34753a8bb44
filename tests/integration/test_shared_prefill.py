"""One prefill per prompt gives the tokens, logits and frequencies of the ordinary path; what cannot says why."""

import warnings

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
import transformers
from transformers import DynamicCache, GenerationConfig
from trl import GRPOConfig
from trl_support import parity_reward, text_dataset, text_model, text_tokenizer

from fastrl import FastRLConfig, testbed
from fastrl.data.testbed import dataset, problems
from fastrl.integrations._trl_prefill import VERIFIED, SharedPrefill
from fastrl.integrations._trl_prefix import SharedPrefix
from fastrl.integrations.trl import FastGRPOTrainer
from fastrl.rewards import accuracy_reward, format_reward
from fastrl.testbed.evaluation import conversation

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(autouse=True)
def generation_alone(monkeypatch):
    """Log-probs and update compute every row for itself here: see test_shared_prefix.py."""
    monkeypatch.setattr(
        "fastrl.integrations.trl.SharedPrefix", lambda model, is_on: SharedPrefix(model, is_on=False)
    )


TEXT = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
}  # fmt: skip
IMAGE_TOKEN, START, END = 50, 51, 52
FIRST, LAST = 3, 50  # ordinary words
COUNTS = [3, 1, 2, 4]


def text_only(kind):
    config = transformers.AutoConfig.for_model(kind, **TEXT)
    return transformers.AutoModelForCausalLM.from_config(config)


def qwen_vl(kind):
    tokens = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": START, "vision_end_token_id": END}
    text = {**TEXT, "rope_parameters": MROPE, "rope_scaling": MROPE}
    vision = {
        "qwen2_vl": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        "qwen2_5_vl": {**VISION, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 56},
        "qwen3_vl": {
            **VISION,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        },
    }[kind]
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, **tokens, video_token_id=53
    )
    return transformers.AutoModelForImageTextToText.from_config(config)


def prompts_of(kind, rng):
    """Four prompts of different lengths as (inputs of the prompts, inputs of COUNTS rows), padded left."""
    image = [START, *[IMAGE_TOKEN] * 4, END] if "vl" in kind else []
    rows = [[*image, *rng.integers(FIRST, LAST, size=n).tolist()] for n in (5, 2, 7, 3)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    fields = {
        "input_ids": ids,
        "attention_mask": (torch.arange(width) >= width - torch.tensor([[len(r)] for r in rows])).long(),
    }
    index = torch.repeat_interleave(torch.arange(4), torch.tensor(COUNTS))
    repeated = {name: value[index] for name, value in fields.items()}
    if image:
        pixels = torch.from_numpy(rng.normal(size=(4, 16, 3 * 2 * 14 * 14)).astype(np.float32))
        grid = torch.tensor([[1, 4, 4]] * 4)
        fields |= {
            "pixel_values": pixels.flatten(0, 1), "image_grid_thw": grid,
            "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        }  # fmt: skip
        repeated |= {
            "pixel_values": pixels[index].flatten(0, 1),
            "image_grid_thw": grid[index],
            "mm_token_type_ids": fields["mm_token_type_ids"][index],
        }
    return fields, repeated, index


def config_of(**changes):
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
    return GenerationConfig(**settings | changes, output_logits=True, return_dict_in_generate=True)


@pytest.mark.parametrize("kind", sorted(set(VERIFIED) - {"llava"}))
def test_greedy_tokens_and_logits_of_every_verified_model(kind):
    torch.manual_seed(0)
    model = (qwen_vl if "vl" in kind else text_only)(kind).eval()
    fields, repeated, index = prompts_of(kind, np.random.default_rng(0))
    wanted = model.generate(**repeated, generation_config=config_of())
    prefill = SharedPrefill(model)
    for _ in range(2):  # the first call compares, too
        with prefill.sharing(index):
            found = model.generate(**fields, generation_config=config_of())
        assert prefill.reason is None
        assert torch.equal(found.sequences, wanted.sequences)
        for a, b in zip(found.logits, wanted.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len({tuple(row.tolist()) for row in wanted.sequences}) == 4
    again = model.generate(**repeated, generation_config=config_of())
    assert torch.equal(again.sequences, wanted.sequences), "the model is as it was"
    assert not {"generate", "_prefill", "_expand_inputs_for_generation"} & set(model.__dict__)


def encoded(processor, chosen):
    return processor.apply_chat_template(
        [conversation(problem) for problem in chosen],
        add_generation_prompt=True, tokenize=True, return_dict=True,
        processor_kwargs={"return_tensors": "pt", "padding": True},
    )  # fmt: skip


def test_five_hundred_prompts_with_images_give_the_same_greedy_tokens():
    model, processor = testbed.load()
    prefill, rng = SharedPrefill(model.eval()), np.random.default_rng(0)
    config = config_of(max_new_tokens=24, pad_token_id=processor.tokenizer.pad_token_id, eos_token_id=None)
    config.eos_token_id = model.generation_config.eos_token_id
    held_out, images = problems("held_out", 500, 5), []
    handle = model.model.vision_tower.register_forward_pre_hook(
        lambda _, args, kwargs: images.append(len(args[0] if args else kwargs["pixel_values"])),
        with_kwargs=True,
    )
    for start in range(0, 500, 100):
        inputs = encoded(processor, held_out[start : start + 100])
        counts = torch.from_numpy(rng.integers(1, 4, size=100))
        index = torch.repeat_interleave(torch.arange(100), counts)
        wanted = model.generate(**inputs, generation_config=config).sequences
        images.clear()
        with prefill.sharing(index):
            found = model.generate(**inputs, generation_config=config).sequences
        assert sum(images) == (300 if start == 0 else 100), "each image once, and twice more to compare"
        assert prefill.reason is None
        assert torch.equal(found, wanted[index][:, : found.shape[1]])
    handle.remove()


def test_sampled_tokens_have_the_frequencies_of_the_model():
    torch.manual_seed(0)
    model = text_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # far from uniform
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    mask = (ids != 0).long()
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].softmax(-1)
    num, prefill = 6000, SharedPrefill(model)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=1, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(1)
    with prefill.sharing(torch.repeat_interleave(torch.arange(2), num)):
        drawn = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, -1]
    for prompt in range(2):
        counts = torch.bincount(
            drawn[prompt * num : (prompt + 1) * num], minlength=expected.shape[1]
        ).double()
        wanted = expected[prompt].double() * num
        usual = wanted >= 5
        chi2 = float((((counts - wanted) ** 2 / wanted)[usual]).sum())
        degrees = int(usual.sum()) - 1
        assert degrees >= 5
        assert chi2 < degrees + 4 * np.sqrt(2 * degrees) + 4, "beyond any chance of 1e-4"


def train(share, folder, model=None, steps=3, args=None, **settings):
    torch.manual_seed(0)
    config = GRPOConfig(
        str(folder), per_device_train_batch_size=16, num_generations=4, max_completion_length=8, max_steps=steps,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no",
        learning_rate=1e-3, top_k=0, gradient_checkpointing=False, **args or {},
    )  # fmt: skip
    arguments = {
        "model": model or text_model(), "processing_class": text_tokenizer(), "reward_funcs": parity_reward,
        "train_dataset": text_dataset(),
    } | settings  # fmt: skip
    fastrl = FastRLConfig(share_prompt=share, budget="fixed")
    trainer = FastGRPOTrainer(**arguments, args=config, fastrl=fastrl)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def test_training_is_the_same_and_says_what_it_saved(tmp_path):
    shared, ordinary = train("auto", tmp_path / "a"), train("off", tmp_path / "b")
    for a, b in zip(shared, ordinary, strict=True):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["completions/mean_length"] == b["completions/mean_length"]
        assert b["fastrl/prompt_tokens_saved"] == 0
        # Four prompts of 2 to 4 words: three of four rollouts of each do not pay for it.
        assert 3 * 4 * 2 <= a["fastrl/prompt_tokens_saved"] <= 3 * 4 * 4


def test_training_with_images_encodes_each_once(tmp_path):
    rows = {}
    for share in ("auto", "off"):
        model, processor = testbed.load()
        seen = []
        model.model.vision_tower.register_forward_pre_hook(
            lambda _, args, kwargs, seen=seen: (
                None
                if torch.is_grad_enabled()
                else seen.append(len(args[0] if args else kwargs["pixel_values"]))
            ),
            with_kwargs=True,
        )
        rows[share] = train(
            share, tmp_path / share, model, steps=2, processing_class=processor,
            reward_funcs=[accuracy_reward, format_reward], train_dataset=dataset("train", 8),
        )  # fmt: skip
        generated = [num for num in seen if num in (4, 16)]
        assert generated == ([4, 4, 4, 4] if share == "auto" else [16, 16]), "the first step compares"
    for a, b in zip(rows["auto"], rows["off"], strict=True):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    shared = train("auto", tmp_path / "a", peft_config=config)
    ordinary = train("off", tmp_path / "b", peft_config=config)
    assert [row["reward"] for row in shared] == [row["reward"] for row in ordinary]
    assert all(row["fastrl/prompt_tokens_saved"] > 0 for row in shared)


def test_an_answer_that_ends_at_once(tmp_path):
    model = text_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(model.lm_head.weight)))
    with torch.no_grad():
        model.lm_head.bias[1] = 50.0
    prefill = SharedPrefill(model.eval())
    with prefill.sharing(torch.tensor([0, 0, 1])):
        found = model.generate(
            input_ids=torch.tensor([[5, 6], [7, 8]]), attention_mask=torch.ones(2, 2).long(),
            generation_config=GenerationConfig(max_new_tokens=5, do_sample=True, pad_token_id=0, eos_token_id=1),
        )  # fmt: skip
    assert found[:, 2:].tolist() == [[1], [1], [1]]


def test_a_broken_cache_is_caught_and_training_goes_on_as_usual(tmp_path, monkeypatch):
    select = DynamicCache.batch_select_indices

    def of_another_prompt(self, indices):
        select(self, indices.flip(0))

    ordinary = train("off", tmp_path / "b")
    monkeypatch.setattr(DynamicCache, "batch_select_indices", of_another_prompt)
    with pytest.warns(UserWarning, match="share_prompt: logits of qwen2 differ by .* from the ordinary path"):
        found = train("auto", tmp_path / "a")
    assert [row["reward"] for row in found] == [row["reward"] for row in ordinary]
    assert all(row["fastrl/prompt_tokens_saved"] == 0 for row in found)


def test_broken_positions_are_caught(monkeypatch):
    from fastrl.integrations import _trl_prefill

    right = _trl_prefill._rows_of

    def shifted(key, value, rows):
        return right(key, value, rows) + 3 if key == "position_ids" else right(key, value, rows)

    monkeypatch.setattr(_trl_prefill, "_rows_of", shifted)
    prefill = SharedPrefill(text_model().eval())
    ids = torch.tensor([[5, 6], [7, 8]])
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0, eos_token_id=1)
    with prefill.sharing(torch.tensor([0, 1, 1])), pytest.warns(UserWarning, match="differ by"):
        prefill._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert "differ by" in prefill.reason


@pytest.mark.parametrize("change", ["type", "static", "no cache", "signature"])
def test_what_cannot_be_shared_says_why_once(tmp_path, monkeypatch, change):
    from fastrl.integrations import _trl_prefill

    model, settings = text_model(), {}
    if change == "type":
        model.config.model_type = "unheard_of"
        reason = "models of the type unheard_of were not compared"
    elif change == "static":
        settings = {"cache_implementation": "static"}
        reason = "'static' has a fixed number of rows"
    elif change == "no cache":
        settings = {"generation_kwargs": {"use_cache": False}}
        reason = "use_cache is off"
    else:
        monkeypatch.setitem(_trl_prefill._EXPECTED, "_prefill", ["input_ids"])
        reason = "this transformers' _prefill takes"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = train("auto", tmp_path, model, steps=2, args=settings)
    assert sum(reason in str(warning.message) for warning in caught) == 1
    assert all(row["fastrl/prompt_tokens_saved"] == 0 for row in rows)


def test_a_trainer_that_generates_by_itself_is_left_alone(tmp_path):
    from trl import GRPOTrainer

    from fastrl.integrations.trl import FastRLMixin

    class Own(GRPOTrainer):
        def _generate_single_turn(
            self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False
        ):
            return [[5 + len(ids) % 2, 1] for ids in prompt_ids], None

    class Fast(FastRLMixin, Own):
        pass

    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=2,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Fast(
        model=text_model(), processing_class=text_tokenizer(), reward_funcs=parity_reward, train_dataset=text_dataset(),
        args=args, fastrl=FastRLConfig(budget="fixed"),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["fastrl/prompt_tokens_saved"] == 0
