"""One update of real verl from fixed rollouts: what it trains on, divides by, and leaves in the weights.

The truth is plain torch: the gradient of the policy loss at the sampling weights, over rows and denominators counted
here. Plain SGD with a learning rate of 1 makes the change of the weights that gradient.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

import fixed_rollouts
import tiny_task
import torch
import transformers
import verl_runs
from safetensors.torch import load_file

from fastrl.advantages import group_advantages

SGD = """
actor_rollout_ref.actor.optim.optimizer=SGD actor_rollout_ref.actor.optim.lr=1.0
actor_rollout_ref.actor.optim.weight_decay=0 actor_rollout_ref.actor.optim.clip_grad=1e9
actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]
""".split()


class Updates:
    """The results of all cases on a number of ranks."""

    def __init__(self, task: Path, out: Path, num_ranks: int) -> None:
        ranks = verl_runs.TWO_RANKS if num_ranks == 2 else []
        overrides = [*verl_runs.REFERENCE, *SGD, *ranks, f"trainer.default_local_dir={out}"]
        line = verl_runs.command(task, *overrides, module="", rollout="hf")
        line = [sys.executable, str(verl_runs.HERE / "fixed_rollouts.py"), str(out), *line[3:]]
        with (out / "output.txt").open("w") as log:
            process = subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, env=verl_runs.environment(out), cwd=out
            )
        finished = verl_runs.finish(process, out)
        assert finished.returncode == 0, finished.output[-6000:]
        self.task, self.out, self.num_ranks = task, out, num_ranks
        self.cases = json.loads((out / "results.json").read_text())
        self.initial = load_file(task / "model" / "model.safetensors")

    def __getitem__(self, case: str) -> dict:
        return self.cases[case]

    def change(self, case: str) -> torch.Tensor:
        """How the weights moved, as one vector."""
        final = load_file(self.out / case.replace(" ", "_") / "huggingface" / "model.safetensors")
        return torch.cat(
            [(final[name].double() - self.initial[name].double()).flatten() for name in sorted(self.initial)]
        )

    def gradient(self, rows: list[dict], denominator: float, mode: str) -> torch.Tensor:
        """The policy loss's gradient at the sampling weights, times -1: what plain SGD adds to them."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.task / "model", dtype=torch.float32)
        objective = torch.zeros(())
        for row in rows:
            ids, num = torch.tensor([row["input_ids"]]), len(row["responses"])
            logits = model(input_ids=ids).logits[0, -num - 1 : -1]
            logp = torch.log_softmax(logits, -1).gather(1, ids[0, -num:, None])[:, 0]
            mask = torch.tensor(row["response_mask"], dtype=torch.float32)
            of_row = (torch.tensor(row["advantages"]) * logp * mask).sum()
            objective = objective + (of_row / mask.sum() if mode == "seq-mean" else of_row)
        (objective / denominator).backward()
        named = dict(model.named_parameters())
        return torch.cat([named[name].grad.double().flatten() for name in sorted(self.initial)])


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def updates(request, tmp_path_factory) -> Updates:
    task = tiny_task.make(tmp_path_factory.mktemp("task"))
    return Updates(task, tmp_path_factory.mktemp("updates"), request.param)


pytestmark = pytest.mark.timeout(verl_runs.LIMIT_S + 60)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 1e-4, "nothing moved: this comparison would say nothing"
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def num_tokens(rows: list[dict]) -> int:
    return sum(sum(row["response_mask"]) for row in rows)


def advantage_of(row: dict) -> float:
    return row["advantages"][row["response_mask"].index(1)]


def test_the_reference_is_verls_own_loss(updates):
    rows = updates["stock"]["trained"]
    assert_same(updates.change("stock"), updates.gradient(rows, num_tokens(rows), "token-mean"))
    assert_same(updates.change("stock seq-mean"), updates.gradient(rows, 16, "seq-mean"))
    assert_same(updates.change("stock seq-sum"), updates.gradient(rows, 16, "seq-sum"))
    assert_same(updates.change("stock gspo"), updates.gradient(rows, 16, "seq-mean"))


@pytest.mark.parametrize("name", ["", " gspo", " two updates", " reinforce"])
def test_without_pruning_it_is_stock_verl(updates, name):
    assert_same(updates.change(f"identity{name}"), updates.change(f"stock{name}"))
    assert updates[f"identity{name}"]["updates"] == updates[f"stock{name}"]["updates"]


@pytest.mark.parametrize("name", ["", " seq-mean", " seq-sum", " gspo"])
def test_dropping_groups_without_signal_changes_nothing(updates, name):
    assert updates[f"drop{name}"]["rows"] == 8
    assert_same(updates.change(f"drop{name}"), updates.change(f"stock{name}"))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean"])
