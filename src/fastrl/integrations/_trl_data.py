"""The training data as FastRL reads it: one row per prompt, each with a stable id."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from fastrl.types import GroupError

PROMPT_ID = "fastrl_prompt_id"
"""Column that carries the prompt id from the loader to the trainer; reward functions never see it."""


_RESERVE = 3
"""Keeps the generator of the reserve apart from others of the same seed."""


class NumberedRows(Dataset):
    """A map-style data set whose rows carry their prompt id.

    A negative index -1 - i stands for row i where only its id is wanted: a round's rows are read
    (and its images decoded) for its first micro-step alone, the others repeat them.
    """

    def __init__(self, rows: Any, prompt_ids: Sequence[str]) -> None:
        self.rows = rows
        self.prompt_ids = prompt_ids

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0:
            return {PROMPT_ID: self.prompt_ids[~index]}
        return {**self.rows[index], PROMPT_ID: self.prompt_ids[index]}


class PromptSampler(Sampler):
    """Yield the P prompts of each round, each round repeated for its micro-steps and ranks.

    A pure function of (seed, epoch), with the permutations of TRL's own sampler. The epoch comes
    from the trainer's state: a sampler that counts its own epochs replays the first one after a
    resume.

    Args:
        num_rows: Prompts in the data set; the incomplete last round of an epoch is left out.
        prompts_per_round: P.
        num_micro_steps: Micro-steps of a round. Those after the first name its rows without reading them.
        num_ranks: Every rank gets the same prompts.
        epoch: Returns the current epoch.
    """

    def __init__(
        self,
        num_rows: int,
        prompts_per_round: int,
        *,
        num_micro_steps: int,
        num_ranks: int,
        shuffle: bool,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        self.num_rows, self.prompts_per_round = num_rows, prompts_per_round
        self.num_micro_steps, self.num_ranks = num_micro_steps, num_ranks
        self.shuffle, self.seed, self.epoch = shuffle, seed, epoch

    def __len__(self) -> int:
        num_rounds = self.num_rows // self.prompts_per_round
        return num_rounds * self.prompts_per_round * self.num_micro_steps * self.num_ranks

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(self.epoch() + 1):
                order = torch.randperm(self.num_rows, generator=generator).tolist()
        for start in range(0, self.num_rows - self.prompts_per_round + 1, self.prompts_per_round):
            chunk = order[start : start + self.prompts_per_round]
            for micro_step in range(self.num_micro_steps):
                for _ in range(self.num_ranks):
                    yield from chunk if micro_step == 0 else [~row for row in chunk]


class Reserve:
    """More prompts than the loader gives: an endless stream of shuffled passes over the data set.

    A pure function of (seed, prompts drawn so far), so a resume needs that number alone. The loader's own
    order, the epochs and the schedule stay what they are.

    Args:
        num_rows: Prompts in the data set.
        seed: Of the passes.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed, self.num_drawn = num_rows, seed, 0
        self._pass: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def draw(self, num: int, *, without: set[int]) -> list[int]:
        """Return up to `num` further rows; fewer where the data set has no others left."""
        drawn: list[int] = []
        taken = set(without)
        while len(drawn) < num and len(taken) < self.num_rows:
            row = self._next()
            if row not in taken:
                drawn.append(row)
                taken.add(row)
        return drawn

    def _next(self) -> int:
        number, place = divmod(self.num_drawn, self.num_rows)
        if self._pass[0] != number:
            rng = np.random.default_rng([self.seed, _RESERVE, number])
            self._pass = number, rng.permutation(self.num_rows)
        self.num_drawn += 1
        return int(self._pass[1][place])


def own_row(row: dict[str, Any]) -> dict[str, Any]:
    """Copy a row for one of its rollouts: a reward function may change its lists. Images are shared."""
    return {key: value if key in ("image", "images") else copy.deepcopy(value) for key, value in row.items()}


def prompt_ids_of(dataset: Any) -> list[str]:
    """The data set's own `id` column, which must be unique; else the row numbers."""
    if "id" not in (dataset.column_names or []):
        return [str(row) for row in range(len(dataset))]
    values = list(dataset.with_format(None)["id"])
    ids = [str(value) for value in values]
    seen: set[str] = set()
    for row, prompt_id in enumerate(ids):
        if prompt_id in seen or values[row] is None:
            raise GroupError(
                f"train_dataset row {row}: id {prompt_id!r} is missing or occurs twice. Histories and records are "
                "kept by id. Make the column unique, or remove it to use row numbers."
            )
        seen.add(prompt_id)
    return ids
