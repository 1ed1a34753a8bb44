"""One round of verl as groups: which rows of the transfer queue are which rollout, and what decisions need of them.

A key of the queue is `{uid}_{session}_{output}`: a prompt, one of its rollouts, and one row of that rollout (an agent
that rewrites its context leaves several). A rollout is kept or dropped with all of its rows.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from fastrl.types import Group, GroupError, Selection

_FIELDS = ("index", "prompts", "responses", "response_mask", "rm_scores", "extra_fields", "num_turns")


@dataclass(frozen=True, kw_only=True)
class Round:
    """All rollouts of one step, prompts in the order of their data-set index, rollouts in the order of sampling.

    Args:
        groups: One per prompt, with the estimator's advantages over the full group.
        keys_PG: The rows of each rollout of each prompt.
        tokens_N: Loss tokens of each row, in the order of `keys_PG`.
        metrics: verl's own metrics of data, over all rollouts.
    """

    groups: list[Group]
    keys_PG: list[list[list[str]]]
    tokens_N: np.ndarray
    metrics: dict[str, float]

    def rows(self, selections: Sequence[Selection]) -> np.ndarray:
        """(N,) bool: rows of kept rollouts."""
        return np.array(
            [
                keep
                for keys_G, selection in zip(self.keys_PG, selections, strict=True)
                for keys, keep in zip(keys_G, selection.keep_G.tolist(), strict=True)
                for _ in keys
            ],
            dtype=bool,
        )

    def pushes(self, selections: Sequence[Selection]) -> dict[str, float]:
        """What the log-probs of each kept row are multiplied with, by key."""
        return {
            key: float(push)
            for group, keys_G, selection in zip(self.groups, self.keys_PG, selections, strict=True)
            for keys, push, keep in zip(keys_G, selection.push_G(group), selection.keep_G, strict=True)
            for key in keys
            if keep
        }

    @property
    def keys(self) -> list[str]:
        return [key for keys_G in self.keys_PG for keys in keys_G for key in keys]

    @property
    def live_N(self) -> np.ndarray:
        """(N,) bool: rows of groups with signal."""
        sizes = [sum(map(len, keys_G)) for keys_G in self.keys_PG]
        return np.repeat([group.has_signal for group in self.groups], sizes)


def read_round(batch: Any, algorithm: Any, *, outcome_key: str | None, with_logps: bool) -> Round:
    """Read the rollouts of a batch from the transfer queue.

    Args:
        batch: verl's batch: keys in any order.
        algorithm: verl's settings of that name, which say how advantages are estimated.
        outcome_key: Entry of the reward function's extra information that decides zero variance.
        with_logps: Read the sampler's log-probs too.

    Raises:
        GroupError: a reward that is infinite, or an outcome that the reward function did not return.
    """
    fields = [*_FIELDS, "rollout_log_probs"] if with_logps else list(_FIELDS)
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    index = prompt_ids_of(data.pop("index"))
    extra = values_of(data.pop("extra_fields"))
    turns = np.array(values_of(data.pop("num_turns")), dtype=np.int32)
    lengths = {name: data[f"{name}s"].offsets().diff() for name in ("prompt", "response")}
    responses = [row.tolist() for row in data["responses"].unbind()]
    logps = [row.tolist() for row in data.pop("rollout_log_probs").unbind()] if with_logps else None
    padded = data.to_padded_tensor(padding=0)
    mask = padded["response_mask"].bool()
    rewards = padded["rm_scores"].double().sum(-1).numpy()
    table = _Rows(
        keys=batch.keys,
        index=index,
        tokens=[_of_model(tokens, kept) for tokens, kept in zip(responses, mask, strict=True)],
        logps=None
        if logps is None
        else [_of_model(row, kept) for row, kept in zip(logps, mask, strict=True)],
        rewards=rewards,
        outcomes=None if outcome_key is None else [_outcome(row, outcome_key) for row in extra],
        num_tokens=mask.sum(-1).numpy(),
        advantages=_advantages(batch.keys, padded, rewards, algorithm),
    )
    groups, keys_PG = table.groups()
    row_of = {key: row for row, key in enumerate(batch.keys)}
    order = [row_of[key] for keys_G in keys_PG for keys in keys_G for key in keys]
    return Round(
        groups=groups,
        keys_PG=keys_PG,
        tokens_N=table.num_tokens[order],
        metrics=_metrics(padded, lengths, turns, table.advantages),
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Columns of a batch, one entry per row, in its order."""

    keys: Sequence[str]
    index: Sequence[str]
    tokens: Sequence[list[int]]
    logps: Sequence[list[float]] | None
    rewards: np.ndarray
    outcomes: Sequence[float] | None
    num_tokens: np.ndarray
    advantages: np.ndarray

    def groups(self) -> tuple[list[Group], list[list[list[str]]]]:
        """Put the rows together by prompt, rollout and output."""
        by_prompt: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for row, key in enumerate(self.keys):
            uid, session, output = key.rsplit("_", 2)
            by_prompt[uid][int(session)].append((int(output), row))
        found = []
        for sessions in by_prompt.values():
            rows_G = [[row for _, row in sorted(sessions[session])] for session in sorted(sessions)]
            found.append((self._group(rows_G), [[self.keys[row] for row in rows] for rows in rows_G]))
        # Prompts arrive as they finish: their order says nothing, and differs from run to run.
        found.sort(key=lambda pair: (pair[0].prompt_id, pair[1][0][0]))
        return [group for group, _ in found], [keys_G for _, keys_G in found]

    def _group(self, rows_G: list[list[int]]) -> Group:
        last_G = [rows[-1] for rows in rows_G]
        prompt_id = self.index[last_G[0]]
        rewards_G = self.rewards[last_G]
        if np.isinf(rewards_G).any():
            i = int(np.isinf(rewards_G).argmax())
            raise GroupError(
                f"the reward function returned {rewards_G[i]} for rollout {i} of prompt {prompt_id!r}. Rewards must be "
                "finite, or NaN for a rollout that cannot be scored."
            )
        outcomes_G = rewards_G if self.outcomes is None else np.array([self.outcomes[row] for row in last_G])
        # What has no token to learn from stands for nobody. It stays in the baseline and in the outcomes.
        learns_G = np.array([sum(self.num_tokens[row] for row in rows) > 0 for rows in rows_G])
        return Group(
            prompt_id=prompt_id,
            tokens_G=[[token for row in rows for token in self.tokens[row]] for rows in rows_G],
            rewards_G=np.where(learns_G, rewards_G, np.nan),
            advantages_G=self.advantages[last_G],
            outcomes_G=outcomes_G,
            logps_G=None
            if self.logps is None
            else [[logp for row in rows for logp in self.logps[row]] for rows in rows_G],
        )