@pytest.mark.parametrize("kind", ["kept", "live"])
def test_denominators(updates, kind, mode):
    case = kind if mode == "token-mean" else f"{kind} {mode}"
    rows = updates[case]["trained"]
    assert 2 <= len(rows) < 8
    counted = rows
    if kind == "live":  # the eight rows of the two groups with signal
        counted = [row for row in updates["stock"]["trained"] if advantage_of(row) != 0]
        assert len(counted) == 8
    denominator = num_tokens(counted) if mode == "token-mean" else len(counted)
    assert_same(updates.change(case), updates.gradient(rows, denominator, mode))


@pytest.mark.parametrize(("case", "mode"), [("unbiased", "token-mean"), ("unbiased gspo", "seq-mean")])
def test_unbiased_pruning_divides_by_all_rollouts_and_weighs_survivors(updates, case, mode):
    rows, everything = updates[case]["trained"], updates["stock"]["trained"]
    denominator = num_tokens(everything) if mode == "token-mean" else len(everything)
    assert_same(updates.change(case), updates.gradient(rows, denominator, mode))
    full = {tuple(row["place"]): advantage_of(row) for row in everything}
    for group in (0, 3):  # those with signal: the weights of survivors stand for all four rollouts
        weights = [advantage_of(row) / full[tuple(row["place"])] for row in rows if row["place"][0] == group]
        assert sum(weights) == pytest.approx(4, rel=1e-4)


def test_advantages_are_those_of_full_groups(updates):
    expected = {
        round(float(a), 3) for place in fixed_rollouts.REWARDS for a in group_advantages(np.array(place))
    }
    for case in ("kept", "live", "two updates", "grpo_vectorized"):
        assert {round(advantage_of(row), 3) for row in updates[case]["trained"]} <= expected - {0.0}


@pytest.mark.parametrize("case", ["rloo", "rloo_vectorized"])
def test_other_estimators_are_verls_too(updates, case):
    expected = {
        round((reward - sum(place) / 4) * 4 / 3, 3) for place in fixed_rollouts.REWARDS for reward in place
    }
    found = {round(advantage_of(row), 3) for row in updates[case]["trained"]}
    assert found <= expected
    assert found


def test_the_kl_term_of_kept_rows_is_verls(updates):
    assert updates["keep all kl"]["rows"] == 16
    assert_same(updates.change("keep all kl"), updates.change("stock kl"))


def test_nothing_kept_changes_no_weight(updates):
    case = updates["nothing"]
    assert (case["rows"], case["filling"] % updates.num_ranks) == (0, 0)
    assert case["filling"] >= updates.num_ranks
    assert updates.change("nothing").abs().max() == 0


def test_one_row_kept_on_any_number_of_ranks(updates):
    case = updates["one row"]
    assert case["rows"] == 1
    assert case["rows"] + case["filling"] == updates.num_ranks
    rows = case["trained"]
    assert_same(updates.change("one row"), updates.gradient(rows, num_tokens(rows), "token-mean"))


def test_updates_follow_the_kept_count_or_do_not(updates):
    kept = updates["two updates"]["rows"]
    assert updates["two updates"]["updates"] == 2
    assert updates["two updates"]["filling"] < 2 * updates.num_ranks
    assert updates["rows"]["updates"] == math.ceil(kept / 8)
    assert updates["rows"]["rows"] + updates["rows"]["filling"] == 8 * updates["rows"]["updates"]


def test_top_up_fills_with_pruned_rollouts_of_highest_advantage(updates):
    case = updates["top up"]
    assert case["rows"] % updates.num_ranks == 0
    assert case["filling"] == 0


def test_outcomes_decide_zero_variance(updates):
    assert updates["outcomes"]["rows"] == 0


def test_logged_rewards_are_those_of_all_rollouts(updates):
    for name, case in updates.cases.items():
        assert case["metrics"]["critic/score/mean"] == pytest.approx(np.mean(case["rewards"]), abs=1e-6), name
    trained = updates["kept"]["metrics"]["fastrl/trained/critic/score/mean"]
    assert trained != pytest.approx(updates["kept"]["metrics"]["critic/score/mean"])


def test_nothing_stays_in_the_queue_and_nothing_is_nan(updates):
    for name, case in updates.cases.items():
        assert case["left_in_queue"] == 0, name
        losses = {key: value for key, value in case["metrics"].items() if key.startswith("actor/")}
        assert all(math.isfinite(value) for value in losses.values()), (name, losses)
