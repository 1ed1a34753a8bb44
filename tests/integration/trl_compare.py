"""Stock TRL and FastRL through the same run: what must be equal, and what the published setting must do."""

import warnings

import pandas as pd
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from trl_support import (
    NUM_WORDS,
    ScriptedFast,
    ScriptedStock,
    relative_error,
    saved_text_model,
    text_model,
    text_tokenizer,
    train,
)

from fastrl.config import FastRLConfig

TOLERANCE = 1e-5
KEEP_ALL = FastRLConfig(pruner="none", budget="fixed")
PUBLISHED = FastRLConfig()

CALL, END_OF_CALL, RESULT = "<call>", "</call>", "4"
TOOL_CALL = '{"name":"double","arguments":{"n":2}}'  # one word of the vocabulary
CHAT_WORDS = ["<user>", "<assistant>", "<tool>", CALL, END_OF_CALL, TOOL_CALL, RESULT, "start"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "<{{ message.role }}> {{ message.content }}"
    "{%- for call in message.tool_calls or [] %} <call> {{ call.function | tojson }} </call>{% endfor %}"
    "{{ ' <eos> ' if message.role == 'assistant' else ' ' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant> {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close_pattern": r"</call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The smallest tokenizer that TRL accepts for tools: a template that shows calls, and a parser of them."""
    tokenizer = text_tokenizer()
    tokenizer.add_tokens(CHAT_WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def chat_model(*_) -> Qwen2ForCausalLM:
    model = text_model()
    model.resize_token_embeddings(NUM_WORDS + 2 + len(CHAT_WORDS), mean_resizing=False)
    return model


def run(trainer_class, folder, fastrl=None, *, model=None, reward_funcs=None, trainer_kwargs=None,
        forward_rows=None, **settings):  # fmt: skip
    """Train a model that is made for this run alone; `model` makes it from a folder."""
    make = model or (saved_text_model if settings.get("beta") else lambda _: text_model())
    made = make(folder / "model")
    if forward_rows is not None:
        # At the embedding: an adapter calls its base model's `forward` past the hooks of the module.
        made.get_input_embeddings().register_forward_pre_hook(
            lambda _, args: forward_rows.append(len(args[0]) if torch.is_grad_enabled() else 0)
        )
    kwargs = {**(trainer_kwargs or {}), **({"fastrl": fastrl} if fastrl else {})}
    return train(
        trainer_class, folder, model=made, trainer_kwargs=kwargs,
        reward_funcs=list(reward_funcs) if reward_funcs else None, **settings,
    )  # fmt: skip


def assert_equal_gradients(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected) > 0
    assert max(float(gradient.norm()) for gradient in expected) > 1e-4, "a test of zeros proves nothing"
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < tolerance


def compare(folder, *, stock=ScriptedStock, fast=ScriptedFast, summed=False, tolerance=TOLERANCE, **settings):
    """Keep-all must give stock TRL's gradients; `summed` where TRL deals rows to windows at random.

    Returns:
        (stock trainer, FastRL's trainer, gradients of stock TRL).
    """
    stock_trainer, expected = run(stock, folder, **settings)
    fast_trainer, found = run(fast, folder, KEEP_ALL, **settings)
    if summed:
        assert len(found) == len(expected) > 1
        assert_equal_gradients([sum(found)], [sum(expected)], tolerance)
    else:
        assert_equal_gradients(found, expected, tolerance)
    return stock_trainer, fast_trainer, expected


def train_as_published(folder, *, fast=ScriptedFast, **settings):
    """The default setting must finish, learn something, and run the model on survivors alone."""
    forward_rows: list[int] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "budget: ars changes")  # these runs are shorter than two epochs
        trainer, gradients = run(fast, folder, PUBLISHED, forward_rows=forward_rows, **settings)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert max(float(gradient.norm()) for gradient in gradients) > 1e-4
    trained = total(trainer, "fastrl/trained/rows")
    assert 0 < trained < total(trainer, "fastrl/rollouts") * trainer.num_iterations
    assert sum(forward_rows) == trained
    return trainer


def total(trainer, key):
    return sum(entry[key] for entry in trainer.state.log_history if key in entry)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def completion_tables(folder):
    """TRL's tables of completions, in the order of steps."""
    return [pd.read_parquet(path) for path in sorted((folder / "completions").glob("*.parquet"))]
