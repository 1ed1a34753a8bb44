"""Survivors packed behind their prompt: log-probs, entropies and gradients of the ordinary path, or a reason."""

import warnings

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from test_shared_prefill import END, FIRST, IMAGE_TOKEN, LAST, START, qwen_vl, text_only
from trl.trainer.utils import add_fused_lm_head
from trl_support import (
    ScriptedFast,
    relative_error,
    saved_text_model,
    text_model,
    train,
    vision_dataset,
)

from fastrl import FastRLConfig, testbed
from fastrl.integrations import _trl_prefix
from fastrl.integrations._trl_prefix import VERIFIED, PackedModel, SharedPrefix, pack

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore::FutureWarning")]

COUNTS = [1, 8, 3, 2, 1]
KEEP = {"budget": "fixed", "pruner": "random", "keep_share": 0.75, "align": "dummy"}


def model_of(kind: str, attention: str):
    torch.manual_seed(0)
    if kind == "llava":
        model, _ = testbed.load()
    else:
        model = qwen_vl(kind) if "vl" in kind else text_only(kind)
    model.set_attn_implementation(attention)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


def batch_of(kind: str) -> dict:
    """Five prompts of different lengths with 1 to 8 answers, rows in any order; two prompts have the same words."""
    rng = np.random.default_rng(3)
    image_tokens = {"llava": 36, "qwen2_5_vl": 4}.get(kind, 0)
    mark = testbed.load()[0].config.image_token_id if kind == "llava" else IMAGE_TOKEN
    image = [
        *([START] if kind == "qwen2_5_vl" else []),
        *[mark] * image_tokens,
        *([END] if kind == "qwen2_5_vl" else []),
    ]
    words = (60, 120) if kind == "llava" else (FIRST, LAST)
    prompts = [[*image, *rng.integers(*words, size=n).tolist()] for n in (5, 2, 7, 3, 3)]
    prompts[4] = [*prompts[3]]
    # The longest prompt first: the batch then begins with its first token, of an image perhaps, and not with padding.
    groups = [2, *(g for g in rng.permutation(np.repeat(np.arange(5), COUNTS)).tolist() if g != 2), 2, 2]
    answers = [rng.integers(*words, size=n).tolist() for n in rng.integers(1, 9, size=len(groups))]
    width, longest = max(map(len, prompts)), max(map(len, answers))
    rows = [(prompts[g], a) for g, a in zip(groups, answers, strict=True)]
    ids = torch.tensor([[0] * (width - len(p)) + p + a + [0] * (longest - len(a)) for p, a in rows])
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * (len(p) + len(a)) + [0] * (longest - len(a)) for p, a in rows]
    )
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :width] = -100
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "groups": groups,
        "num_answer": longest,
    }
    generator = torch.Generator().manual_seed(1)
    if kind == "llava":
        pixels = torch.randn(5, 3, 96, 96, generator=generator)
        batch["pixel_values"] = pixels[groups]
    if kind == "qwen2_5_vl":
        patches = torch.randn(5, 16, 3 * 2 * 14 * 14, generator=generator)
        batch["pixel_values"] = patches[groups].flatten(0, 1)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(groups))
        batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return batch


def outputs(model, batch: dict, *, packed: bool):
    """(B, C) log-probs and entropies, the gradient of a loss of both, and the images that the tower saw."""
    inputs = {k: v for k, v in batch.items() if k not in ("groups", "num_answer")}
    called = PackedModel(model, pack(batch["attention_mask"], batch["num_answer"], batch["groups"]), None)
    found = (called if packed else model)(**inputs, fused_lm_head=True)
    logps, entropies = (x[:, -batch["num_answer"] :] for x in (found.log_probs, found.entropy))
    mask = batch["attention_mask"][:, -batch["num_answer"] :]
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(mask))[:, None]
    ((logps * weights + 0.1 * entropies) * mask).sum().backward()
    gradient = torch.cat(
        [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    )
    return (logps * mask).detach(), (entropies * mask).detach(), gradient.double()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", VERIFIED)
def test_log_probs_entropies_and_gradients_are_those_of_the_ordinary_path(kind, attention):
    model, batch = model_of(kind, attention), batch_of(kind)
    ordinary, packed = (outputs(model, batch, packed=flag) for flag in (False, True))
    assert ordinary[0].abs().max() > 1
    assert (packed[0] - ordinary[0]).abs().max() <= 1e-5
    assert (packed[1] - ordinary[1]).abs().max() <= 1e-5
    assert relative_error(packed[2], ordinary[2]) <= 1e-5


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_the_vision_tower_sees_each_image_once(kind):
    model, batch = model_of(kind, "sdpa"), batch_of(kind)
    tower = model.model.vision_tower if kind == "llava" else model.model.visual
    seen = []
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len((args or tuple(kwargs.values()))[0])), with_kwargs=True
    )
    outputs(model, batch, packed=True)
    assert seen == [5 if kind == "llava" else 5 * 16]