def values_of(column: Any) -> list[Any]:
    """The entries of a column that is no tensor: tensordict hands it out as a list, a stack or an array."""
    return column.tolist() if hasattr(column, "tolist") else list(column)


def prompt_ids_of(index: Any) -> list[str]:
    """Prompt ids: the number of each row in its data set (`extra_info.index`)."""
    return [str(number) for number in values_of(index)]


def _of_model(values: Sequence[Any], mask: torch.Tensor) -> list[Any]:
    """What the model wrote, without what tools answered: answers that all rollouts get would make them look alike."""
    return [value for value, kept in zip(values, mask.tolist(), strict=False) if kept]


def _outcome(extra_fields: Any, key: str) -> float:
    info = extra_fields.get("reward_extra_info", {})
    if key not in info:
        names = ", ".join(info) or "nothing but a score"
        raise GroupError(
            f"outcome_key: {key!r} is not what the reward function returned ({names}). "
            'Return a mapping with it from the reward function: {"score": ..., "' + key + '": ...}.'
        )
    value = info[key]
    return math.nan if value is None else float(value)


def _advantages(keys: Sequence[str], padded: TensorDict, rewards: np.ndarray, algorithm: Any) -> np.ndarray:
    """(N,) float64: the estimator's own numbers, over full groups; 0 for rows that cannot be scored."""
    advantages = np.zeros(len(keys))
    scored = np.flatnonzero(~np.isnan(rewards)).tolist()
    if not scored:
        return advantages
    mask = torch.ones_like(
        padded["response_mask"][scored]
    )  # also a row without loss tokens is part of the baseline
    data = DataProto(
        batch=TensorDict(
            {"response_mask": mask, "token_level_rewards": padded["rm_scores"][scored].clone()},
            batch_size=len(scored),
        ),
        non_tensor_batch={"uid": np.array([keys[row].rsplit("_", 2)[0] for row in scored], dtype=object)},
    )
    estimated = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[keys[row] for row in scored],
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    advantages[scored] = estimated.batch["advantages"][:, 0].double().numpy()
    return advantages


def _metrics(
    padded: TensorDict, lengths: dict[str, torch.Tensor], turns: np.ndarray, advantages: np.ndarray
) -> dict[str, float]:
    """verl's metrics of data, as it would log them had nothing been pruned."""
    on_tokens = torch.tensor(advantages, dtype=torch.float32)[:, None] * padded["response_mask"]
    columns = {
        "prompts": padded["prompts"],
        "responses": padded["responses"],
        "response_mask": padded["response_mask"],
        "token_level_scores": padded["rm_scores"],
        "token_level_rewards": padded["rm_scores"],
        "advantages": on_tokens,
        "returns": on_tokens,
        "prompt_length": lengths["prompt"].float(),
        "response_length": lengths["response"].float(),
    }
    data = DataProto(
        batch=TensorDict(columns, batch_size=len(turns)), non_tensor_batch={"__num_turns__": turns}
    )
    return compute_data_metrics(batch=data, use_critic=False)
