"""The training data as FastRL reads it: one row per prompt, each with a stable id."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from fastrl.types import GroupError

PROMPT_ID = "fastrl_prompt_id"
"""Column that carries the prompt id from the loader to the trainer; reward functions never see it."""


class NumberedRows(Dataset):
    """A map-style data set whose rows carry their prompt id."""

    def __init__(self, rows: Any, prompt_ids: Sequence[str]) -> None:
        self.rows = rows
        self.prompt_ids = prompt_ids

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], PROMPT_ID: self.prompt_ids[index]}


class PromptSampler(Sampler):
    """Yield the P prompts of each round, each round repeated for its micro-steps and ranks.

    A pure function of (seed, epoch), with the permutations of TRL's own sampler. The epoch comes
    from the trainer's state: a sampler that counts its own epochs replays the first one after a
    resume.

    Args:
        num_rows: Prompts in the data set; the incomplete last round of an epoch is left out.
        prompts_per_round: P.
        repeat: Micro-steps of a round times ranks: every rank gets the same prompts.
        epoch: Returns the current epoch.
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_round: int,
        repeat: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: Callable[[], int],
    ):
        self.num_rows, self.prompts_per_round, self.repeat = num_rows, prompts_per_round, repeat
        self.shuffle, self.seed, self.epoch = shuffle, seed, epoch

    def __len__(self) -> int:
        return self.num_rows // self.prompts_per_round * self.prompts_per_round * self.repeat

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(self.epoch() + 1):
                order = torch.randperm(self.num_rows, generator=generator).tolist()
        for start in range(0, self.num_rows - self.prompts_per_round + 1, self.prompts_per_round):
            for _ in range(self.repeat):
                yield from order[start : start + self.prompts_per_round]


def prompt_ids_of(dataset: Any) -> list[str]:
    """The data set's own `id` column, which must be unique; else the row numbers."""
    if "id" not in (dataset.column_names or []):
        return [str(row) for row in range(len(dataset))]
    ids = [str(value) for value in dataset["id"]]
    seen: set[str] = set()
    for row, prompt_id in enumerate(ids):
        if prompt_id in seen or dataset["id"][row] is None:
            raise GroupError(
                f"train_dataset row {row}: id {prompt_id!r} is missing or occurs twice. Histories and records are "
                "kept by id. Make the column unique, or remove it to use row numbers."
            )
        seen.add(prompt_id)
    return ids
