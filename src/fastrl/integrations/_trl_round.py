"""One round over all ranks: what every rank must know to decide the same, and the micro-batches that follow.

A round is one or more waves of generation, N rollouts in all, of each of which every rank holds a contiguous slice.
Everything that a decision needs is gathered as tensors; the rows themselves stay where they are until the
plan says which of them must move.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fastrl.batching import DUMMY, WindowPlan, fillers, moves, owners
from fastrl.integrations._trl_logps import loss_mask
from fastrl.integrations._trl_rows import MicroBatch, Row, collate, dummy_of, split_rows, take_row
from fastrl.integrations._trl_transport import exchange
from fastrl.types import FastRLError


@dataclass(frozen=True, kw_only=True)
class RoundRows:
    """The N rollouts of a round, the same on every rank.

    Args:
        prompt_N, completion_N: Lengths in tokens; a completion that TRL masked has length 0.
        loss_N: Tokens that the loss is taken over.
        image_N: bool, rows whose prompt has an image.
        foreign_N: bool, rollouts in which the model emitted an image token: it stands for features
            that do not exist, and no forward pass can take it.
        tokens_N: Response token ids without padding and without what tools or environments wrote: answers that
            all rollouts get would make them look alike.
        advantages_N: float64, TRL's.
        owner_N: Rank that generated each row.
        wave_N, local_N: In which wave, and as which row of its rank's batch.
        logps_N: The sampler's log-probs of `tokens_N`; None where it returns none, or nothing asks for them.
    """

    prompt_N: np.ndarray
    completion_N: np.ndarray
    loss_N: np.ndarray
    image_N: np.ndarray
    foreign_N: np.ndarray
    tokens_N: Sequence[Sequence[int]]
    advantages_N: np.ndarray
    owner_N: np.ndarray
    wave_N: np.ndarray
    local_N: np.ndarray
    logps_N: Sequence[np.ndarray] | None = None

    @property
    def length_N(self) -> np.ndarray:
        return self.prompt_N + self.completion_N


def join_waves(waves: Sequence[RoundRows]) -> RoundRows:
    """Number the rows of all waves of a round through, in the order of sampling."""
    joined: dict[str, Any] = {}
    for field in fields(RoundRows):
        columns = [getattr(rows, field.name) for rows in waves]
        if field.name == "wave_N":
            columns = [np.full(len(rows.owner_N), w) for w, rows in enumerate(waves)]
        if any(column is None for column in columns):
            joined[field.name] = None
        elif isinstance(columns[0], np.ndarray):
            joined[field.name] = np.concatenate(columns)
        else:
            joined[field.name] = [row for column in columns for row in column]
    return RoundRows(**joined)


def gather_round(
    accelerator: Any,
    batch: dict[str, Any],
    *,
    num_tokens: Sequence[int],
    prompt_ids: Sequence[str],
    image_token_ids: Sequence[int],
    with_logps: bool = False,
) -> RoundRows:
    """Gather what decisions need from all ranks, for one wave.

    Args:
        batch: TRL's batch of this rank.
        num_tokens: Response lengths on this rank.
        prompt_ids: The round's prompts, which every rank must have read.
        image_token_ids: Tokens that stand for image features.
        with_logps: Gather the sampler's log-probs too.

    Raises:
        FastRLError: the ranks read different prompts.
    """
    ids, device = batch["completion_ids"], batch["completion_ids"].device
    lengths = torch.tensor(num_tokens, device=device)
    mask = loss_mask(batch).bool()
    tokens_of_images = torch.tensor(list(image_token_ids), dtype=ids.dtype, device=device)
    images = batch.get("num_images") or [0] * len(ids)
    columns = torch.stack(
        [
            batch["prompt_mask"].sum(1),
            batch["completion_mask"].sum(1),
            mask.sum(1),
            torch.tensor(images, device=device),
            (torch.isin(ids, tokens_of_images) & mask).any(1).long(),
            lengths,
            torch.full_like(lengths, zlib.crc32("\n".join(prompt_ids).encode())),
        ],
        dim=1,
    )
    numbers = accelerator.gather(columns).cpu().numpy()
    if len(set(numbers[:, 6].tolist())) > 1:
        raise FastRLError(
            "the ranks read different prompts in the same round. Every rank must see the same data set in the same "
            "order: load it the same way on every rank, with the same seed and without a dispatching data loader."
        )
    # One gather for ids and for what wrote them: -1 where it was not the model.
    written = ids.masked_fill(batch["tool_mask"] == 0, -1) if "tool_mask" in batch else ids
    all_ids = accelerator.gather(accelerator.pad_across_processes(written, dim=1)).cpu().numpy()
    responses = [row[:length] for row, length in zip(all_ids, numbers[:, 5], strict=True)]
    num_ranks = accelerator.num_processes
    owner_N = owners(len(responses), num_ranks)
    logps_N = None
    if with_logps:
        sampled = accelerator.pad_across_processes(batch["sampling_per_token_logps"], dim=1)
        all_logps = accelerator.gather(sampled).cpu().double().numpy()
        logps_N = [
            logps[: len(tokens)][tokens >= 0] for logps, tokens in zip(all_logps, responses, strict=True)
        ]
    return RoundRows(
        prompt_N=numbers[:, 0],
        completion_N=numbers[:, 1],
        loss_N=numbers[:, 2],
        image_N=numbers[:, 3] > 0,
        foreign_N=numbers[:, 4] > 0,
        tokens_N=[tokens[tokens >= 0] for tokens in responses],
        advantages_N=accelerator.gather(batch["advantages"]).cpu().double().numpy(),
        owner_N=owner_N,
        wave_N=np.zeros(len(responses), dtype=np.int64),
        local_N=np.arange(len(responses)) % max(1, len(ids)),
        logps_N=logps_N,
    )


def build_micro_batches(
    accelerator: Any,
    batches: Sequence[dict[str, Any]],
    plans: Sequence[WindowPlan],
    rows: RoundRows,
    *,
    keep_N: np.ndarray,
    advantages_N: np.ndarray,
    group_N: np.ndarray,
    steps_per_generation: int,
    pad_token_id: int,
    multiple: int | None,
) -> list[MicroBatch | None]:
    """Move surplus rows to the ranks that the plan gives them to, and make this rank's micro-steps.

    Args:
        batches: TRL's batch of this rank, one per wave.
        keep_N, advantages_N: Rows to train on, and what their log-probs are weighted with.
        group_N: Which prompt each row continues.
        steps_per_generation: TRL's; its token-sum losses divide by
            num_items_in_batch * micro-batches / steps_per_generation.

    Returns:
        One entry per micro-step of all windows; None = skipped, on every rank.
    """
    rank = accelerator.process_index
    filler_R = fillers(keep_N, rows.length_N, rows.image_N, rows.owner_N)
    own = _rows_of_this_rank(accelerator, batches, plans, rows, filler_R)
    micro_batches: list[MicroBatch | None] = []
    for plan in plans:
        for step_R in zip(*plan.steps_R, strict=True):
            if step_R[rank] is None:
                micro_batches.append(None)
                continue
            numbers = step_R[rank]
            taken = [dummy_of(own[filler_R[rank]]) if row == DUMMY else own[row] for row in numbers]
            inputs = collate(taken, pad_token_id=pad_token_id, multiple=multiple)
            advantages = [0.0 if row == DUMMY else advantages_N[row] for row in numbers]
            prompts = [int(group_N[filler_R[rank] if row == DUMMY else row]) for row in numbers]
            inputs["advantages"] = torch.tensor(advantages).to(batches[0]["advantages"])
            divide_by = plan.denominators.tokens * steps_per_generation / plan.num_micro_batches
            inputs["num_items_in_batch"] = torch.tensor(divide_by, device=accelerator.device)
            trained = [row for step in step_R for row in step if row != DUMMY]
            micro_batches.append(
                MicroBatch(
                    inputs,
                    num_micro_batches=plan.num_micro_batches,
                    num_steps=len(plan.steps_R[rank]),
                    denominators=plan.denominators,
                    num_rows=len(trained),
                    num_tokens=int(rows.loss_N[trained].sum()),
                    groups=prompts,
                )
            )
    return micro_batches


def _rows_of_this_rank(
    accelerator: Any,
    batches: Sequence[dict[str, Any]],
    plans: Sequence[WindowPlan],
    rows: RoundRows,
    filler_R: Sequence[int],
) -> dict[int, Row]:
    """The rows that this rank trains on or fills up with, by number: its own and those it is sent."""
    rank = accelerator.process_index
    split_W = [split_rows(batch) for batch in batches]

    def row_of(number: int) -> Row:
        lengths = {"num_prompt": rows.prompt_N[number], "num_completion": rows.completion_N[number]}
        return take_row(split_W[rows.wave_N[number]], int(rows.local_N[number]), **lengths)

    wanted = {filler_R[rank], *(row for plan in plans for row in plan.rows(rank) if row != DUMMY)}
    own = {row: row_of(row) for row in sorted(wanted) if rows.owner_N[row] == rank}
    moving = moves(plans, filler_R, rows.owner_N)
    if any(numbers for targets in moving for numbers in targets):
        outgoing = [[row_of(row) for row in numbers] for numbers in moving[rank]]
        incoming = [moving[source][rank] for source in range(len(moving))]
        received = exchange(outgoing, [len(numbers) for numbers in incoming], accelerator.device)
        for numbers, arrived in zip(incoming, received, strict=True):
            own.update(zip(numbers, arrived, strict=True))
    return own
