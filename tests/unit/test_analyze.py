"""`fastrl analyze`: every log becomes the groups that were sampled, and the what-if is `select` on them."""

import json
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastrl import FastRLConfig, cli, select, summarize, write_rollouts
from fastrl.bench.analyze import analyze, default_settings
from fastrl.bench.logs import find_log, read_log, tokenizer_ids, whitespace_ids
from fastrl.bench.stage_model import PUBLISHED, StageTimes, parse_stages
from fastrl.report.analysis import analysis_table
from fastrl.types import ConfigError, Group

STAGES = StageTimes(generation=2.0, old=1.0, reference=0.0, update=6.0, rest=1.0)
TEXTS = ["a b c", "a b d", "x y z", "a b c"]


def trl_table(prompts, step, *, rewards=(1.0, 0.0, 0.0, 1.0), **extra):
    rows = [(prompt, text, reward) for prompt in prompts for text, reward in zip(TEXTS, rewards, strict=True)]
    advantages = np.array(rewards) - np.mean(rewards)
    return pa.table(
        {
            "step": [step] * len(rows),
            "prompt": [[{"role": "user", "content": prompt}] for prompt, _, _ in rows],
            "completion": [[{"role": "assistant", "content": text}] for _, text, _ in rows],
            "accuracy_reward": [reward for _, _, reward in rows],
            "format_reward": [0.5] * len(rows),
            "advantage": np.tile(advantages, len(prompts)).tolist(),
            **extra,
        }
    )


