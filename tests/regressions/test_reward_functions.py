"""Graders that need a signal score nothing outside the main thread, and say nothing; a single value was taken for
the reward of every rollout. Both looked like a model that does not learn.
"""

import concurrent.futures
import multiprocessing
import re
import signal
import threading

import numpy as np
import pytest

from fastrl import Group, GroupError
from fastrl.rewards import accuracy_reward, format_reward, grade_answer

THINK = "<think> 1 + 1 </think>"
ANSWERS = {  # completion, gold
    "right": (rf"{THINK} \boxed{{70}}", "70"),
    "number": (rf"{THINK} \boxed{{140/2}}", "70.0"),
    "latex": (rf"{THINK} \boxed{{\frac{{1}}{{2}}}}", r"\frac{1}{2}"),
    "wrong": (rf"{THINK} \boxed{{71}}", "70"),
    "no_box": ("the answer is 70", "70"),
    "no_gold": (rf"{THINK} \boxed{{70}}", None),
    "tower": (rf"{THINK} \boxed{{9^9^9^9}}", "1"),
    "long": (rf"{THINK} \boxed{{{'9' * 20_000}}}", "9" * 20_001),
    "nested": (THINK + r"\boxed{" * 2_000, "1"),
}
RIGHT = {"right", "number", "latex"}


def score_all():
    """Every completion by both functions, and the name of the thread that did it."""
    completions = [completion for completion, _ in ANSWERS.values()]
    golds = [gold for _, gold in ANSWERS.values()]
    scores = accuracy_reward(completions, answer=golds), format_reward(completions)
    return scores, threading.current_thread() is threading.main_thread()


def in_a_thread(function):
    """As an asynchronous trainer calls it, the exception included if there is one."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result(timeout=30)


def worker():
    """A worker process that scores in a thread of its own, as Ray's async actors do."""
    return score_all(), in_a_thread(score_all)


def test_verl_3407_same_scores_in_a_thread():
    expected, is_main = score_all()
    assert is_main
    assert [name for name, score in zip(ANSWERS, expected[0], strict=True) if score] == sorted(
        RIGHT, key=list(ANSWERS).index
    )
    assert expected[0][list(ANSWERS).index("no_gold")] is None
    assert in_a_thread(score_all) == (expected, False)


def test_math_verify_50_same_scores_in_many_threads_at_once():
    expected, _ = score_all()
    with concurrent.futures.ThreadPoolExecutor(max_workers=8) as pool:
        found = [future.result(timeout=30) for future in [pool.submit(score_all) for _ in range(16)]]
    assert found == [(expected, False)] * 16


def test_verl_5635_same_scores_in_a_spawned_process():
    expected, _ = score_all()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        in_main, beside = pool.submit(worker).result(timeout=60)
    assert in_main == (expected, True)
    assert beside == (expected, False)


def test_verl_3407_an_alarm_in_the_grader_would_show():
    """What the report did, so that the comparison is known to fail for it."""

    def with_alarm():
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            return grade_answer("70", "70")
        except ValueError:  # signal only works in the main thread: swallowed there, too
            return 0.0

    before = signal.getsignal(signal.SIGALRM)
    try:
        assert with_alarm() == 1.0
        assert in_a_thread(with_alarm) == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)


# One reward per rollout (trl#6533)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5,), (4, 1), (1, 4)])
@pytest.mark.parametrize("column", ["rewards_G", "advantages_G", "outcomes_G"])
def test_trl_6533_a_column_of_the_wrong_length_is_not_broadcast(column, shape):
    columns = {"rewards_G": np.zeros(4), column: np.zeros(shape)}
    with pytest.raises(GroupError, match=rf"'q7'.*{column} has shape {re.escape(str(shape))}.* 4 rollouts"):
        Group(prompt_id="q7", tokens_G=[[1]] * 4, **columns)


WRONG_LENGTHS = {
    "one": lambda n: [1.0],
    "none": lambda n: [],
    "per_prompt": lambda n: [1.0] * (n // 4),
    "one_short": lambda n: [1.0] * (n - 1),
    "one_more": lambda n: [1.0] * (n + 1),
    "array": lambda n: np.ones(1),
}


@pytest.mark.trl
@pytest.mark.parametrize("kind", WRONG_LENGTHS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_trl_6533_too_few_rewards_stop_the_run_by_name(kind, first, tmp_path):
    pytest.importorskip("trl")
    from trl_support import ScriptedFast, parity_reward, train

    from fastrl import FastRLConfig

    def judge(completions, **_):
        return WRONG_LENGTHS[kind](len(completions))

    both = [judge, parity_reward] if first else [parity_reward, judge]
    count = len(WRONG_LENGTHS[kind](8))
    with pytest.raises(ValueError, match=rf"'judge'.*\b{count}\b.*\b8\b"):
        train(
            ScriptedFast, tmp_path, reward_funcs=both, trainer_kwargs={"fastrl": FastRLConfig(budget="fixed")}
        )


@pytest.mark.trl
@pytest.mark.parametrize("value", [1.0, np.float64(0.5)], ids=["float", "numpy"])
def test_trl_6533_a_single_value_is_not_the_reward_of_all(value, tmp_path):
    pytest.importorskip("trl")
    from trl_support import ScriptedFast, train

    from fastrl import FastRLConfig

    def judge(completions, **_):
        return value

    with pytest.raises((ValueError, TypeError)) as raised:
        train(
            ScriptedFast, tmp_path, reward_funcs=[judge],
            trainer_kwargs={"fastrl": FastRLConfig(budget="fixed")},
        )  # fmt: skip
    said = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "judge" in said
