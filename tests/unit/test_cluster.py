"""The simulated cluster against closed forms: equal lengths leave nothing to chance."""

from dataclasses import replace

import numpy as np
import pytest

from fastrl.bench.cluster import FILLING_TOKENS, Cluster, compare, simulate_step
from fastrl.bench.stage_model import PUBLISHED, StageTimes, predict
from fastrl.types import ConfigError

STAGES = StageTimes(generation=80.0, old=50.0, reference=70.0, update=300.0, rest=5.0)
EVEN = Cluster(num_ranks=4, num_prompts=64, num_rollouts=8, num_updates=2, spread=0.0, generation_floor=0.25)


def step(cluster: Cluster, **shares: float):
    shares = {"kept_share": 1.0, **shares}
    return simulate_step(cluster, STAGES, measured=EVEN, rng=np.random.default_rng(0), **shares)


def test_an_unpruned_step_takes_what_was_measured():
    assert step(EVEN).seconds == pytest.approx(STAGES.total)


def test_where_nothing_is_filled_or_waited_for_it_is_the_stage_model():
    found = step(EVEN, kept_share=0.25, rollout_share=0.5)
    generation = 80.0 * (0.25 + 0.75 * 0.5)
    expected = predict(replace(STAGES, generation=0.0), kept_share=0.25) + generation
    assert found.seconds == pytest.approx(expected)
    assert (found.padding_share, found.waiting_share, found.num_updates) == (0, pytest.approx(0), 2)


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_ranks_share_everything_but_the_floor(ranks):
    found = step(replace(EVEN, num_ranks=ranks))
    assert found.seconds == pytest.approx(80.0 * 0.25 + (80.0 * 0.75 + 420.0) * 4 / ranks + 5.0)


def test_a_batch_that_grows_with_the_cluster_takes_the_same_time():
    found = step(replace(EVEN, num_ranks=64, num_prompts=64 * 16), kept_share=0.25)
    assert found.seconds == pytest.approx(step(EVEN, kept_share=0.25).seconds)


def test_filling_rows_are_paid_for():
    """9 kept rows on 4 ranks in 2 steps: 2 rows per rank and step, 7 of 16 filled up."""
    found = step(EVEN, kept_share=9 / 512)
    tokens = 9 * 1000 + 7 * FILLING_TOKENS
    assert found.rows_per_rank == 2
    assert found.padding_share == pytest.approx(7 * FILLING_TOKENS / tokens)
    assert found.waiting_share > 0


def test_top_up_fills_with_whole_rollouts():
    found = step(replace(EVEN, align="top_up"), kept_share=9 / 512)
    assert found.padding_share == pytest.approx(7 / 16)
    assert found.waiting_share == pytest.approx(0)


@pytest.mark.parametrize(("kept_share", "num_updates"), [(1.0, 2), (0.5, 1), (0.1, 1)])
def test_rows_per_step_are_kept_and_steps_are_saved(kept_share, num_updates):
    found = step(replace(EVEN, updates="rows"), kept_share=kept_share)
    assert (found.num_updates, found.rows_per_rank) == (num_updates, 64)


@pytest.mark.parametrize(("data", "kept", "sampled"), [("Geo3K", 0.379, 0.91), ("GeoQA", 0.418, 0.76)])
def test_published_steps_are_met_within_three_percent(data, kept, sampled):
    """On the published four GPUs, with the kept shares that the published update times imply."""
    found = compare(
        Cluster(),
        PUBLISHED[data, "GRPO"],
        measured=Cluster(),
        kept_share=kept,
        rollout_share=sampled,
        num_draws=5,
    )
    assert found["seconds"] == pytest.approx(PUBLISHED[data, "FastRL"].total, rel=0.03)


def test_draws_are_repeatable():
    found = [compare(Cluster(), STAGES, measured=EVEN, kept_share=0.3, num_draws=3, seed=4) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change", [{"num_ranks": 0}, {"updates": "some"}, {"align": "none"}, {"generation_floor": 1.5}]
)
def test_impossible_clusters_are_refused(change):
    with pytest.raises(ConfigError):
        replace(EVEN, **change)


def test_shares_are_shares():
    with pytest.raises(ConfigError, match=r"kept_share: 1\.5"):
        step(EVEN, kept_share=1.5)
