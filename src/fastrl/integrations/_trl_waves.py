"""A round's prompts and waves of generation: skipped prompts, more prompts (`refill`), and ranks that share evenly.

The loader gives a round its P prompts. A budget may skip some; `refill` may draw others from the reserve, before
anything is sampled or after rewards are known. Every wave is one call of TRL's generation and scoring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastrl.integrations._trl_data import PROMPT_ID, NumberedRows, Reserve
from fastrl.integrations._trl_generation import GroupsMixin
from fastrl.integrations._trl_round import RoundRows, gather_round
from fastrl.method import FastRL
from fastrl.types import Group


@dataclass(frozen=True, kw_only=True)
class Wave:
    """One generation.

    Args:
        batch: TRL's batch of this rank.
        rows: Its rollouts over all ranks.
        prompt_ids, counts_P: Its prompts and their numbers of rollouts.
        rewards_per_func: (N, number of reward functions), of all ranks.
    """

    batch: dict[str, Any]
    rows: RoundRows
    prompt_ids: list[str]
    counts_P: np.ndarray
    rewards_per_func: torch.Tensor


class WavesMixin(GroupsMixin):
    """Sample a round in waves until it has the prompts that the method asks for."""

    fastrl: FastRL
    _reserve: Reserve
    _row_of_id: dict[str, int]
    _numbered_rows: NumberedRows
    _groups: Callable[[Wave], list[Group]]

    @property
    def _image_token_ids(self) -> list[int]:
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        ids = [getattr(self.model.config, name, None) for name in names]
        return [int(token) for token in ids if token is not None] if self._is_vlm else []

    def _sample_round(self, inputs: Sequence[dict[str, Any]]) -> tuple[list[Wave], list[Group]]:
        """Sample and score the loader's prompts, and those that `refill` adds.

        Args:
            inputs: The P rows that the loader gives every rank.

        Returns:
            The waves, and the groups of all of them in the order of sampling.
        """
        self._used = {self._row_of_id[row[PROMPT_ID]] for row in inputs}
        self._num_skipped, num_prompts = 0, len(inputs)
        pending = [*inputs, *self._draw(self.fastrl.num_prompts(num_prompts) - num_prompts)]
        waves: list[Wave] = []
        groups: list[Group] = []
        earlier: dict[str, Any] = {}
        while pending:
            waves.append(self._sample_wave(*self._planned(pending)))
            if earlier:
                _prepend(self._logs, earlier)
            earlier = _tables(self._logs)
            groups += self._groups(waves[-1])
            missing = self.fastrl.num_prompts_missing(groups, num_prompts)
            pending = self._draw(missing) if len(waves) <= self.fastrl.config.max_refills else []
        self._log_metric_value("prompts/sampled", float(len(groups)))
        self._log_metric_value("prompts/skipped", float(self._num_skipped))
        self._log_metric_value("prompts/waves", float(len(waves)))
        return waves, groups

    def _draw(self, num: int) -> list[dict[str, Any]]:
        rows = self._reserve.draw(num, without=self._used)
        self._used.update(rows)
        return [self._numbered_rows[row] for row in rows]

    def _planned(self, pending: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], np.ndarray]:
        """Leave out, or replace, the prompts that the budget skips; returns prompts and their counts."""
        wanted, chosen = len(pending), []
        skipped: list[dict[str, Any]] = []
        for _ in range(1 + self.fastrl.config.max_refills):
            counts_P = self.fastrl.plan([row[PROMPT_ID] for row in pending]).tolist()
            planned = list(zip(pending, counts_P, strict=True))
            chosen += [(row, count) for row, count in planned if count]
            skipped += [row for row, count in planned if not count]
            pending = [] if self.fastrl.config.refill == "none" else self._draw(wanted - len(chosen))
            if not pending:
                break
        chosen += self._for_even_ranks(len(chosen), skipped)
        self._num_skipped += len(skipped)
        return [row for row, _ in chosen], np.array([count for _, count in chosen], dtype=np.int64)

    def _for_even_ranks(
        self, num_chosen: int, skipped: list[dict[str, Any]]
    ) -> list[tuple[dict[str, Any], int]]:
        """More prompts, with the fewest rollouts, until full groups would fill the ranks evenly."""
        added: list[tuple[dict[str, Any], int]] = []
        while (num_chosen + len(added)) * self.num_generations % self.accelerator.num_processes:
            more = [skipped.pop(0)] if skipped else self._draw(1)
            # Where the data set has no other prompt, one is sampled twice: two groups of one prompt.
            row = more[0] if more else self._numbered_rows[min(self._used)]
            added.append((row, self.fastrl.config.min_rollouts))
        return added

    def _sample_wave(self, prompts: Sequence[dict[str, Any]], counts_P: np.ndarray) -> Wave:
        rows = [dict(row) for row in prompts]
        self._round_prompt_ids = [row.pop(PROMPT_ID) for row in rows]
        batch = self._sample(rows, counts_P)
        with self._clock("select"):
            gathered = gather_round(
                self.accelerator,
                batch,
                num_tokens=self._num_tokens,
                prompt_ids=self._round_prompt_ids,
                image_token_ids=self._image_token_ids,
                with_logps=self.fastrl.config.similarity == "surprisal",
            )
        return Wave(
            batch=batch,
            rows=gathered,
            prompt_ids=self._round_prompt_ids,
            counts_P=self._counts_P,
            rewards_per_func=self._rewards_per_func,
        )


def _tables(logs: dict[str, Any]) -> dict[str, Any]:
    """Copy TRL's table of completions: lists, and dictionaries of lists."""
    return {
        name: {key: list(column) for key, column in value.items()} if isinstance(value, dict) else list(value)
        for name, value in logs.items()
    }


def _prepend(logs: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Put the rows of earlier waves before those of the last one; TRL's columns keep the last rows that fit."""
    for name, value in logs.items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        for key, column in list(pairs):
            before = earlier[name].get(key, []) if isinstance(value, dict) else earlier[name]
            rows = [*before, *column]
            column.clear()
            column.extend(rows)