def test_gradient_checkpointing_and_a_frozen_tower():
    model, batch = model_of("llava", "sdpa"), batch_of("llava")
    for parameter in model.model.vision_tower.parameters():
        parameter.requires_grad = False
    ordinary = outputs(model, batch, packed=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = outputs(model, batch, packed=True)
    assert relative_error(packed[2], ordinary[2]) <= 1e-5


def test_a_packed_batch_holds_every_token_once():
    batch = batch_of("llama")
    packing = pack(batch["attention_mask"], batch["num_answer"], batch["groups"])
    mask = batch["attention_mask"]
    num_prompt = mask[:, : -batch["num_answer"]].sum(1)
    first = {group: row for row, group in reversed(list(enumerate(batch["groups"])))}
    expected = sum(int(num_prompt[row]) - 1 for row in first.values()) + int(
        mask[:, -batch["num_answer"] :].sum()
    )
    expected += len(batch["groups"])  # the last token of a prompt, once per answer
    assert int((packing.part >= 0).sum()) == expected
    assert sorted(packing.representatives) == sorted(first.values())
    used = packing.source[packing.part >= 0]
    assert (mask.flatten()[used] == 1).all()
    backs = packing.back[mask[:, -batch["num_answer"] :] == 1]
    assert len(set(backs.tolist())) == len(backs)  # each answer token has a place of its own
    rows, length = packing.source.shape
    assert rows < len(first)
    assert length == max(int((packing.part[row] >= 0).sum()) for row in range(rows))


LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]


def both(tmp_path, *, fastrl=None, model=lambda _: text_model(), **settings):
    """Gradients of a run with packed survivors and of one without, and the trainer of the first."""
    found = []
    for share in ("auto", "off"):
        config = FastRLConfig(**{**KEEP, **(fastrl or {}), "share_prompt": share})
        folder = tmp_path / share
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="share_prompt: ScriptedFast")
            found.append(
                train(
                    ScriptedFast, folder, model=model(folder), trainer_kwargs={"fastrl": config}, **settings
                )
            )
    (trainer, packed), (_, ordinary) = found
    assert trainer._prefix.is_active
    assert trainer._prefix.is_checked
    saved = [row["fastrl/prompt_tokens_saved"] for row in trainer.state.log_history if "loss" in row]
    assert min(saved) > 0
    return packed, ordinary


def assert_same(packed, ordinary):
    assert len(packed) == len(ordinary)
    for a, b in zip(packed, ordinary, strict=True):
        assert b.norm() > 0
        assert relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_has_the_same_gradients(tmp_path, loss_type):
    assert_same(*both(tmp_path, loss_type=loss_type))


def test_gspo_with_a_reference_and_two_iterations(tmp_path):
    packed, ordinary = both(
        tmp_path,
        model=saved_text_model,
        importance_sampling_level="sequence",
        beta=0.1,
        num_iterations=2,
        max_steps=4,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        per_device_train_batch_size=4,
    )
    assert_same(packed, ordinary)


def test_lora(tmp_path):
    from peft import LoraConfig, get_peft_model

    def model(_):
        torch.manual_seed(1)
        adapted = get_peft_model(
            text_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        return adapted

    assert_same(*both(tmp_path, model=model))


@pytest.mark.parametrize("counts", [(1,), (1, 2), (0, 1, 2)])
def test_images(tmp_path, counts):
    model, processor = testbed.load()
    del model
    packed, ordinary = both(
        tmp_path,
        model=lambda _: testbed.load()[0],
        processing_class=processor,
        dataset=vision_dataset(8, counts),
        max_steps=2,
    )
    assert_same(packed, ordinary)


def test_unbiased_weights_and_shrinking_micro_batches(tmp_path):
    unbiased = {
        "pruner": "mdap",
        "tau": 0.3,
        "representative": "random",
        "weighting": 1.0,
        "denominator": "full",
    }
    assert_same(
        *both(tmp_path, fastrl={**unbiased, "micro_batches": "shrink"}, gradient_accumulation_steps=2)
    )


def test_other_models_say_why_not():
    with pytest.warns(UserWarning, match="models of the type gpt2 were not compared"):
        assert not SharedPrefix(_gpt2(), is_on=True).is_active
    model = text_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.warns(UserWarning, match="flash_attention_2 takes no mask of its own"):
        SharedPrefix(model, is_on=True)
    model = text_model()
    model.config.attention_dropout = 0.1
    with pytest.warns(UserWarning, match="dropout"):
        SharedPrefix(model, is_on=True)


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=42, n_positions=64, n_embd=32, n_layer=1, n_head=2))


def test_a_prompt_that_ends_with_an_image_is_not_packed():
    prefix = SharedPrefix(testbed.load()[0], is_on=True)
    mark = testbed.load()[0].config.image_token_id
    assert prefix.takes(torch.tensor([60, 61]))
    assert not prefix.takes(torch.tensor([60, mark]))


def test_a_broken_mask_is_caught_and_the_ordinary_path_taken(tmp_path, monkeypatch):
    class AllSee(_trl_prefix.Packing):
        @property
        def allowed(self):
            num = self.part.shape[1]
            return torch.ones(len(self.part), 1, num, num, dtype=torch.bool).tril()

    whole = _trl_prefix.pack
    monkeypatch.setattr("fastrl.integrations._trl_logps.pack", lambda *args: AllSee(**vars(whole(*args))))
    config = FastRLConfig(**KEEP)
    with pytest.warns(UserWarning, match="log-probs of the first micro-batch differ by"):
        trainer, gradients = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config})
    assert not trainer._prefix.is_active
    monkeypatch.undo()
    off = FastRLConfig(**{**KEEP, "share_prompt": "off"})
    _, ordinary = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": off})
    assert_same(gradients, ordinary)
