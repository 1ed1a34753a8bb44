"""Rows of a TRL generation batch: taking, trimming and repeating them, images included.

A batch is the dictionary that TRL's `_generate_and_score_completions` returns. Its image tensors
are indexed by image, patch or tile, so rows are taken between TRL's own
`split_pixel_values_by_grid` and `unsplit_pixel_values_by_grid`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import pad, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from fastrl.batching import DUMMY, WindowPlan
from fastrl.types import FastRLError

_PROMPT = {"prompt_ids", "prompt_mask"}  # (B, P), padded left
_COMPLETION = {  # (B, C), padded right
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip
_BOTH = {"token_type_ids", "mm_token_type_ids"}  # (B, P + C)
_IMAGE = {
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes",
    "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip
_OTHER = {"advantages", "num_items_in_batch"}
FORWARD_FIELDS = _IMAGE | _BOTH
"""What the model's forward pass takes beside ids and masks."""


class MicroBatch(dict):
    """The inputs of one forward and backward pass, with the plan of its optimizer window.

    Args:
        inputs: As TRL's `_compute_loss` takes them.
        plan: The window's micro-steps and denominators.
        num_rows: Rows that are trained on: all but dummies.
    """

    def __init__(self, inputs: Mapping[str, Any], plan: WindowPlan, num_rows: int) -> None:
        super().__init__(inputs)
        self.plan = plan
        self.num_rows = num_rows


def split_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Turn image tensors into one entry per row, so that every entry can be indexed by row."""
    unknown = set(batch) - _PROMPT - _COMPLETION - _BOTH - _IMAGE - _OTHER
    if unknown:
        raise FastRLError(
            f"TRL's batch holds {sorted(unknown)}, which this FastRL does not know how to cut into rows. It was "
            "written for TRL 1.16: install that version, or report the keys."
        )
    return split_pixel_values_by_grid(batch)


def take_rows(
    split: dict[str, Any], rows: Sequence[int], *, filler: int, multiple: int | None
) -> dict[str, Any]:
    """Take rows of a split batch and trim them to the longest prompt and completion among them.

    Trimming removes columns that are padding in every row: losses and gradients stay the same.

    Args:
        split: From `split_rows`.
        rows: Row numbers. `DUMMY` is replaced by the filler with one masked completion token and no
            advantage.
        multiple: TRL's pad_to_multiple_of.
    """
    index = torch.tensor([filler if row == DUMMY else row for row in rows], device=split["prompt_ids"].device)
    taken = {key: _index(value, index) for key, value in split.items()}
    dummy = torch.tensor([row == DUMMY for row in rows], device=index.device)
    taken["completion_mask"] = taken["completion_mask"].masked_fill(dummy[:, None], 0)
    taken["advantages"] = taken["advantages"].masked_fill(dummy, 0.0)
    prompt_width, width = split["prompt_ids"].shape[1], split["completion_ids"].shape[1]
    first = prompt_width - _rounded(int(taken["prompt_mask"].sum(1).max()), multiple, prompt_width)
    last = _rounded(max(1, int(taken["completion_mask"].sum(1).max())), multiple, width)
    for key, value in taken.items():
        if key in _PROMPT:
            taken[key] = value[:, first:]
        elif key in _COMPLETION and value.shape[1] == width:  # a ratio per sequence has one column
            taken[key] = value[:, :last]
        elif key in _BOTH:
            taken[key] = value[:, first : prompt_width + last]
    if taken.get("num_images") is not None and not sum(taken["num_images"]):
        taken = {key: value for key, value in taken.items() if key not in _IMAGE}
    return unsplit_pixel_values_by_grid(taken)


def _index(value: Any, index: torch.Tensor) -> Any:
    if value is None or (torch.is_tensor(value) and value.ndim == 0):
        return value
    return value[index] if torch.is_tensor(value) else [value[i] for i in index.tolist()]


def _rounded(length: int, multiple: int | None, width: int) -> int:
    return min(width, -(-length // multiple) * multiple) if multiple else length


def repeat_prompts(
    fields: dict[str, Any], images: list | None, slots: Sequence[int]
) -> dict[str, Any] | None:
    """Repeat the processor's fields of P prompts for the rows that share them.

    Args:
        fields: What TRL's `_tokenize_prompts` returns as multimodal fields for P prompts.
        images: The images of each prompt, or None.
        slots: The prompt of each row.

    Returns:
        The same fields for len(slots) rows, or None for layouts whose tensors cannot be told apart
        by prompt (tiles without a count): those models are processed row by row, as TRL does.
    """
    if not fields:
        return {}
    if "spatial_shapes" in fields:
        return None
    num_prompts = max(slots) + 1
    counts = [len(of_prompt or []) for of_prompt in images or [None] * num_prompts]
    tensors = {key: _to_tensor(value) for key, value in fields.items() if not _is_per_token(value)}
    split = split_pixel_values_by_grid({**tensors, "num_images": counts})
    if any(len(value) != num_prompts for value in split.values()):
        return None
    if torch.is_tensor(pixels := split.get("pixel_values")) and pixels.ndim != 5:
        return None  # one entry per prompt by its size alone: tiles can have that too
    index = torch.tensor(slots)
    rows = unsplit_pixel_values_by_grid({key: _index(value, index) for key, value in split.items()})
    per_token = {key: [value[s] for s in slots] for key, value in fields.items() if _is_per_token(value)}
    return {**{key: rows[key] for key in tensors}, **per_token}


def _is_per_token(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _to_tensor(value: Any) -> torch.Tensor:
    return value if torch.is_tensor(value) else torch.tensor(np.array(value))


class OncePerPrompt:
    """A processor that has already seen this round's images and does not look at them again.

    TRL calls the processor twice per row with the same images: for generation and for the forward
    pass. This one answers the second call from the first. Everything else goes to the processor.

    Args:
        processor: TRL's processing class.
        slots: The prompt of each row of the round; a call with another number of rows is not the one
            that is meant.

    `fields` are those of the round's rows, once they are known; None = process as usual.
    """

    def __init__(self, processor: Any, slots: Sequence[int]) -> None:
        self._processor = processor
        self.slots = slots
        self.fields: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.fields or len(kwargs.get("images") or []) != len(self.slots):
            return self._processor(*args, **kwargs)
        return {
            key: pad([torch.tensor(row) for row in value], padding_value=0, padding_side="left")
            if _is_per_token(value)
            else value
            for key, value in self.fields.items()
        }
