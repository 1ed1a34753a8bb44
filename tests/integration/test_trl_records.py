"""What a run leaves behind and says: its folder, TRL's table of completions, the model card, the line of a resume."""

import json

import pandas
import pytest
import torch
from trl_support import ScriptedFast, parity_reward, text_dataset, text_model, train, vision_dataset

from fastrl.config import FastRLConfig
from fastrl.integrations.trl import STATE_FILE, FastGRPOTrainer
from fastrl.trace import read_rollouts
from fastrl.types import FastRLError, NonFiniteError, NoSignalError, StateError

CONFIG = FastRLConfig(budget="fixed", tau=0.9)
SAVING = {"save_strategy": "steps", "save_steps": 1}


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# The run folder


def test_run_folder_holds_settings_versions_and_metrics(tmp_path):
    train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG}, max_steps=3)
    run = json.loads((tmp_path / "fastrl" / "run.json").read_text(encoding="utf-8"))
    assert FastRLConfig.from_dict(run["fastrl"]) == CONFIG
    assert run["trainer"]["loss_type"] == "dapo"
    assert run["num_processes"] == 1
    assert {"python", "trl", "torch", "fastrl-grpo"} <= set(run["versions"])
    metrics = rows_of(tmp_path / "fastrl" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["fastrl/time/update_s"] > 0 for row in metrics)
    assert sorted(path.name for path in (tmp_path / "fastrl").iterdir()) == ["metrics.jsonl", "run.json"]


def test_evaluations_have_a_file_of_their_own(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "max_steps": 4}
    train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG, "eval_dataset": text_dataset(4)}, **settings
    )
    assert [row["step"] for row in rows_of(tmp_path / "fastrl" / "evaluations.jsonl")] == [2, 4]
    assert [row["step"] for row in rows_of(tmp_path / "fastrl" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_resume_goes_on_with_the_metrics_and_says_where_it_stands(tmp_path, capsys):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 6, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)
    before = rows_of(tmp_path / "fastrl" / "metrics.jsonl")
    train(ScriptedFast, tmp_path, resume=str(tmp_path / "checkpoint-4"), **kwargs)
    assert "FastRL: resumed at step 4 (epoch 1.00): G_t = 4, 8 prompts consumed.\n" in capsys.readouterr().out
    after = rows_of(tmp_path / "fastrl" / "metrics.jsonl")
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    assert after[:4] == before[:4], "what was logged before the checkpoint is kept as it was"
    assert [row["grad_norm"] for row in after] == [row["grad_norm"] for row in before]


def test_resume_true_takes_the_last_whole_checkpoint(tmp_path, capsys):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 4, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()  # as a run leaves it that is killed while saving
    train(ScriptedFast, tmp_path, resume=True, **kwargs)
    assert "resumed at step 3" in capsys.readouterr().out
    (tmp_path / "checkpoint-3" / STATE_FILE).unlink()
    with pytest.raises(StateError, match=r"Resume from .*checkpoint-4"):
        train(ScriptedFast, tmp_path, resume=str(tmp_path / "checkpoint-3"), **kwargs)


def test_resume_without_any_whole_checkpoint_is_an_error(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(StateError, match="It holds checkpoint-2; a whole one has"):
        train(ScriptedFast, tmp_path, resume=True)


def test_older_checkpoints_are_deleted_once_the_new_one_is_whole(tmp_path, monkeypatch):
    seen = []

    def spy(folder, state):
        seen.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        write_state(folder, state)

    from fastrl.integrations import _trl_checkpoint

    write_state = _trl_checkpoint.write_state
    monkeypatch.setattr(_trl_checkpoint, "write_state", spy)
    train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG}, max_steps=3, save_total_limit=1, **SAVING
    )
    assert seen[-1] == ["checkpoint-2", "checkpoint-3"], "the one before is there until the new one is whole"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_checkpoint_that_is_saved_again_is_not_whole_meanwhile(tmp_path, monkeypatch):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 4, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)

    def killed(self, output_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(ScriptedFast, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        train(ScriptedFast, tmp_path, resume=str(tmp_path / "checkpoint-2"), **kwargs)
    assert not (tmp_path / "checkpoint-3" / STATE_FILE).exists()


def test_another_data_set_is_refused(tmp_path):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 4, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)
    changed = text_dataset().map(lambda row: {"prompt": row["prompt"] + " w5"})
    with pytest.raises(StateError, match="train_dataset differs"):
        train(ScriptedFast, tmp_path, resume=True, dataset=changed, **kwargs)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 8}, r"seed \(saved 7, now 8\)"),
        ({"per_device_train_batch_size": 16}, r"prompts_per_round \(saved 2, now 4\)"),
        ({"num_iterations": 2}, r"updates_per_round \(saved 1.0, now 2.0\)"),
    ],
)
def test_another_order_of_prompts_is_refused_by_name(tmp_path, changed, named):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 4, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)
    with pytest.raises(StateError, match=named):
        train(ScriptedFast, tmp_path, resume=True, **{**kwargs, **changed})


