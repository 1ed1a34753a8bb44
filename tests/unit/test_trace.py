"""Rollout records: what is written is read back, and a damaged file says where it is damaged."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrl import FastRLConfig, FastRLError, Group, read_rollouts, select, write_rollouts

NAN = float("nan")
SUFFIXES = [".jsonl", ".parquet"]


def two_groups():
    return [
        Group(
            prompt_id="z-first",
            tokens_G=[[1, 2], [], [2, 1]],
            rewards_G=np.array([1.0, NAN, 0.25]),
            advantages_G=np.array([0.5, 0.0, -0.5]),
            outcomes_G=np.array([1.0, NAN, 0.0]),
        ),
        Group(prompt_id="a-second", tokens_G=[[7], [7]], rewards_G=np.array([1.0, 1.0])),
    ]


def write(path, groups=None, step=0):
    groups = two_groups() if groups is None else groups
    write_rollouts(path, groups, select(groups), step=step)
    return path


def plain(groups):
    def values(column):
        return None if column is None else [None if np.isnan(v) else float(v) for v in column]

    return [
        (
            g.prompt_id,
            [list(tokens) for tokens in g.tokens_G],
            values(g.rewards_G),
            values(g.advantages_G),
            values(g.outcomes_G),
        )
        for g in groups
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_groups_come_back_in_order_with_nan_and_none_in_their_places(tmp_path, suffix):
    assert plain(read_rollouts(write(tmp_path / f"r{suffix}"))) == plain(two_groups())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_group_nobody_could_score_comes_back(tmp_path, suffix):
    groups = [Group(prompt_id="q", tokens_G=[[], []], rewards_G=np.array([NAN, NAN]))]
    assert plain(read_rollouts(write(tmp_path / f"r{suffix}", groups))) == plain(groups)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_outcomes_that_are_all_unscorable_still_decide_after_a_round_trip(tmp_path, suffix):
    # Outcomes of NaN say "nothing to compare"; no outcomes say "look at the rewards".
    groups = [
        Group(prompt_id="q", tokens_G=[[1], [2]], rewards_G=np.array([0.0, 1.0]), outcomes_G=np.full(2, NAN))
    ]
    config = FastRLConfig(zero_variance="drop")
    read = read_rollouts(write(tmp_path / f"r{suffix}", groups))
    assert select(read, config)[0].keep_G.tolist() == select(groups, config)[0].keep_G.tolist()


numbers = st.one_of(st.sampled_from([0.0, 1.0, -0.5, NAN]), st.floats(-1e9, 1e9, allow_nan=False))


@st.composite
def any_groups(draw):
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        column = st.lists(numbers, min_size=size, max_size=size).map(np.array)
        outcomes = draw(st.one_of(st.none(), column))
        if outcomes is not None and np.isnan(outcomes).all():
            outcomes = None  # has its own test
        tokens = draw(st.lists(st.lists(st.integers(0, 2**40), max_size=4), min_size=size, max_size=size))
        advantages = draw(st.one_of(st.none(), column.map(np.nan_to_num)))
        groups.append(
            Group(
                prompt_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6)),
                tokens_G=tokens,
                rewards_G=draw(column),
                advantages_G=advantages,
                outcomes_G=outcomes,
            )
        )
    return groups


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=any_groups())
def test_any_groups_survive_the_round_trip_bit_for_bit(tmp_path, suffix, groups):
    path = tmp_path / f"r{suffix}"
    path.unlink(missing_ok=True)
    assert plain(read_rollouts(write(path, groups))) == plain(groups)


def test_a_record_holds_the_fate_of_its_rollout(tmp_path):
    path = write(tmp_path / "r.jsonl", step=7)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = {
        "version": 1, "step": 7, "group": 0, "prompt_id": "z-first", "rollout": 1, "tokens": [],
        "reward": None, "outcome": None, "advantage": 0.0, "keep": False, "weight": 0.0, "cluster": -1,
        "reason": "mdap",
    }  # fmt: skip
    assert records[1].items() >= expected.items()
    assert records[4]["keep"] is False
    assert records[4]["cluster"] == 0


def test_records_are_strict_json(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    path = write(tmp_path / "r.jsonl")
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=refuse)


def test_a_jsonl_file_grows_step_by_step_and_is_read_in_the_order_of_steps(tmp_path):
    path = tmp_path / "run" / "rollouts.jsonl"
    for step in (10, 2):
        groups = [Group(prompt_id=f"step {step}", tokens_G=[[1]], rewards_G=np.ones(1))]
        write(path, groups, step=step)
    assert [g.prompt_id for g in read_rollouts(path)] == ["step 2", "step 10"]


def test_a_folder_of_both_formats_is_read_whole(tmp_path):
    write(tmp_path / "a.jsonl", step=1)
    write(tmp_path / "b.parquet", step=0)
    (tmp_path / "notes.txt").write_text("not a record", encoding="utf-8")
    assert plain(read_rollouts(tmp_path)) == plain(two_groups() * 2)


def test_a_parquet_file_is_never_overwritten_and_leaves_no_temporary(tmp_path):
    path = write(tmp_path / "r.parquet")
    with pytest.raises(FastRLError, match=r"r\.parquet exists.*one file per step"):
        write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(FastRLError, match=r"\.jsonl or \.parquet, not '\.csv'"):
        write(tmp_path / "r.csv")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing"])
def test_nothing_to_read_says_how_to_get_records(tmp_path, name):
    with pytest.raises(FastRLError, match=r"missing.*no rollout records.*fastrl\.trace: true"):
        read_rollouts(tmp_path / name)


def test_an_empty_folder_says_how_to_get_records(tmp_path):
    with pytest.raises(FastRLError, match=r"no rollout records.*fastrl\.trace: true"):
        read_rollouts(tmp_path)


# --- damage -------------------------------------------------------------------------------------


def test_a_half_line_is_named_by_file_and_line(tmp_path):
    path = write(tmp_path / "r.jsonl")
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    with pytest.raises(FastRLError, match=r"r\.jsonl, line 5: not a JSON record.*half line.*remove it"):
        read_rollouts(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("lost", [0, 1], ids=["first", "middle"])
def test_a_missing_rollout_is_named_by_group_and_step(tmp_path, suffix, lost):
    path = damaged(tmp_path, suffix, lambda records: records.pop(lost))
    with pytest.raises(
        FastRLError, match=r"group 0 of step 3 has the rollouts \[.*\].*whole or it is not read"
    ):
        read_rollouts(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("lost", [2, 4], ids=["of a middle group", "of the file"])
def test_a_missing_last_rollout_is_not_read_as_a_smaller_group(tmp_path, suffix, lost):
    # What a killed run leaves, after its half line was removed as the error message advises.
    path = damaged(tmp_path, suffix, lambda records: records.pop(lost))
    with pytest.raises(FastRLError, match="whole or it is not read"):
        read_rollouts(path)


def test_a_group_that_occurs_twice_is_refused(tmp_path):
    write(tmp_path / "rank0.jsonl")
    write(tmp_path / "rank1.jsonl")
    with pytest.raises(FastRLError, match=r"group 0 of step 0.*\[0, 0, 1, 1, 2, 2\].*two runs"):
        read_rollouts(tmp_path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_another_version_is_refused_with_both_versions(tmp_path, suffix):
    path = damaged(tmp_path, suffix, lambda records: [r.update(version=2) for r in records])
    with pytest.raises(FastRLError, match=r"record version 2, this FastRL reads 1"):
        read_rollouts(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_records_of_something_else_are_refused_with_both_sets_of_fields(tmp_path, suffix):
    path = damaged(tmp_path, suffix, lambda records: [r.update(prompt=r.pop("prompt_id")) for r in records])
    with pytest.raises(FastRLError) as caught:
        read_rollouts(path)
    for part in (path.name, "not a FastRL rollout record", "'prompt'", "'prompt_id'"):
        assert part in str(caught.value)


@pytest.mark.parametrize("line", ["[1, 2]", "3", "null", '"text"', ""])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = write(tmp_path / "r.jsonl")
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(FastRLError, match=r"r\.jsonl, line 6: not a "):
        read_rollouts(path)


def damaged(folder, suffix, damage):
    """A file of the records of `two_groups` at step 3, changed by `damage`."""
    whole = write(folder / "whole.jsonl", step=3)
    records = [json.loads(line) for line in whole.read_text(encoding="utf-8").splitlines()]
    damage(records)
    path = folder / f"damaged{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
