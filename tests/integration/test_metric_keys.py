"""The table of metrics is what is logged: by TRL in real runs, by verl and EasyR1 as their adapters are written."""

import re
from pathlib import Path

import pytest
from trl_support import ScriptedFast, text_dataset, train

from fastrl import FastRL, FastRLConfig
from fastrl.budgets import BUDGETS
from fastrl.metric_keys import ENGINES, METRICS, PREFIX, Metric, find_metric

ALL = [metric for metrics in METRICS.values() for metric in metrics]
SOURCE = Path(__file__).parents[2] / "src" / "fastrl"


def test_trl_logs_exactly_the_metrics_of_the_table(tmp_path):
    logged = set()
    for budget in BUDGETS:
        trainer, _ = train(
            ScriptedFast,
            tmp_path / budget,
            dataset=text_dataset(4),
            trainer_kwargs={"fastrl": FastRLConfig(budget=budget)},
            max_steps=-1,
            num_train_epochs=2,
        )
        keys = {key for row in trainer.state.log_history for key in row if key.startswith(PREFIX)}
        for key in keys:
            metric = find_metric(key)
            assert metric is not None, f"{key} is not in fastrl.metric_keys"
            assert "TRL" in metric.engines, key
            assert metric.when in ("", f"budget: {budget}"), key
        logged |= {find_metric(key) for key in keys}
    assert logged == {metric for metric in ALL if "TRL" in metric.engines}


@pytest.mark.parametrize(("engine", "module"), [("verl", "verl"), ("EasyR1", "easyr1")])
def test_what_the_adapters_of_ray_engines_log_is_in_the_table(engine, module):
    """These engines are not here: what their adapters write, and what every run's own metrics hold."""
    adapter = [SOURCE / "integrations" / f"{module}.py", *SOURCE.glob(f"integrations/_{module}_*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in adapter)
    assert 'f"fastrl/{name}": value for name, value in self.fastrl.metrics().items()' in source
    assert "all_and_trained(" in source
    written = set(re.findall(r'metrics\["fastrl/([^"]+)"\]', source)) | {"trained/critic/score/mean"}
    for budget in BUDGETS:
        run = FastRL(FastRLConfig(budget=budget), num_rollouts=8, total_steps=8, steps_per_epoch=2)
        run.observe(*one_group(run))
        written |= set(run.metrics())
    found = {find_metric(key) for key in written}
    assert None not in found
    assert found == {metric for metric in ALL if engine in metric.engines}


def one_group(run):
    from fastrl import Group

    groups = [Group(prompt_id="q", tokens_G=[[1], [2]], rewards_G=[1.0, 0.0])]
    return groups, run.select(groups)


def test_the_table_is_in_order():
    assert len({metric.key for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.meaning, metric.key
        assert metric.unit, metric.key
        assert set(metric.engines) <= set(ENGINES), metric.key
        assert not metric.when or FastRLConfig.from_dict(dict([metric.when.split(": ")])), metric.key


def test_families_of_keys():
    family = Metric("trained/<name>", "rows of the engine's own", "rows")
    assert family.matches("trained/critic/score/mean")
    assert not family.matches("trained/")
    assert not family.matches("kept/trained/rows")
    assert find_metric("fastrl/trained/rows").unit == "rows", "a name of its own goes before a family"
    assert find_metric("fastrl/nothing/of/ours") is None