def test_the_same_batch_may_be_accumulated_otherwise_after_a_resume(tmp_path):
    kwargs = {"trainer_kwargs": {"fastrl": CONFIG}, "max_steps": 4, **SAVING}
    train(ScriptedFast, tmp_path, **kwargs)
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()
    (tmp_path / "checkpoint-3" / STATE_FILE).unlink()
    changed = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer, _ = train(ScriptedFast, tmp_path, resume=True, **{**kwargs, **changed})
    assert trainer.state.global_step == trainer.fastrl.step == 4


# TRL's table of completions


def test_completions_show_what_became_of_them(tmp_path):
    trainer, _ = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG}, max_steps=1, log_completions=True,
        num_completions_to_print=1,
    )  # fmt: skip
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 8
    kept = [column for column in table.columns if column.startswith("fastrl/")]
    assert kept == ["fastrl/kept", "fastrl/weight", "fastrl/cluster", "fastrl/group"]
    assert table["fastrl/kept"].sum() == trainer.state.log_history[0]["fastrl/trained/rows"]
    assert set(table["fastrl/group"]) == set(trainer._round_prompt_ids)
    assert (table["fastrl/weight"] > 0).tolist() == table["fastrl/kept"].tolist()
    for _, group in table.groupby("prompt"):
        assert group["fastrl/group"].nunique() == 1


def test_a_column_of_ours_cannot_be_overwritten(tmp_path):
    def reward(completions, log_extra, **_):
        log_extra("fastrl/kept", [0] * len(completions))
        return [float(i % 2) for i in range(len(completions))]

    with pytest.raises(FastRLError, match="a reward function logs fastrl/kept"):
        train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG}, reward_funcs=[reward])


def test_model_card_names_method_settings_and_paper(tmp_path):
    trainer, _ = train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": CONFIG}, max_steps=1)
    trainer.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "## FastRL" in card
    assert "tau: 0.9" in card
    assert "arXiv:2609.36932" in card
    assert "- fastrl" in card, "the tag by which it is found"


# Runs that must stop


class Explodes(ScriptedFast):
    """Its loss is NaN in one micro-batch of the second step, which is not the last of its window."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, *rest = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if logps is not None and torch.is_grad_enabled() and self._step == 2:
            logps = logps * torch.nan
        return logps, *rest


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_step(tmp_path):
    config = {"fastrl": FastRLConfig(pruner="none", budget="fixed")}
    settings = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    model, whole = text_model(), text_model()
    train(ScriptedFast, tmp_path, model=whole, trainer_kwargs=config, max_steps=1, **settings)
    with pytest.raises(NonFiniteError, match="optimizer step 2 is not finite in 1 micro-batches"):
        train(Explodes, tmp_path, model=model, trainer_kwargs=config, max_steps=3, **settings)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), "the weights are those of the last good step"


def test_a_run_without_signal_is_saved_before_it_stops(tmp_path):
    config = FastRLConfig(budget="fixed", max_empty_steps=3, trace=True)

    def constant(completions, **_):
        return [0.0] * len(completions)

    settings = {"per_device_train_batch_size": 64, "dataset": text_dataset(32), "max_steps": 20}
    with pytest.raises(NoSignalError, match="64 all at 0"):
        train(ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, reward_funcs=[constant], **settings)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert (checkpoint / STATE_FILE).is_file()
    assert len(read_rollouts(tmp_path / "fastrl")) == 64, "four steps of sixteen prompts"
    trainer, _ = train(
        ScriptedFast, tmp_path, trainer_kwargs={"fastrl": config}, reward_funcs=[parity_reward], resume=True,
        **{**settings, "max_steps": 6},
    )  # fmt: skip
    assert trainer.state.global_step == 6


def test_a_rollout_with_an_image_token_is_dropped_and_counted(tmp_path):
    """Its token stands for image features that do not exist: the forward pass would raise."""
    from fastrl import testbed

    model, processor = testbed.load()
    image_token = model.config.image_token_id

    class Emits(ScriptedFast):
        def _generate_single_turn(self, *args, **kwargs):
            completions, logps = super()._generate_single_turn(*args, **kwargs)
            completions[3] = [image_token, *completions[3]]
            return completions, logps

    for config in (FastRLConfig(pruner="none", budget="fixed"), CONFIG):
        trainer, _ = train(
            Emits, tmp_path, model=model, processing_class=processor, dataset=vision_dataset(),
            trainer_kwargs={"fastrl": config}, learning_rate=1e-4, max_steps=1,
        )  # fmt: skip
        assert trainer.state.log_history[0]["fastrl/frac_image_token"] == 1 / 8
        ids = torch.cat([m["completion_ids"].flatten() for m in trainer._micro_batches if m is not None])
        assert image_token not in ids


def test_a_trainer_without_fastrl_settings_uses_the_published_ones(tmp_path):
    trainer, _ = train(FastGRPOTrainer, tmp_path, max_steps=1, trainer_kwargs={"fastrl": None})
    assert trainer.fastrl.config == FastRLConfig()
