"""Rows of a TRL generation batch: one rollout without padding, and micro-batches made of rows.

A batch is the dictionary that TRL's `_generate_and_score_completions` returns. Its image tensors
are indexed by image, patch or tile: TRL's own `split_pixel_values_by_grid` tells which belong to
which row. A row on its own can go to any rank and into any micro-batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from trl.trainer.utils import pad, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from fastrl.batching import Denominators
from fastrl.types import FastRLError

Row = dict[str, torch.Tensor]
"""One rollout: (P,) prompt and (C,) completion fields without padding, images with a leading dimension."""

_PROMPT = ("prompt_ids", "prompt_mask")  # (B, P), padded left
_COMPLETION = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "sampling_per_token_logps",
)  # (B, C), padded right
_BOTH = ("token_type_ids", "mm_token_type_ids")  # (B, P + C)
_PIXELS = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids",
)  # fmt: skip
_IMAGE_COUNTS = ("num_images", "num_tiles")  # lists of B numbers
_OF_BATCH = ("advantages", "num_items_in_batch")  # set when a micro-batch is made
ROW_FIELDS = (*_PROMPT, *_COMPLETION, *_BOTH, *_PIXELS, *_IMAGE_COUNTS)
FORWARD_FIELDS = (*_BOTH, *_PIXELS, *_IMAGE_COUNTS)
"""What the model's forward pass takes beside ids and masks."""


