"""Groups of different sizes: TRL's own advantages for each, whatever its scale and aggregation."""

import numpy as np
import pytest
import torch
from trl_support import (
    ScriptedFast,
    ScriptedStock,
    length_reward,
    parity_reward,
    relative_error,
    train,
    vision_dataset,
)

from fastrl.config import FastRLConfig

KEEP_ALL = FastRLConfig(pruner="none", budget="fixed")
COUNTS = [3, 2, 4, 2]
SETTINGS = {"per_device_train_batch_size": 16, "max_steps": 1}


def sometimes_none(completion_ids, **_):
    """Unscorable rollouts inside ragged groups: both are NaN to TRL, and must not be mistaken for each other."""
    return [None if len(ids) % 3 == 0 else float(len(ids)) for ids in completion_ids]


class Ragged(ScriptedFast):
    def __init__(self, *args, counts=COUNTS, **kwargs):
        super().__init__(*args, **kwargs)
        self.fastrl.plan = lambda prompt_ids: np.array(counts)


def expected_advantages(rewards, scale, aggregation):
    """TRL's definitions restated for groups of any size. rewards: (N, number of functions), NaN = no reward."""
    ends = np.cumsum(COUNTS)
    groups = [slice(end - count, end) for end, count in zip(ends, COUNTS, strict=True)]
    unscorable = np.isnan(rewards).all(1)
    if aggregation == "sum_then_normalize":
        total = np.where(unscorable, np.nan, np.nansum(rewards, axis=1))
        advantages = np.concatenate([total[g] - np.nanmean(total[g]) for g in groups])
        if scale == "group":
            std = np.concatenate([np.full(g.stop - g.start, np.nanstd(total[g], ddof=1)) for g in groups])
        else:
            std = np.full(len(total), np.nanstd(total, ddof=1))
        if scale != "none":
            advantages = advantages / (std + 1e-4)
    else:
        parts = [
            (rewards[g] - np.nanmean(rewards[g], 0)) / (np.nanstd(rewards[g], 0, ddof=1) + 1e-4)
            for g in groups
        ]
        total = np.where(unscorable, np.nan, np.nansum(np.concatenate(parts), axis=1))
        advantages = (total - np.nanmean(total)) / (np.nanstd(total, ddof=1) + 1e-4)
    return np.nan_to_num(advantages)


@pytest.mark.parametrize(
    "reward_funcs", [[parity_reward, length_reward], [sometimes_none]], ids=["two", "none"]
)
@pytest.mark.parametrize(
    ("scale", "aggregation"),
    [
        ("group", "sum_then_normalize"),
        ("batch", "sum_then_normalize"),
        ("none", "sum_then_normalize"),
        ("group", "normalize_then_sum"),
    ],
)
def test_advantages_are_those_of_trl_in_each_group(tmp_path, scale, aggregation, reward_funcs):
    trainer, _ = train(
        Ragged, tmp_path, trainer_kwargs={"fastrl": KEEP_ALL}, reward_funcs=reward_funcs, scale_rewards=scale,
        multi_objective_aggregation=aggregation, **SETTINGS,
    )  # fmt: skip
    rewards = trainer._rewards_per_func.double().numpy()
    assert rewards.shape == (sum(COUNTS), len(reward_funcs))
    expected = expected_advantages(rewards, scale, aggregation)
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(list(trainer._logs["advantages"]), expected, atol=2e-4)
    trained = torch.cat([m["advantages"] for m in trainer._micro_batches if m is not None]).double().numpy()
    scorable = expected[~np.isnan(rewards).all(1)]
    np.testing.assert_allclose(np.sort(trained), np.sort(scorable), atol=2e-4)


def test_the_table_of_completions_has_one_row_per_rollout(tmp_path):
    trainer, _ = train(
        Ragged, tmp_path, trainer_kwargs={"fastrl": KEEP_ALL}, log_completions=True, **SETTINGS
    )
    logs = trainer._logs
    columns = [
        logs["prompt"],
        logs["completion"],
        logs["advantages"],
        *logs["rewards"].values(),
        *logs["extra"].values(),
    ]
    assert {len(column) for column in columns} == {sum(COUNTS)}
    assert not np.isnan(list(logs["rewards"]["parity_reward"])).any()


def test_metrics_count_rollouts_not_the_filling(tmp_path):
    trainer, _ = train(Ragged, tmp_path, trainer_kwargs={"fastrl": KEEP_ALL}, **SETTINGS)
    log = trainer.state.log_history[0]
    assert log["fastrl/rollouts"] == sum(COUNTS)
    assert (log["fastrl/num_rollouts/min"], log["fastrl/num_rollouts/max"]) == (2, 4)
    assert log["reward"] == pytest.approx(float(trainer._rewards_per_func.sum(1).mean()), rel=1e-5)


def test_equal_counts_are_the_ordinary_case(tmp_path):
    kwargs = {"fastrl": KEEP_ALL, "counts": [4, 4, 4, 4]}
    _, found = train(Ragged, tmp_path, trainer_kwargs=kwargs, **SETTINGS)
    _, expected = train(ScriptedStock, tmp_path, **SETTINGS)
    assert relative_error(found[0], expected[0]) < 1e-5


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_gradient_is_the_sum_over_groups_of_their_own_size(tmp_path, loss):
    """Stock TRL on the same prompts with G = 2 sees the first two rollouts of each group, as [2, 2, 2, 2] does."""
    smaller = {"num_generations": 2, "per_device_train_batch_size": 8, "max_steps": 1, "loss_type": loss}
    _, expected = train(ScriptedStock, tmp_path, **smaller)
    kwargs = {"fastrl": KEEP_ALL, "counts": [2, 2, 2, 2]}
    _, found = train(Ragged, tmp_path, trainer_kwargs=kwargs, loss_type=loss, **SETTINGS)
    assert expected[0].norm() > 1e-4
    assert relative_error(found[0], expected[0]) < 1e-5


def test_images_follow_ragged_groups(tmp_path):
    from fastrl import testbed

    model, processor = testbed.load()
    dataset = vision_dataset(image_counts=(1, 2, 0))
    trainer, gradients = train(
        Ragged, tmp_path, model=model, processing_class=processor, dataset=dataset,
        trainer_kwargs={"fastrl": KEEP_ALL}, learning_rate=1e-4, **SETTINGS,
    )  # fmt: skip
    assert gradients[0].norm() > 1e-4
    expected = {int(i): len(dataset[int(i)]["images"]) for i in trainer._round_prompt_ids}
    found = sorted(n for m in trainer._micro_batches if m is not None for n in m["num_images"])
    ids = [int(i) for i, count in zip(trainer._round_prompt_ids, COUNTS, strict=True) for _ in range(count)]
    assert found == sorted(expected[i] for i in ids)
