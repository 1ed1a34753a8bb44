"""What needs the engine: skipped prompts, dynamic sampling, CPPO's allocation, PODS's advantages; and a resume."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trl_compare import logged, run, total
from trl_support import ScriptedFast, ScriptedStock, relative_error, text_dataset, vision_dataset

from fastrl import ConfigError, FastRLConfig
from fastrl.integrations._trl_data import Reserve

# Of text_dataset, every fourth prompt (0, 4, 8, ...) has zero variance, whatever is sampled.
DYNAMIC = FastRLConfig(
    pruner="none", budget="fixed", refill="signal", zero_variance="drop", denominator="live"
)


class Watched(ScriptedFast):
    """Keeps the groups and selections of every round."""

    def _plan_micro_batches(self, batches, rows, groups, selections):
        self.rounds = [*getattr(self, "rounds", []), (groups, selections)]
        return super()._plan_micro_batches(batches, rows, groups, selections)


def trained_groups(groups, selections):
    return [group.prompt_id for group, s in zip(groups, selections, strict=True) if s.keep_G.any()]


def test_dynamic_sampling_fills_the_batch_with_groups_that_have_signal(tmp_path):
    trainer, gradients = run(Watched, tmp_path, DYNAMIC, dataset=text_dataset(24), max_steps=6)
    per_round = trainer._schedule.prompts_per_round
    waves = logged(trainer, "fastrl/prompts/waves")
    assert max(waves) > 1.0, "no batch was short of signal: the test shows nothing"
    for groups, selections in trainer.rounds:
        ids = trained_groups(groups, selections)
        assert len(ids) == per_round
        assert len({group.prompt_id for group in groups}) == len(groups), (
            "a prompt was sampled twice in a step"
        )
        assert all(group.rewards_G.std() > 0 for group in groups if group.prompt_id in ids)
    assert len(gradients) == 6, "the schedule is the engine's, however much is sampled"
    assert total(trainer, "fastrl/rollouts") == 4 * total(trainer, "fastrl/prompts/sampled")


def test_dynamic_sampling_of_a_round_is_stock_trl_on_the_prompts_that_are_left(tmp_path):
    # One group per round: what is trained on is one whole group, so its gradient is that of stock TRL on it alone.
    trainer, (found,) = run(
        Watched,
        tmp_path / "fast",
        DYNAMIC,
        dataset=text_dataset(12),
        max_steps=1,
        per_device_train_batch_size=4,
    )
    ((groups, selections),) = trainer.rounds
    (prompt_id,) = trained_groups(groups, selections)
    only = text_dataset(12).select([int(prompt_id)])
    _, (expected,) = run(
        ScriptedStock, tmp_path / "stock", dataset=only, max_steps=1, per_device_train_batch_size=4
    )
    assert expected.norm() > 1e-4
    assert relative_error(found, expected) < 1e-5


def test_the_number_of_times_a_step_samples_again_is_bounded(tmp_path):
    hopeless = text_dataset(16).select([0, 4, 8, 12])
    config = replace(DYNAMIC, max_refills=2)
    trainer, gradients = run(
        Watched,
        tmp_path,
        config,
        dataset=hopeless,
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
    )
    assert max(logged(trainer, "fastrl/prompts/waves")) == 3.0
    assert all(torch.isfinite(g).all() for g in gradients)


def test_cppo_fills_the_batch_with_the_survivors_of_more_prompts(tmp_path):
    config = FastRLConfig(pruner="top_advantage", keep_share=0.5, refill="kept", budget="fixed")
    trainer, _ = run(Watched, tmp_path, config, dataset=text_dataset(24), max_steps=3)
    assert logged(trainer, "fastrl/prompts/sampled") == [4.0] * 3, "twice the engine's two prompts"
    assert logged(trainer, "fastrl/trained/rows") == [8.0] * 3, "the engine's own batch"
    for groups, selections in trainer.rounds:
        kept = np.concatenate([s.keep_G for s in selections])
        size = np.abs(np.concatenate([g.advantages_G for g in groups]))
        assert size[kept].min() >= size[~kept].max() - 1e-12


def test_pods_trains_with_its_own_advantages(tmp_path):
    config = FastRLConfig(pruner="max_variance", keep_share=0.5, budget="fixed", zero_variance="drop")
    seen = []

    class Inputs(Watched):
        def _compute_loss(self, model, inputs):
            seen.append(inputs["advantages"].clone())
            return super()._compute_loss(model, inputs)

    trainer, _ = run(Inputs, tmp_path, config, dataset=text_dataset(8), max_steps=1)
    ((_groups, selections),) = trainer.rounds
    expected = [s.advantages_G[s.keep_G] for s in selections if s.keep_G.any()]
    assert expected
    assert all(np.isclose(values.sum(), 0, atol=1e-9) for values in expected), "normalised over the kept ones"
    found = torch.cat(seen).double().numpy()
    assert np.sort(found) == pytest.approx(np.sort(np.concatenate(expected)), abs=1e-6)


class Skipping(Watched):
    """A budget that skips prompts by name."""

    skipped = ("1", "2", "3")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        plan = self.fastrl.budget.plan

        def skipping(prompt_ids, step):
            counts = plan(prompt_ids, step)
            skip = np.isin(prompt_ids, self.skipped)
            return np.where(skip & ~skip.all(), 0, counts)

        self.fastrl.budget.plan = skipping


@pytest.mark.parametrize("refill", ["none", "skipped"])
def test_skipped_prompts_are_left_out_or_replaced(tmp_path, refill):
    config = FastRLConfig(
        pruner="none", budget="fixed", refill=refill, zero_variance="drop", denominator="live"
    )
    trainer, gradients = run(
        Skipping, tmp_path, config, dataset=text_dataset(8), max_steps=3, per_device_train_batch_size=16
    )
    assert total(trainer, "fastrl/prompts/skipped") > 0
    for groups, _ in trainer.rounds:
        ids = [group.prompt_id for group in groups]
        assert not set(ids) & set(Skipping.skipped) or len(ids) == 1
        assert len(ids) == 4 if refill == "skipped" else len(ids) <= 4
    assert all(torch.isfinite(g).all() for g in gradients)


def test_images_follow_their_rows_through_waves(tmp_path):
    from fastrl import testbed

    _model, processor = testbed.load()
    trainer, gradients = run(
        Watched, tmp_path, DYNAMIC, model=lambda _: testbed.load()[0], processing_class=processor,
        dataset=vision_dataset(12, image_counts=(1, 2, 1)), max_steps=2,
    )  # fmt: skip
    assert max(logged(trainer, "fastrl/prompts/waves")) > 1.0
    assert all(float(g.norm()) > 0 for g in gradients)


def test_a_resume_draws_the_same_further_prompts(tmp_path):
    settings = {"dataset": text_dataset(24), "save_strategy": "steps", "save_steps": 2}
    whole, expected = run(Watched, tmp_path / "whole", DYNAMIC, max_steps=5, **settings)
    run(Watched, tmp_path / "part", DYNAMIC, max_steps=5, **settings)
    resumed, found = run(
        Watched,
        tmp_path / "part",
        DYNAMIC,
        max_steps=5,
        resume=str(tmp_path / "part" / "checkpoint-2"),
        **settings,
    )
    ids = [[group.prompt_id for group in groups] for groups, _ in whole.rounds]
    assert [[group.prompt_id for group in groups] for groups, _ in resumed.rounds] == ids[2:]
    for a, b in zip(found, expected[2:], strict=True):
        assert relative_error(a, b) < 1e-6


def test_the_reserve_is_a_function_of_its_seed_and_how_much_was_drawn():
    one, two = Reserve(10, seed=3), Reserve(10, seed=3)
    drawn = [one.draw(3, without={0, 1}) for _ in range(6)]
    two.num_drawn = 0
    assert [two.draw(3, without={0, 1}) for _ in range(3)] == drawn[:3]
    state = two.num_drawn
    three = Reserve(10, seed=3)
    three.num_drawn = state
    assert [three.draw(3, without={0, 1}) for _ in range(3)] == drawn[3:]
    assert not {0, 1} & {row for rows in drawn for row in rows}
    assert Reserve(10, seed=4).draw(8, without=set()) != Reserve(10, seed=3).draw(8, without=set())


def test_a_reserve_that_is_used_up_gives_what_it_has():
    assert sorted(Reserve(4, seed=0).draw(9, without={2})) == [0, 1, 3]


@pytest.mark.parametrize(
    ("similarity", "remedy"), [("surprisal", "use_vllm"), ("gradient", "similarity: centred")]
)
def test_a_similarity_that_trl_cannot_feed_is_refused_at_construction(tmp_path, similarity, remedy):
    with pytest.raises(ConfigError, match=remedy):
        run(ScriptedFast, tmp_path, FastRLConfig(similarity=similarity))