class MicroBatch(dict):
    """The inputs of one forward and backward pass, and its place in an optimizer window.

    Args:
        inputs: As TRL's `_compute_loss` takes them.
        num_micro_batches: Micro-batches of the window that are not skipped, the same on every rank.
        num_steps: Micro-steps of the window, skipped ones included.
        denominators: What the window's loss divides by, over all ranks.
        num_rows, num_tokens: What this micro-step trains on over all ranks, without dummies.
        groups: Of each row, which prompt of the round it continues.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        *,
        num_micro_batches: int,
        num_steps: int,
        denominators: Denominators,
        num_rows: int,
        num_tokens: int,
        groups: Sequence[int],
    ) -> None:
        super().__init__(inputs)
        self.num_micro_batches = num_micro_batches
        self.num_steps = num_steps
        self.denominators = denominators
        self.num_rows = num_rows
        self.num_tokens = num_tokens
        self.groups = list(groups)


def split_rows(batch: dict[str, Any]) -> dict[str, Any]:
    """Turn image tensors into one entry per row, so that every field can be indexed by row.

    Raises:
        FastRLError: a field that this version of FastRL does not know how to cut into rows.
    """
    unknown = set(batch) - {*ROW_FIELDS, *_OF_BATCH}
    if unknown:
        raise FastRLError(
            f"TRL's batch holds {sorted(unknown)}, which this FastRL does not know how to cut into rows. It was "
            "written for TRL 1.16: install that version, or report the keys."
        )
    split = split_pixel_values_by_grid(batch)
    num_rows = len(batch["prompt_ids"])
    for name in (*_PIXELS, *_IMAGE_COUNTS):
        if split.get(name) is not None and len(split[name]) != num_rows:
            raise FastRLError(
                f"{name} has {len(split[name])} entries for {num_rows} rollouts: this model's image fields cannot be "
                "told apart by rollout. Report the model's processor; until then train it without FastRL."
            )
    return split


def take_row(split: Mapping[str, Any], i: int, *, num_prompt: int, num_completion: int) -> Row:
    """Take one row out of a split batch, without its padding.

    Args:
        split: From `split_rows`.
        num_prompt, num_completion: Its lengths; at least one completion token is taken.
    """
    prompt_width = split["prompt_ids"].shape[1]
    first, last = prompt_width - num_prompt, max(1, num_completion)
    row: Row = {}
    for name in ROW_FIELDS:
        value = split.get(name)
        if value is None:
            continue
        if name in _PROMPT:
            row[name] = value[i, first:]
        elif name in _COMPLETION:
            row[name] = value[i, :last]
        elif name in _BOTH:
            row[name] = value[i, first : prompt_width + last]
        elif name in _IMAGE_COUNTS:
            row[name] = torch.tensor(value[i])
        else:  # one entry per image, patch or tile; or one per row
            row[name] = value[i] if isinstance(value, list) else value[i : i + 1]
    return row


def dummy_of(row: Row) -> Row:
    """Return the row with a single completion token that nothing is learnt from."""
    num_prompt = len(row["prompt_ids"])
    cut = {name: value[: num_prompt + 1] if name in _BOTH else value for name, value in row.items()}
    cut.update({name: row[name][:1] for name in _COMPLETION if name in row})
    cut["completion_mask"] = torch.zeros_like(cut["completion_mask"])
    return cut


def collate(rows: Sequence[Row], *, pad_token_id: int, multiple: int | None) -> dict[str, Any]:
    """Make a batch of rows, padded to the longest prompt and completion among them.

    Padding that no row needs is left out: losses and gradients stay the same.

    Args:
        pad_token_id: What TRL pads ids with.
        multiple: TRL's pad_to_multiple_of.
    """

    def padded(values: Sequence[torch.Tensor], side: str, value: int = 0) -> torch.Tensor:
        return pad(values, padding_value=value, padding_side=side, pad_to_multiple_of=multiple)

    names = [name for name in ROW_FIELDS if any(name in row for row in rows)]
    batch: dict[str, Any] = {}
    for name in names:
        if name in _PROMPT:
            fill = pad_token_id if name == "prompt_ids" else 0
            batch[name] = padded([row[name] for row in rows], "left", fill)
        elif name in _COMPLETION:
            fill = pad_token_id if name == "completion_ids" else 0
            batch[name] = padded([row[name] for row in rows], "right", fill)
        elif name in _BOTH:
            batch[name] = _both_sides(rows, name, padded)
    if any(int(row.get("num_images", 0)) for row in rows):
        batch.update(_collate_images(rows, names))
    return batch


def _both_sides(rows: Sequence[Row], name: str, padded: Any) -> torch.Tensor:
    """A row of text has no token types where its neighbours have images: all its tokens are of type 0."""
    values = [
        row.get(name, row["prompt_ids"].new_zeros(len(row["prompt_ids"]) + len(row["completion_ids"])))
        for row in rows
    ]
    lengths = [len(row["prompt_ids"]) for row in rows]
    prompts = padded([value[:length] for value, length in zip(values, lengths, strict=True)], "left")
    completions = padded([value[length:] for value, length in zip(values, lengths, strict=True)], "right")
    return torch.cat([prompts, completions], dim=1)


def _collate_images(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: [int(row.get(name, 0)) for row in rows] for name in _IMAGE_COUNTS if name in names
    }
    for name in _PIXELS:
        entries = [row[name] for row in rows if name in row]
        if entries:
            fields[name] = _cat(entries)
    return fields


def _cat(entries: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate; where a rank padded its images to another size, to the largest size of all."""
    shape = np.max([entry.shape[1:] for entry in entries], axis=0).tolist()
    if all(list(entry.shape[1:]) == shape for entry in entries):
        return torch.cat(list(entries))
    widened = []
    for entry in entries:
        wide = entry.new_zeros((len(entry), *shape))
        wide[tuple(slice(size) for size in entry.shape)] = entry
        widened.append(wide)
    return torch.cat(widened)


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


def _index(value: Any, index: torch.Tensor) -> Any:
    return value[index] if torch.is_tensor(value) else [value[i] for i in index.tolist()]


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
        slots: The prompt of each row on this rank, numbered from 0; a call with another number of
            rows is not the one that is meant.

    `fields` are those of the round's rows, once they are known; None = process as usual. `fields_of_prompts` are the
    same, one for each prompt.
    """

    def __init__(self, processor: Any, slots: Sequence[int]) -> None:
        self._processor = processor
        self.slots = slots
        self.fields: dict[str, Any] | None = None
        self.fields_of_prompts: dict[str, Any] | None = None

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