def write_trl(folder, tables):
    (folder / "completions").mkdir(parents=True)
    for step, table in enumerate(tables, start=1):
        pq.write_table(table, folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def steps_of(path, **options):
    return list(read_log(find_log(path), whitespace_ids(), **options))


def test_trl_groups_are_told_apart_even_with_one_text(tmp_path):
    """Two neighbours ask "Find x." about other images; the third asks something else."""
    folder = write_trl(tmp_path, [trl_table(["Find x.", "Find x.", "Find y."], 7)])
    (step,) = steps_of(folder)
    assert step.step == 7
    assert [group.num_rollouts for group in step.groups] == [4, 4, 4]
    assert not step.problems
    group = step.groups[0]
    assert group.rewards_G.tolist() == [1.5, 0.5, 0.5, 1.5]
    assert group.advantages_G.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert group.tokens_G[0] == group.tokens_G[3] != group.tokens_G[1]
    assert step.groups[0].prompt_id == step.groups[1].prompt_id != step.groups[2].prompt_id


def test_an_outcome_decides_zero_variance(tmp_path):
    folder = write_trl(
        tmp_path, [trl_table(["a", "b"], 1, rewards=(1.0,) * 4, length_reward=[0.1 * i for i in range(8)])]
    )
    (step,) = steps_of(folder, outcome="accuracy_reward")
    assert [group.outcomes_G.tolist() for group in step.groups] == [[1.0] * 4] * 2
    for outcome, share in ((None, 0.0), ("accuracy_reward", 1.0)):
        result = analyze(steps_of(folder, outcome=outcome), {}, STAGES, num_steps=1)
        assert result["run"]["frac_zero_variance"] == share
    with pytest.raises(ConfigError, match="no column 'accuracy' to decide zero variance by"):
        steps_of(folder, outcome="accuracy")


def test_groups_of_a_fastrl_run_are_those_it_recorded(tmp_path):
    table = trl_table(["same", "same"], 1)
    table = table.append_column("fastrl/group", pa.array(["p1"] * 3 + ["p2"] * 5))
    (step,) = steps_of(write_trl(tmp_path, [table]))
    assert sorted(group.num_rollouts for group in step.groups) == [3, 5]


def test_broken_and_foreign_files_are_counted(tmp_path):
    folder = write_trl(tmp_path, [trl_table(["a"], 1), trl_table(["a"], 2), trl_table(["a"], 3)])
    files = sorted((folder / "completions").iterdir())
    files[1].write_bytes(files[1].read_bytes()[:-50])
    pq.write_table(pa.table({"prompt": ["a"]}), files[2])
    result = analyze(steps_of(folder), default_settings(), STAGES, num_steps=3)
    assert result["run"]["problems"] == {"file unreadable": 1, "no column completion": 1}
    assert (result["run"]["steps"], result["run"]["groups"]) == (1, 1)


def verl_lines(prompts, step):
    return [
        {
            "input": prompt,
            "output": text,
            "gts": "3",
            "score": float(i % 2),
            "step": step,
            "acc": float(i % 2),
        }
        for prompt in prompts
        for i, text in enumerate(TEXTS)
    ]


def test_verl_lines_in_any_order(tmp_path):
    for step in (2, 10):
        lines = [json.dumps(line) for line in verl_lines(["p", "q", "twice", "twice"], step)]
        random.Random(step).shuffle(lines)
        (tmp_path / f"{step}.jsonl").write_text("\n".join([*lines, '{"input": "half']), encoding="utf-8")
    steps = steps_of(tmp_path, outcome="acc")
    assert [step.step for step in steps] == [2, 10], "by number, not by name"
    for step in steps:
        assert [group.num_rollouts for group in step.groups] == [4, 4]
        assert step.problems == {"line unreadable": 1, "prompts of one text": 2}
        assert step.groups[0].advantages_G is None
        assert sorted(step.groups[0].rewards_G) == [0, 0, 1, 1]


def test_verls_own_keys_tell_prompts_of_one_text_apart(tmp_path):
    """Keys of verl 0.9, {sample}_{rollout}_{output}: groups may be of any size, and of one text."""
    lines = [
        {"input": "Find x.", "output": f"x = {i}", "score": float(i % 2), "step": 1, "uid": f"{sample}_{i}_0"}
        for sample, size in (("a_b", 4), ("c", 2), ("d", 1))
        for i in range(size)
    ]
    random.Random(0).shuffle(lines)
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (step,) = steps_of(tmp_path)
    assert sorted(group.num_rollouts for group in step.groups) == [2, 4]
    assert step.problems == {"group of one": 1}


def recorded(tmp_path):
    rng = np.random.default_rng(0)
    steps = []
    for step in range(3):
        groups = [
            Group(
                prompt_id=f"p{p}",
                tokens_G=[rng.integers(0, 9, size=rng.integers(1, 6)).tolist() for _ in range(4)],
                rewards_G=rng.integers(0, 2, size=4).astype(float),
                advantages_G=None,
            )
            for p in range(5)
        ]
        write_rollouts(tmp_path / "rollouts.jsonl", groups, select(groups), step=step)
        steps.append(groups)
    return steps


def test_own_records_and_the_what_if_are_those_of_select(tmp_path):
    written = recorded(tmp_path)
    log = find_log(tmp_path)
    assert (log.kind, log.num_steps) == ("fastrl", 3)
    steps = list(read_log(log, whitespace_ids()))
    for step, groups in zip(steps, written, strict=True):
        for found, group in zip(step.groups, groups, strict=True):
            assert found.prompt_id == group.prompt_id
            assert [list(tokens) for tokens in found.tokens_G] == [list(tokens) for tokens in group.tokens_G]
            assert found.rewards_G.tolist() == group.rewards_G.tolist()
    config = FastRLConfig(tau=0.4)
    result = analyze(steps, {"mine": config}, STAGES, num_steps=3)
    expected = [summarize(step.groups, select(step.groups, config)) for step in steps]
    kept = np.mean([values["kept/frac"] for values in expected])  # all steps have as many rollouts
    found = result["settings"]["mine"]
    assert found["kept_share"] == pytest.approx(kept)
    # 2 s of generation and 1 s of rest stay; 7 s shrink.
    assert found["speedup"] == pytest.approx(10 / (3 + 7 * kept))
    zero = np.mean([values["frac_zero_variance"] for values in expected])
    assert result["run"]["frac_zero_variance"] == pytest.approx(zero)
    assert result["run"]["tokens"] == sum(len(t) for groups in written for g in groups for t in g.tokens_G)


def test_a_record_that_was_lost_costs_its_group(tmp_path):
    recorded(tmp_path)
    lines = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "rollouts.jsonl").write_text(
        "\n".join([*lines[:5], *lines[6:-1], lines[-1][:30]]), encoding="utf-8"
    )
    steps = steps_of(tmp_path)
    assert [len(step.groups) for step in steps] == [4, 5, 4]
    problems = sum((step.problems for step in steps), start=type(steps[0].problems)())
    assert problems == {"group not whole": 2, "line unreadable": 1}


def test_a_step_without_anything_to_learn_from_ends_nothing(tmp_path):
    folder = write_trl(
        tmp_path, [trl_table([f"p{i}" for i in range(20)], s, rewards=(0.0,) * 4) for s in range(12)]
    )
    result = analyze(steps_of(folder), default_settings(), STAGES, num_steps=12, steps_per_epoch=2)
    assert result["run"]["frac_zero_variance"] == 1.0
    assert result["settings"]["unbiased, tau 0.8"]["kept_share"] == 0.0
    assert len(result["budgets"]["ars"]) == 12


