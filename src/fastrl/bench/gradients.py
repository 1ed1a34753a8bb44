"""True gradients of single rollouts and their inner products: what `diagnose` holds similarities and pruners against.

At the current parameters the ratio of a GRPO-family loss is 1 and its clip is idle. A rollout's term is then
A_i times the gradient of its mean token log-probability (each rollout weighs 1 / |o_i|, as in GRPO):

    g_i = grad (1 / |o_i|) sum_t log p(o_it | prompt, o_i,<t),     temperature 1; (G, G) Gram matrix <g_i, g_j>
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastrl.config import did_you_mean
from fastrl.types import ConfigError, Group, GroupError

PARAMETERS = ("all", "last_block", "lora")
_CHUNK = 1 << 20
"""Coordinates that are summed in float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout as its model reads it.

    Args:
        inputs: What the model's forward takes, as a batch of one row without padding: `input_ids` (1, L) of
            the prompt and then the completion, and whatever else it needs (`attention_mask`, `pixel_values`, ...).
        num_completion: Tokens at the end of `input_ids` that the model wrote; 0 = an empty response.

    Raises:
        GroupError: more than one row, or no prompt token before the completion.
    """

    inputs: Mapping[str, Any]
    num_completion: int

    def __post_init__(self) -> None:
        shape = tuple(self.inputs["input_ids"].shape)
        if len(shape) != 2 or shape[0] != 1 or not 0 <= self.num_completion < shape[1]:
            raise GroupError(
                f"a rollout has input_ids of shape {shape} and {self.num_completion} completion tokens: it is one row, "
                "(1, L), with at least one prompt token before the completion, which the first token is "
                "predicted from. Give every rollout its own inputs, prompt and completion."
            )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A model, groups that it sampled, and the same rollouts as it reads them: `rollouts_PG[p][i]`."""

    model: Any
    groups: list[Group]
    rollouts_PG: list[list[Rollout]]


def with_completion(prompt: Mapping[str, torch.Tensor], completion_T: Sequence[int]) -> Rollout:
    """Append a completion to a processed prompt (a batch of one row).

    Every tensor of the shape of `input_ids` grows with it: the attention mask by ones, others (token types)
    by zeros, which is text. The rest, such as an image, is shared and not copied.
    """
    ids = prompt["input_ids"]
    added = torch.tensor([list(completion_T)], dtype=ids.dtype, device=ids.device)
    ends = {"input_ids": added, "attention_mask": torch.ones_like(added)}
    inputs = {
        name: torch.cat([value, ends.get(name, torch.zeros_like(added)).to(value.dtype)], dim=1)
        if torch.is_tensor(value) and value.shape == ids.shape
        else value
        for name, value in prompt.items()
    }
    return Rollout(inputs=inputs, num_completion=added.shape[1])


def mean_logp(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return the mean log-probability of the completion's tokens, given the prompt: a float32 scalar."""
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in rollout.inputs.items()}
    num = rollout.num_completion
    logits = model(**inputs, use_cache=False).logits[:, -num - 1 : -1].float()
    tokens = inputs["input_ids"][:, -num:, None]
    return logits.log_softmax(-1).gather(-1, tokens).mean()


def choose_parameters(model: Any, which: str) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters that gradients are taken of, by name.

    Args:
        which: all | last_block (the last block of the language model) | lora (names with "lora_").

    Raises:
        ConfigError: an unknown choice, or a model without such parameters.
    """
    if which not in PARAMETERS:
        raise ConfigError(
            f"parameters: {which!r} is not one of {', '.join(PARAMETERS)}.{did_you_mean(which, PARAMETERS)}"
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if which == "lora":
        named = {name: p for name, p in named.items() if "lora_" in name}
    elif which == "last_block":
        inside = {id(p) for p in _last_block(model).parameters()}
        named = {name: p for name, p in named.items() if id(p) in inside}
    if not named:
        raise ConfigError(
            f"parameters: {which} picks none of the trainable parameters of {type(model).__name__}: a gradient needs "
            "at least one. Choose another of "
            f"{', '.join(PARAMETERS)}, or set requires_grad."
        )
    return named


def _last_block(model: Any) -> torch.nn.Module:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for module in decoder.modules():  # the outermost list comes first: experts are lists inside blocks
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return module[-1]
    raise ConfigError(
        f"parameters: last_block, but the decoder of {type(model).__name__} is no list of blocks. Choose all."
    )


def rollout_gradients(
    model: Any,
    rollouts: Sequence[Rollout],
    *,
    parameters: str = "all",
    num_coordinates: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Return the gradient of each rollout's `mean_logp`, one forward and backward pass each.

    The model is put into evaluation mode meanwhile: dropout would make equal rollouts differ. An empty
    response has a gradient of 0.

    Args:
        parameters: See `choose_parameters`.
        num_coordinates: Look at about so many random coordinates only, spread over all tensors in proportion and
            scaled so that inner products are unbiased (cosines, their ratios, only approximately). Memory is
            4 bytes x rollouts x coordinates. None = all: exact.
        seed: Of the choice of coordinates: the same ones for every rollout and call.

    Returns:
        (G, D) float32, on the CPU.

    Raises:
        ConfigError: see `choose_parameters`, or `num_coordinates` below 1.
    """
    chosen = list(choose_parameters(model, parameters).values())
    picks = _coordinates([p.numel() for p in chosen], num_coordinates, seed)
    gradients_GD = torch.zeros(len(rollouts), sum(pick.count for pick in picks))
    was_training = model.training
    model.eval()
    try:
        for row, rollout in zip(gradients_GD, rollouts, strict=True):
            if rollout.num_completion == 0:
                continue
            with torch.enable_grad():
                parts = torch.autograd.grad(mean_logp(model, rollout), chosen, allow_unused=True)
            start = 0
            for part, pick in zip(parts, picks, strict=True):
                if part is not None:  # None: a tensor that this rollout does not touch
                    row[start : start + pick.count] = pick(part)
                start += pick.count
    finally:
        model.train(was_training)
    return gradients_GD


