"""The stage model against the published tables, and against runs whose costs are known."""

import math

import pytest

from fastrl.bench.stage_model import (
    PUBLISHED,
    PUBLISHED_HOURS,
    StageTimes,
    from_run,
    implied_kept_share,
    predict,
    speedup,
    with_generation_share,
)
from fastrl.types import ConfigError

every_data_set = pytest.mark.parametrize(
    ("data", "kept", "rollouts"), [("Geo3K", 0.379, 0.914), ("GeoQA", 0.418, 0.763)]
)


def test_the_stages_add_up_to_the_printed_totals():
    totals = {name: stages.total for name, stages in PUBLISHED.items()}
    assert totals == {
        ("Geo3K", "GRPO"): pytest.approx(534.96),
        ("Geo3K", "FastRL"): pytest.approx(249.66),
        ("GeoQA", "GRPO"): pytest.approx(423.10),
        ("GeoQA", "FastRL"): pytest.approx(198.58),
    }


@every_data_set
def test_old_reference_and_update_shrink_to_one_share_and_generation_to_another(data, kept, rollouts):
    base, fast = PUBLISHED[data, "GRPO"], PUBLISHED[data, "FastRL"]
    for stage in ("old", "reference", "update"):
        assert getattr(fast, stage) == pytest.approx(kept * getattr(base, stage), rel=0.002)
    assert fast.generation == pytest.approx(rollouts * base.generation, rel=0.002)


@every_data_set
def test_the_shares_predict_the_published_step_of_fastrl_within_one_percent(data, kept, rollouts):
    seconds = predict(PUBLISHED[data, "GRPO"], kept_share=kept, rollout_share=rollouts)
    assert seconds == pytest.approx(PUBLISHED[data, "FastRL"].total, rel=0.01)


def test_the_base_step_predicts_itself():
    for stages in PUBLISHED.values():
        assert predict(stages, kept_share=1.0) == pytest.approx(stages.total)
        assert speedup(stages, kept_share=1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.163, 2.15), (0.3, 1.85), (0.5, 1.55), (0.6, 1.43), (0.8, 1.24)]
)
def test_the_speed_up_by_the_share_of_generation(share, expected):
    ratio = speedup(with_generation_share(share), kept_share=0.379, rollout_share=0.914)
    assert ratio == pytest.approx(expected, abs=0.0051)
    assert ratio == pytest.approx(1 / (share * 0.914 + (1 - share) * 0.379))


def test_no_pruning_speeds_up_generation_or_the_rest():
    stages = StageTimes(generation=3.0, old=1.0, reference=1.0, update=4.0, rest=1.0)
    assert speedup(stages, kept_share=0.0) == pytest.approx(10 / 4)
    assert speedup(stages, kept_share=0.0, rollout_share=0.0) == pytest.approx(10 / 1)
    assert speedup(with_generation_share(0.5), kept_share=0.0, rollout_share=0.0) == math.inf


