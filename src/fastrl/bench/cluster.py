"""Seconds of a step on many ranks: what padding, imbalance and fixed costs leave of what pruning saves.

    seconds = generation + sum over optimizer steps of (slowest rank's tokens) * seconds per token + rest

Rows are shared out as verl does: sorted by length, as many on every rank, filling rows to a multiple of ranks and
optimizer steps. An optimizer step takes as long as its slowest rank. What generation takes splits into a part that
grows with the rollouts of a rank and a floor, the longest answer, which no number of ranks shortens.

The cluster is simulated, the stages are measured ones (`bench.stage_model`): it says what to expect and what to look
at, not what a given machine does. Networks, memory and the pace of different kernels are not in it.
"""

from dataclasses import asdict, dataclass

import numpy as np

from fastrl.batching import rows_per_update
from fastrl.bench.stage_model import StageTimes
from fastrl.types import ConfigError

FILLING_TOKENS = 128
"""Tokens of verl's filling rows."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A run, and the machine it is on.

    Args:
        num_ranks: Data-parallel ranks.
        num_prompts, num_rollouts: Of a step.
        num_updates: Optimizer steps of a step, without pruning.
        updates: fixed (as many optimizer steps on fewer rows) | rows (as many rows in fewer optimizer steps).
        align: dummy (short rows without loss) | top_up (pruned rollouts).
        prompt_tokens, response_tokens: Means; lengths of responses are log-normal with this spread.
        spread: Standard deviation of the logarithm of the response length.
        generation_floor: Share of the measured generation that more ranks, or fewer rollouts, do not shorten.

    Raises:
        ConfigError: a number that is not positive, or an unknown choice.
    """

    num_ranks: int = 4
    num_prompts: int = 256
    num_rollouts: int = 8
    num_updates: int = 2
    updates: str = "fixed"
    align: str = "dummy"
    prompt_tokens: float = 700.0
    response_tokens: float = 300.0
    spread: float = 0.5
    generation_floor: float = 0.3

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_prompts", "num_rollouts", "num_updates"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}: a cluster has at least one.")
        if self.updates not in ("fixed", "rows") or self.align not in ("dummy", "top_up"):
            raise ConfigError(
                f"updates: {self.updates}, align: {self.align}: choose fixed or rows, and dummy or top_up."
            )
        if not 0 <= self.generation_floor <= 1:
            raise ConfigError(f"generation_floor: {self.generation_floor} is a share: choose it in [0, 1].")

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.num_rollouts

    @property
    def num_tokens(self) -> float:
        """Expected tokens of an unpruned step."""
        return self.num_rows * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A simulated step.

    Args:
        seconds: Of the whole step.
        update_seconds: Of log-probs and update: what pruning shortens.
        padding_share: Tokens of rows that were added to fill up, of all tokens that were computed.
        waiting_share: Of the ranks' time in the update that is spent waiting for the slowest.
        num_updates: Optimizer steps that were taken.
        rows_per_rank: Rows of an optimizer step on one rank.
    """

    seconds: float
    update_seconds: float
    padding_share: float
    waiting_share: float
    num_updates: int
    rows_per_rank: int


def simulate_step(
    cluster: Cluster,
    stages: StageTimes,
    *,
    measured: Cluster,
    kept_share: float,
    rollout_share: float = 1.0,
    rng: np.random.Generator,
) -> Step:
    """Simulate one step.

    Args:
        cluster: Where and how.
        stages: Seconds of an unpruned step on the cluster `measured`: they set the prices of a token and of a rollout.
        kept_share: Rollouts trained on, of those that an unpruned step samples; at least one is kept.
        rollout_share: Rollouts sampled, of those that an unpruned step samples.
        rng: Draws lengths, and which rollouts are kept.

    Raises:
        ConfigError: a share outside [0, 1].
    """
    for name, share in (("kept_share", kept_share), ("rollout_share", rollout_share)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name}: {share} is a share of the rollouts: choose it in [0, 1].")
    num_rows = cluster.num_rows
    responses = rng.lognormal(
        np.log(cluster.response_tokens) - cluster.spread**2 / 2, cluster.spread, num_rows
    )
    lengths = cluster.prompt_tokens + responses
    num_kept = max(1, round(kept_share * num_rows))
    kept = rng.permutation(num_rows)[:num_kept]
    per_update = -(-num_rows // cluster.num_updates)
    rows, num_updates = _filled(num_kept, per_update, cluster)
    spare = np.sort(lengths[np.setdiff1d(np.arange(num_rows), kept)])
    num_filling = rows * num_updates - num_kept
    filling = np.full(num_filling, float(FILLING_TOKENS))
    if cluster.align == "top_up":
        taken = min(num_filling, len(spare))
        filling[:taken] = rng.permutation(spare)[:taken]
    dealt = _deal(np.concatenate([lengths[kept], filling]), cluster.num_ranks, num_updates)
    seconds_per_token = stages.trained * measured.num_ranks / measured.num_tokens
    busiest = dealt.max(axis=0).sum()
    update_s = float(busiest * seconds_per_token)
    floor_s = stages.generation * cluster.generation_floor
    per_rank = cluster.num_rows / cluster.num_ranks / (measured.num_rows / measured.num_ranks)
    sampling_s = (stages.generation - floor_s) * rollout_share * per_rank
    return Step(
        seconds=floor_s + sampling_s + update_s + stages.rest,
        update_seconds=update_s,
        padding_share=float(filling.sum() / dealt.sum()),
        waiting_share=float(1 - dealt.sum() / (busiest * cluster.num_ranks)),
        num_updates=num_updates,
        rows_per_rank=rows // cluster.num_ranks,
    )


def compare(
    cluster: Cluster,
    stages: StageTimes,
    *,
    measured: Cluster,
    kept_share: float,
    rollout_share: float = 1.0,
    num_draws: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Return what pruning gains on this cluster, over draws of lengths and kept rollouts.

    Returns:
        speedup (mean seconds without / with pruning), unpruned_seconds, and the means of the pruned steps' fields.
    """

    def steps(kept_share: float, rollout_share: float) -> list[dict[str, float]]:
        return [
            asdict(
                simulate_step(
                    cluster,
                    stages,
                    measured=measured,
                    kept_share=kept_share,
                    rollout_share=rollout_share,
                    rng=np.random.default_rng([seed, draw]),
                )
            )
            for draw in range(num_draws)
        ]

    pruned = steps(kept_share, rollout_share)
    means = {name: float(np.mean([step[name] for step in pruned])) for name in pruned[0]}
    unpruned = float(np.mean([step["seconds"] for step in steps(1.0, 1.0)]))
    return {"speedup": unpruned / means["seconds"], "unpruned_seconds": unpruned, **means}


def _filled(num_kept: int, rows_unpruned: int, cluster: Cluster) -> tuple[int, int]:
    """(rows of an optimizer step over all ranks, optimizer steps), as the verl adapter plans them."""
    ranks = cluster.num_ranks
    if cluster.updates == "rows":
        rows = -(-rows_unpruned // ranks) * ranks
    else:
        rows = rows_per_update(num_kept, cluster.num_updates, multiple=ranks)
    return rows, -(-num_kept // rows)


def _deal(lengths: np.ndarray, num_ranks: int, num_updates: int) -> np.ndarray:
    """(ranks, updates) tokens: rows dealt by length, there and back, so that every rank has as many."""
    by_length = np.sort(lengths)[::-1].reshape(-1, num_ranks)
    by_length[1::2] = by_length[1::2, ::-1]
    per_rank = by_length.T  # (ranks, rows of a rank)
    return np.stack([per_rank[:, update::num_updates].sum(axis=1) for update in range(num_updates)], axis=1)
