"""Survivors of a prompt behind one copy of it: log-probs and the update compute a prompt, and encode its images, once.

    ordinary    prompt  answer 1        packed    prompt | last answer 1 | last answer 2 | last answer 3
                prompt  answer 2
                prompt  answer 3

A packed row holds a prompt without its last token, then for each survivor that last token and the answer. Positions of
every answer continue those of the prompt; a mask lets it see the prompt and itself. The last token is repeated because
it predicts the first token of each answer. Short prompts share a row, so that rows have about the same length.
Everything else - embedding, attention, head, temperature, entropies - is the model's and TRL's own code, called with
fewer tokens.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

VERIFIED = ("llama", "llava", "qwen2", "qwen2_5_vl", "qwen3")
"""Types of models whose log-probs and gradients were compared with the ordinary path in tests."""
_THREE_POSITIONS = ("qwen2_5_vl",)  # a token has a position in time, height and width
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
_KNOWN_INPUTS = {"pixel_values", "image_grid_thw", "labels", "fused_lm_head", *_PER_TOKEN}
# Of log-probs: sums are taken in another order.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each token of a packed batch comes from, and where each log-prob goes back to.

    Args:
        source: (R, L) index into the flattened ordinary batch; where filled up, a token of text.
        part: (R, L) number of the prompt or answer that a token belongs to, unique in the batch; -1 = filled up.
        prompt: (R, L) number of the prompt part that a token may see besides its own.
        answers: (R, L) bool, tokens that are predicted.
        back: (B, C) index into the flattened packed batch; R * L where there is no token.
        representatives: For each prompt, in the order of the packed batch, the ordinary row whose images it has.
    """

    source: torch.Tensor
    part: torch.Tensor
    prompt: torch.Tensor
    answers: torch.Tensor
    back: torch.Tensor
    representatives: list[int]

    @property
    def allowed(self) -> torch.Tensor:
        """(R, 1, L, L) bool: which token sees which."""
        num = self.part.shape[1]
        own = self.part[:, :, None] == self.part[:, None, :]
        of_prompt = self.prompt[:, :, None] == self.part[:, None, :]
        before = torch.ones(num, num, dtype=torch.bool, device=self.part.device).tril()
        # What fills up sees itself: a row of the softmax without any entry is not a number.
        return ((own | of_prompt) & before)[:, None]


def pack(attention_mask: torch.Tensor, num_answer: int, groups: Sequence[int]) -> Packing:
    """Plan the packed batch.

    Args:
        attention_mask: (B, P + C), prompts padded left, answers right.
        num_answer: C.
        groups: Which rows have the same prompt and images.
    """
    width = attention_mask.shape[1]
    num_prompt = attention_mask[:, : width - num_answer].sum(1).tolist()
    num_of_answer = attention_mask[:, width - num_answer :].sum(1).tolist()
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    blocks = list(rows_of.values())
    sizes = [num_prompt[rows[0]] - 1 + sum(1 + num_of_answer[row] for row in rows) for rows in blocks]
    packed = _fit(sizes)
    length = max(sum(sizes[block] for block in row) for row in packed)
    # What fills up is the last token of a prompt: an image token would ask for an image.
    source = torch.full((len(packed), length), width - num_answer - 1)
    part, prompt = torch.full_like(source, -1), torch.full_like(source, -2)
    answers = torch.zeros_like(source, dtype=torch.bool)
    back = torch.full((len(groups), num_answer), len(packed) * length)
    number = 0
    for place, row_blocks in enumerate(packed):
        at = 0
        for block in row_blocks:
            first = blocks[block][0]
            last = width - num_answer - 1
            prefix = num_prompt[first] - 1
            start = first * width + last - prefix
            source[place, at : at + prefix] = torch.arange(start, start + prefix)
            of_prompt, number = number, number + 1
            part[place, at : at + prefix] = of_prompt
            at += prefix
            for row in blocks[block]:
                size = 1 + num_of_answer[row]
                source[place, at : at + size] = torch.arange(row * width + last, row * width + last + size)
                part[place, at : at + size], prompt[place, at : at + size] = number, of_prompt
                answers[place, at + 1 : at + size] = True
                back[row, : size - 1] = place * length + at + torch.arange(size - 1)
                number += 1
                at += size
    device = attention_mask.device
    return Packing(
        source=source.to(device),
        part=part.to(device),
        prompt=prompt.to(device),
        answers=answers.to(device),
        back=back.to(device),
        representatives=[blocks[block][0] for row_blocks in packed for block in row_blocks],
    )


def _fit(sizes: Sequence[int]) -> list[list[int]]:
    """Put blocks into rows no longer than the longest block, longest first, each into the first row that has room."""
    capacity = max(sizes)
    rows: list[list[int]] = []
    room: list[int] = []
    for block in sorted(range(len(sizes)), key=lambda block: (-sizes[block], block)):
        place = next((row for row, left in enumerate(room) if left >= sizes[block]), None)
        if place is None:
            rows.append([])
            room.append(capacity)
            place = len(rows) - 1
        rows[place].append(block)
        room[place] -= sizes[block]
    return rows


