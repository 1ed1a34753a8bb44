"""State that was saved and never restored, or rebuilt from scratch on load: files looked right, decisions were not.
So what is compared here is what the run decides next, in another process, not what its dictionary says.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl import FastRL, FastRLConfig, Group, NoSignalError
from fastrl.budgets import BUDGETS

RUN = {"num_rollouts": 8, "total_steps": 24, "steps_per_epoch": 3}
CONFIGS = {
    "published": {},
    "random": {"pruner": "random", "keep_share": 0.5},
    "unbiased": {"representative": "random", "weighting": 1.0, "align": "dummy", "denominator": "full"},
    **{f"budget_{name}": {"budget": name, "seed": 3} for name in BUDGETS},
}


def groups_of(step, counts):
    """Rollouts as a function of the step: late steps vary less, so that an adaptive budget has to react."""
    rng = np.random.default_rng([11, step])
    words = max(2, 12 - step)
    return [
        Group(
            prompt_id=f"q{p}",
            tokens_G=[rng.integers(0, words, 6).tolist() for _ in range(count)],
            rewards_G=rng.integers(0, 2, count).astype(float),
        )
        for p, count in enumerate(counts)
    ]


def decide(run, num_steps):
    """Go on for some steps and return every decision as plain values."""
    decisions = []
    for _ in range(num_steps):
        counts = run.plan([f"q{p}" for p in range(4)])
        groups = groups_of(run.step, counts)
        selections = run.select(groups)
        chance = run.rng(purpose=1).integers(2**31)
        run.observe(groups, selections)
        kept = [[s.keep_G.tolist(), s.weight_G.tolist(), s.cluster_G.tolist()] for s in selections]
        decisions.append([run.step, counts.tolist(), kept, int(chance)])
    return json.loads(json.dumps(decisions))


def new_run(name):
    return FastRL(FastRLConfig(**CONFIGS[name]), **RUN)


def in_a_fresh_process(name, state_file, num_steps):
    """Another interpreter that knows the settings and the file, and nothing else."""
    code = (
        "import json, sys, test_state as t\n"
        f"run = t.new_run({name!r})\n"
        f"run.load_state_dict(json.load(open({str(state_file)!r})))\n"
        f"print(json.dumps(t.decide(run, {num_steps})))"
    )
    path = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["published", "random"])
def test_open_instruct_1523_a_fresh_process_decides_as_the_run_would_have(name, tmp_path):
    run = new_run(name)
    decide(run, 7)  # two epochs and a third of the next: history, current G and half-collected means
    file = tmp_path / "state.json"
    file.write_text(json.dumps(run.state_dict()), encoding="utf-8")
    assert in_a_fresh_process(name, file, 8) == decide(run, 8)


@settings(max_examples=40)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 15))
def test_prime_rl_839_next_decisions_survive_a_save_at_any_step(name, k):
    run, restored = new_run(name), new_run(name)
    decide(run, k)
    restored.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert decide(restored, 8) == decide(run, 8)
    assert restored.metrics() == pytest.approx(run.metrics(), nan_ok=True)


def test_prime_rl_839_forgetting_the_state_would_show():
    """The comparison can fail: a run rebuilt from its settings alone decides otherwise."""
    run, rebuilt = new_run("published"), new_run("published")
    decide(run, 7)
    rebuilt.step = run.step
    assert decide(rebuilt, 8) != decide(run, 8)


@given(st.floats(0, 8), st.floats(0, 8), st.integers(2, 8), st.lists(st.floats(0, 8), min_size=1, max_size=2))
def test_open_instruct_1523_a_mutated_budget_is_what_decides_after_loading(mean, maximum, current, collected):
    """Numbers that no fresh budget would have: they must reach the next G, not only the dictionary."""
    run = new_run("budget_ars")
    state = run.state_dict()
    state["step"] = 3 + len(collected)
    state["budget"] |= {
        "current": current,
        "reference": (mean + maximum) / 2,
        "steps_seen": 3 + len(collected),
        "epoch_means": [min(mean, maximum)] * len(collected),
        "epoch_maxima": collected,
    }
    restored = new_run("budget_ars")
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.plan(["q0", "q1"]).tolist() == [current] * 2
    rows_left = 3 - len(collected)
    decisions = decide(restored, rows_left + 1)
    means, maxima = [min(mean, maximum)] * len(collected), list(collected)
    for _, _, kept, _ in decisions[:rows_left]:
        counts = [sum(keep) for keep, _, _ in kept]
        means.append(np.mean(counts))
        maxima.append(max(counts))
    alpha = 6 / RUN["total_steps"]
    target = alpha * np.mean(means) + (1 - alpha) * np.mean(maxima)
    exact = 8 - max(0.0, (mean + maximum) / 2 - target)
    found = decisions[rows_left][1][0]
    # Half-way between two integers, the last bit of a mean decides: either neighbour will do.
    assert found in {int(np.clip(round(exact + e), 2, 8)) for e in (-1e-9, 1e-9)}


def test_prime_rl_839_a_stretch_without_signal_is_counted_on():
    """A counter that starts anew with every restart lets a dead run spin for ever."""
    config = FastRLConfig(budget="fixed", max_empty_steps=4)
    dead = [
        Group(prompt_id=f"q{p}", tokens_G=[[1], [2]], rewards_G=np.zeros(2)) for p in range(16)
    ]  # four steps of 16 are the 64 groups that count as a stretch

    def restart(state):
        run = FastRL(config, num_rollouts=2)
        run.load_state_dict(json.loads(json.dumps(state)))
        return run

    run = FastRL(config, num_rollouts=2)
    for _ in range(3):
        run.observe(dead, run.select(dead))
        run = restart(run.state_dict())
    with pytest.raises(NoSignalError, match="4 steps in a row"):
        run.observe(dead, run.select(dead))