@dataclass(frozen=True)
class _Pick:
    """Some places of a flattened tensor (None = all), scaled by sqrt(size / count): inner products stay unbiased."""

    count: int
    places: torch.Tensor | None
    scale: float

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        flat = gradient.flatten()
        picked = flat if self.places is None else flat[self.places.to(flat.device)]
        return self.scale * picked.float().cpu()


def _coordinates(sizes: Sequence[int], num: int | None, seed: int) -> list[_Pick]:
    """Draw the same share of the places of every tensor, without repetition."""
    if num is not None and num < 1:
        raise ConfigError(
            f"num_coordinates: {num} is below 1: nothing would be left of a gradient. None takes all."
        )
    share = 1.0 if num is None else min(1.0, num / sum(sizes))
    rng = np.random.default_rng(seed)
    picks = []
    for size in sizes:
        count = min(size, math.ceil(share * size))
        places = (
            torch.from_numpy(rng.choice(size, count, replace=False, shuffle=False)) if count < size else None
        )
        picks.append(_Pick(count, places, math.sqrt(size / count)))
    return picks


def gram_matrices(
    model: Any,
    rollouts_PG: Sequence[Sequence[Rollout]],
    *,
    parameters: str = "all",
    num_coordinates: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Return the (G, G) float64 inner products <g_i, g_j> of each prompt's rollouts.

    Works with causal language models and vision-language models of transformers, wrapped by peft or not.
    Only one prompt's gradients are in memory at a time. Arguments as in `rollout_gradients`.
    """
    settings: dict[str, Any] = {"parameters": parameters, "num_coordinates": num_coordinates, "seed": seed}
    return [_gram(rollout_gradients(model, rollouts, **settings)) for rollouts in rollouts_PG]


def _gram(gradients_GD: torch.Tensor) -> np.ndarray:
    gram_GG = np.zeros((len(gradients_GD), len(gradients_GD)))
    for chunk in gradients_GD.split(_CHUNK, dim=1):
        part = chunk.double().numpy()
        gram_GG += part @ part.T
    return (gram_GG + gram_GG.T) / 2


def sample_testbed(num_prompts: int, num_rollouts: int, seed: int, *, problem_set: str = "short") -> Sample:
    """Sample the testbed's model on the first training problems of a seed, and reward it.

    Temperature 1, reward = format (0.5) + accuracy (1), as in its recipes. The global random state of torch is as
    before afterwards.
    """
    from fastrl.data.testbed import problem_set_of, problems
    from fastrl.rewards import accuracy_reward, format_reward
    from fastrl.testbed import load
    from fastrl.testbed.evaluation import conversation

    max_tokens = problem_set_of(problem_set).max_tokens
    model, processor = load(problem_set)
    model.eval()
    groups, rollouts_PG = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for problem in problems("train", num_prompts, seed, problem_set=problem_set):
            prompt = dict(
                processor.apply_chat_template(
                    [conversation(problem)],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=True,
                    processor_kwargs={"return_tensors": "pt"},
                )
            )
            tokens_G, logps_G = _generate(model, prompt, num_rollouts, max_tokens)
            texts = processor.batch_decode(tokens_G, skip_special_tokens=True)
            accuracy = accuracy_reward(texts, [problem.answer] * num_rollouts)
            rewards_G = np.array(format_reward(texts)) + np.array(accuracy, dtype=np.float64)
            groups.append(
                Group(prompt_id=problem.id, tokens_G=tokens_G, rewards_G=rewards_G, logps_G=logps_G)
            )
            rollouts_PG.append([with_completion(prompt, tokens_T) for tokens_T in tokens_G])
    return Sample(model=model, groups=groups, rollouts_PG=rollouts_PG)


@torch.no_grad()
def _generate(
    model: Any, prompt: Mapping[str, Any], num_rollouts: int, max_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Sample completions up to and including the end token; return their tokens and log-probabilities."""
    output = model.generate(
        **prompt,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max_tokens,
        num_return_sequences=num_rollouts,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, prompt["input_ids"].shape[1] :]
    logps = torch.stack(output.logits, dim=1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    is_end = (tokens == model.generation_config.eos_token_id).int()
    lengths = (is_end.cumsum(1) - is_end == 0).sum(1).tolist()
    return (
        [row[:num] for row, num in zip(tokens.tolist(), lengths, strict=True)],
        [row[:num] for row, num in zip(logps.tolist(), lengths, strict=True)],
    )