@every_data_set
@pytest.mark.parametrize("has_ars", [False, True], ids=["G at G_1", "G as at tau 0.8"])
def test_the_sweep_of_tau_implies_shares_that_fall_from_all_to_one_per_class(data, kept, rollouts, has_ars):
    hours = PUBLISHED_HOURS[data]
    rollout_share = rollouts if has_ars else 1.0
    shares = [
        implied_kept_share(PUBLISHED[data, "GRPO"], ratio=hours[0.0] / h, rollout_share=rollout_share)
        for h in hours.values()
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(1.0, abs=0.05)  # a smaller G that nobody had at tau = 0 makes it 1.04
    assert shares[-1] > 2 / 8  # two classes: right and wrong answers, 8 rollouts
    if has_ars:
        assert shares[-2] == pytest.approx(kept, abs=0.005), "hours at tau 0.8 and seconds per step agree"


def test_random_pruning_gains_less_than_the_model_promises_as_its_docstring_admits():
    measured = {0.75: 1.27, 0.5: 1.60, 0.25: 2.10}  # kept share -> speed (Table 5)
    model = {kept: speedup(PUBLISHED["Geo3K", "GRPO"], kept_share=kept) for kept in measured}
    assert model[0.75] == pytest.approx(measured[0.75], rel=0.01)
    assert [round(model[kept], 2) for kept in (0.5, 0.25)] == [1.71, 2.66]


def test_the_inverse_undoes_the_speed_up():
    stages = StageTimes(generation=3.0, old=1.0, reference=0.5, update=4.0, rest=0.7)
    for kept, rollouts in ((1.0, 1.0), (0.3, 0.8), (0.05, 1.5)):
        ratio = speedup(stages, kept_share=kept, rollout_share=rollouts)
        assert implied_kept_share(stages, ratio=ratio, rollout_share=rollouts) == pytest.approx(kept)
    assert implied_kept_share(stages, ratio=100.0) < 0, "no pruning explains it"


def run(**changes):
    """A run of 10 steps: 0.1 s per sampled rollout, 0.5 s old and 2 s update per trained one, 1 s fixed."""
    method = {
        "key": "grpo",
        "num_steps": 10,
        "rollouts": {"generated": 80.0, "trained": 80.0},
        "stage_s": {
            "generation": 6.0, "rewards": 2.0, "old_ref": 40.0, "select": 1.0, "update": 160.0, "rest": 9.0
        },
    }  # fmt: skip
    return {**method, **changes}


FASTRL = run(
    key="fastrl",
    rollouts={"generated": 40.0, "trained": 16.0},
    stage_s={"generation": 3.0, "rewards": 1.0, "old_ref": 8.0, "select": 1.0, "update": 32.0, "rest": 9.0},
)


def test_the_stages_of_a_run_are_per_step():
    stages = from_run({"methods": [run(), FASTRL]})
    assert stages == StageTimes(generation=0.8, old=4.0, reference=0.0, update=16.0, rest=1.0)


def test_a_base_run_predicts_the_run_that_pruned_it():
    summary = {"methods": [run(), FASTRL]}
    seconds = predict(from_run(summary), kept_share=16 / 80, rollout_share=40 / 80)
    assert seconds == pytest.approx(sum(FASTRL["stage_s"].values()) / 10)


def test_a_run_of_fastrl_alone_knows_what_its_unpruned_step_would_cost():
    stages = from_run({"methods": [FASTRL]}, "fastrl")
    assert stages == StageTimes(generation=0.4, old=2.0, reference=0.0, update=8.0, rest=1.0)
    assert predict(stages, kept_share=16 / 40) == pytest.approx(5.4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StageTimes(generation=-1.0, old=0.0, reference=0.0, update=2.0), "none is negative"),
        (lambda: StageTimes(generation=0.0, old=0.0, reference=0.0, update=0.0), "takes some"),
        (lambda: StageTimes(generation=math.nan, old=0.0, reference=0.0, update=1.0), "finite"),
        (lambda: StageTimes(generation=math.inf, old=0.0, reference=0.0, update=1.0), "finite"),
        (lambda: with_generation_share(1.5), "none is negative"),
        (lambda: predict(with_generation_share(0.2), kept_share=-0.1), "kept_share: -0.1"),
        (lambda: predict(with_generation_share(0.2), kept_share=0.1, rollout_share=math.nan), "rollout_share: nan"),
        (lambda: implied_kept_share(with_generation_share(0.2), ratio=0.0), "speed-up 0.0"),
        (lambda: implied_kept_share(with_generation_share(1.0), ratio=2.0), "0.0 s of old"),
        (lambda: from_run({"methods": [run(), FASTRL]}, "fastlr"), "Did you mean 'fastrl'"),
        (lambda: from_run({"methods": [run(stage_s={**run()["stage_s"], "update": 0.0})]}), "0.0 s of update"),
        (lambda: from_run({"methods": [run(rollouts={"generated": 80.0, "trained": 0.0})]}), "for 0 trained"),
    ],
)  # fmt: skip
def test_what_has_no_answer_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