def test_budgets_follow_the_run(tmp_path):
    folder = write_trl(tmp_path, [trl_table([f"p{i}" for i in range(8)], s) for s in range(1, 9)])
    result = analyze(steps_of(folder), {}, STAGES, num_steps=8, steps_per_epoch=2)
    assert result["budgets"]["ars"][0] == result["budgets"]["discovery"][0] == 4
    assert min(result["budgets"]["discovery"]) >= 2
    text = [str(cell) for cell in analysis_table(result).columns[0].cells]
    assert text == []


def test_stage_seconds():
    assert parse_stages([]) == PUBLISHED["Geo3K", "GRPO"]
    assert parse_stages(["generation=3", "update=1.5"]) == StageTimes(
        generation=3.0, old=0.0, reference=0.0, update=1.5
    )
    for pair, message in (("generate=3", "Did you mean"), ("update=x", "write update=SECONDS")):
        with pytest.raises(ConfigError, match=message):
            parse_stages([pair])


def test_where_there_is_nothing(tmp_path):
    (tmp_path / "notes.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no rollouts there\. Known: completions_"):
        find_log(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer.json there"):
        tokenizer_ids(tmp_path)


def test_easyr1_logs_validation_only(tmp_path):
    log = tmp_path / "generations.log"
    log.write_text("[prompt] p\n[output] o\n[ground_truth] g\n[score] 1.0\n\n", encoding="utf-8")
    for path in (tmp_path, log):
        with pytest.raises(ConfigError, match=r"fastrl\.trace=true: EasyR1's own run"):
            find_log(path)
    (tmp_path / "rollouts.jsonl").write_text("", encoding="utf-8")
    assert find_log(tmp_path).kind == "fastrl"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_gigabyte_of_log_fits_into_half_of_it(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"word{i:05d}" for i in range(20_000)]
    texts = [" ".join(rng.choice(words, size=1_600)) for _ in range(64)]  # 16 kB each
    log = tmp_path / "log"
    log.mkdir()
    for step in range(1, 65):
        with (log / f"{step}.jsonl").open("w", encoding="utf-8") as lines:
            for row in range(128 * 8):
                text = texts[(row * 7 + step) % len(texts)]
                fields = {"input": f"p{row // 8}", "output": text, "score": float(row % 3 == 0), "step": step}
                lines.write(json.dumps(fields) + "\n")
    assert sum(file.stat().st_size for file in log.iterdir()) > 1e9
    settings = tmp_path / "published.yaml"
    settings.write_text("tau: 0.8\n", encoding="utf-8")
    code = (
        "import re, sys; from fastrl import cli; "
        f"sys.argv = ['fastrl', 'analyze', {str(log)!r}, '--settings', {str(settings)!r}, "
        f"'--out', {str(tmp_path / 'out')!r}]; code = cli.main(); "
        # Not ru_maxrss, which a new program takes over from the one that started it.
        "print('peak kB', re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 steps, 8,192 groups of mostly 8, 65,536 rollouts" in done.stdout
    assert int(done.stdout.rpartition("peak kB")[2]) < 500 * 1024


def test_the_command_needs_no_torch_and_writes_a_twin(tmp_path):
    folder = write_trl(tmp_path / "run", [trl_table(["a", "b"], 1), trl_table(["a", "b"], 2)])
    code = (
        "import sys; from fastrl import cli; "
        f"sys.argv = ['fastrl', 'analyze', {str(folder)!r}, '--out', {str(tmp_path / 'out')!r}]; "
        "code = cli.main(); assert not {'torch', 'transformers', 'trl'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 steps, 4 groups of mostly 4, 16 rollouts" in done.stdout
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert result["kind"] == "trl"
    assert set(result["settings"]) == set(default_settings())
    assert (tmp_path / "out" / "analysis.png").stat().st_size > 1000


def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fastrl", "analyze", str(tmp_path)])
    assert cli.main() == 2
    assert "no rollouts there" in capsys.readouterr().err


def test_a_tokenizer_file_gives_its_tokens():
    pytest.importorskip("torch")
    from fastrl.testbed import checkpoint_path

    tokens = tokenizer_ids(checkpoint_path())("Find the angle x .")
    assert len(tokens) == 5