class PackedModel:
    """A model that is called with an ordinary batch, computes a packed one, and answers as if it had not.

    Args:
        model: As TRL calls it, wrapped or not.
        packing: For the batch that it will be called with.
        num_images: Of each ordinary row; None = no images.
    """

    def __init__(self, model: Any, packing: Packing, num_images: Sequence[int] | None) -> None:
        self._model, self._packing, self._num_images = model, packing, num_images

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **inputs: Any) -> Any:
        unknown = set(inputs) - _KNOWN_INPUTS
        assert not unknown, f"inputs of a model that was not compared: {unknown}"
        packing, source = self._packing, self._packing.source
        positions = self._positions(input_ids, attention_mask, inputs)
        packed = {
            "input_ids": input_ids.flatten()[source],
            "attention_mask": self._mask(packing.allowed),
            "position_ids": positions.flatten(-2)[..., source],
            "fused_lm_head": inputs["fused_lm_head"],
        }
        packed["labels"] = packed["input_ids"].masked_fill(~packing.answers, -100)
        for name in _PER_TOKEN:
            if name in inputs:
                packed[name] = inputs[name].flatten()[source]
        packed.update(self._images(inputs))
        output = self._model(**packed)
        return SimpleNamespace(
            log_probs=self._unpack(output.log_probs),
            entropy=None if output.entropy is None else self._unpack(output.entropy),
            aux_loss=None,
        )

    def _unpack(self, values: torch.Tensor) -> torch.Tensor:
        """(B, C) of (R, L - 1), where the entry of a token stands at the place of the token before it."""
        whole = torch.nn.functional.pad(values, (0, 1)).flatten()
        return torch.cat([whole, whole.new_zeros(1)])[self._packing.back]

    def _mask(self, allowed: torch.Tensor) -> torch.Tensor:
        model = _inner(self._model)
        if model.config.get_text_config()._attn_implementation == "sdpa":
            return allowed
        zeros = torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device)
        return zeros.masked_fill(~allowed, torch.finfo(model.dtype).min)

    def _positions(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, inputs: dict[str, Any]
    ) -> torch.Tensor:
        """(B, P + C), or (3, B, P + C) where a token has three: those of the ordinary batch, without its padding."""
        model = _inner(self._model)
        if model.config.model_type in _THREE_POSITIONS and inputs.get("image_grid_thw") is not None:
            positions, _ = model.model.get_rope_index(
                input_ids,
                inputs["mm_token_type_ids"],
                image_grid_thw=inputs["image_grid_thw"],
                attention_mask=attention_mask,
            )
            return positions
        return (attention_mask.cumsum(1) - 1).clamp(min=0)

    def _images(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The images of each prompt once, in the order of the packed prompts."""
        pixels, grid = inputs.get("pixel_values"), inputs.get("image_grid_thw")
        if pixels is None:
            return {}
        counts = torch.tensor(list(self._num_images or [1] * len(self._packing.back)))
        images = torch.arange(int(counts.sum())).split(counts.tolist())
        chosen = torch.cat([images[row] for row in self._packing.representatives])
        if grid is None:
            return {"pixel_values": pixels[chosen.to(pixels.device)]}
        patches = pixels.split(grid.prod(-1).tolist())
        return {
            "pixel_values": torch.cat([patches[image] for image in chosen.tolist()]),
            "image_grid_thw": grid[chosen.to(grid.device)],
        }


class SharedPrefix:
    """Whether survivors are packed; `reason` says why not, None = they are.

    Args:
        model: What is trained, unwrapped.
        is_on: False = the settings say no.
    """

    def __init__(self, model: Any, *, is_on: bool) -> None:
        self.is_on, self.is_checked = is_on, False
        self.reason: str | None = None
        self._image_token = getattr(getattr(_inner(model), "config", None), "image_token_id", None) or -1
        reason = _why_not(model) if is_on else None
        if reason is not None:
            self.give_up(reason)

    @property
    def is_active(self) -> bool:
        return self.is_on and self.reason is None

    def takes(self, last_tokens: torch.Tensor) -> bool:
        """Whether prompts can be packed: their last tokens, which are repeated, must not stand for images."""
        return not (last_tokens == self._image_token).any()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know to take the path, and so the rounding, of one without a break."""
        return {"is_checked": self.is_checked, "reason": self.reason}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_checked = bool(state["is_checked"])
        if self.reason is None:  # else this model or machine cannot, whatever the saved run could
            self.reason = state["reason"]

    def give_up(self, reason: str) -> None:
        """Pack no more, and say why."""
        self.reason = reason
        warnings.warn(
            f"share_prompt: {reason}. Log-probs and the update compute a prompt once per survivor.",
            stacklevel=2,
        )

    def too_far(self, error: float, dtype: torch.dtype) -> str | None:
        """Why a difference of log-probs between both paths is too large; None = it is rounding."""
        allowed = _TOLERANCE.get(dtype, _TOLERANCE[torch.bfloat16])
        if error <= allowed:
            return None
        return (
            f"log-probs of the first micro-batch differ by {error:.2g} from the ordinary path, {allowed:g} is allowed "
            f"for {dtype}"
        )


def is_worth_it(groups: Sequence[int]) -> bool:
    """Whether any two rows share a prompt."""
    return len(set(groups)) < len(groups)


def _inner(model: Any) -> Any:
    """The transformers model inside wrappers of engines, compilers and adapters."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "module"):
            model = model.module
        else:
            return model


def _why_not(model: Any) -> str | None:
    model = _inner(model)
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in VERIFIED:
        return f"models of the type {kind} were not compared with the ordinary path"
    text = model.config.get_text_config()
    attention = text._attn_implementation
    if attention not in ("eager", "sdpa"):
        return f"attention by {attention} takes no mask of its own; load the model with sdpa or eager"
    if "sliding_attention" in (getattr(text, "layer_types", None) or []):
        return f"this {kind} has layers with a sliding window, which a mask of its own would replace"
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    if has_dropout or getattr(text, "attention_dropout", None):
        return "the model has dropout, whose draws survivors of a prompt would share"
    return None
