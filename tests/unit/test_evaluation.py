"""`fastrl eval` without a model: grading, summaries, files, what lmms-eval is told and how its logs are read."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from fastrl.bench.answers import Answers, Sampling, chat
from fastrl.bench.benchmarks import BENCHMARKS, InDomain, find, rows_of
from fastrl.bench.evaluate import answer_all, judge, summarize
from fastrl.bench.evaluation import Request, parse_sources, subject_of
from fastrl.bench.lmms import STATED, Harness, choices_in, extract_stated, run_task
from fastrl.bench.standins import NUM_ITEMS, write_standin
from fastrl.data.rows import Picture, Row
from fastrl.report.evaluation import evaluation_tables
from fastrl.rewards import RULES
from fastrl.types import ConfigError

ROWS = [Row(id=f"p{i}", problem=f"{i} + {i}?", answer=str(2 * i), source="t") for i in range(4)]
RIGHT = "<thinking> so </thinking> \\boxed{{{}}}"


class Scripted:
    """Answers the first rows rightly, and counts how often it is asked."""

    def __init__(self, num_right, num_samples=2):
        self.num_right, self.num_samples, self.calls = num_right, num_samples, 0

    def answer(self, rows, sampling):
        self.calls += 1
        for i, row in enumerate(rows):
            text = RIGHT.format(row.answer) if i < self.num_right else "no idea"
            half = RIGHT.format(row.answer) if i == 0 else RIGHT.format(-1)
            yield Answers(greedy=text, samples=(half, RIGHT.format(row.answer))[: self.num_samples])


def items(folder, name, num_right):
    sampler = Scripted(num_right)
    return answer_all(
        ROWS, lambda: sampler, Sampling(num_samples=2), RULES["paper"], folder / f"{name}.jsonl"
    )


def test_a_summary_has_accuracies_intervals_kinds_and_paired_gains(tmp_path):
    found = summarize({"base": items(tmp_path, "base", 1), "fastrl": items(tmp_path, "fastrl", 3)}, [1, 2])
    base, fast = found["models"]["base"], found["models"]["fastrl"]
    assert found["num"] == 4
    assert (base["greedy"]["mean"], fast["greedy"]["mean"]) == (0.25, 0.75)
    assert fast["sampled"]["mean"] == pytest.approx((1 + 3 * 0.5) / 4)
    assert fast["pass@2"]["mean"] == 1.0
    assert fast["kinds"] == {"right": 0.75, "no_answer": 0.25}
    assert fast["in_format"] == 0.75
    assert found["gain"]["fastrl"]["greedy"]["mean"] == 0.5
    assert found["gain"]["fastrl"]["sampled"] == {"mean": 0.0, "low": 0.0, "high": 0.0}, (
        "paired: no item differs"
    )
    (table,) = evaluation_tables({"benchmarks": {"t": found}})
    assert [column.header for column in table.columns] == [
        "model", "greedy", "sampled", "pass@2", "no answer", "in format",
    ]  # fmt: skip


def test_finished_answers_are_graded_again_but_never_sampled_again(tmp_path):
    file = tmp_path / "fastrl.jsonl"
    sampler, settings = Scripted(2), Sampling(num_samples=2)
    first = answer_all(ROWS, lambda: sampler, settings, RULES["paper"], file)
    assert answer_all(ROWS, lambda: sampler, settings, RULES["paper"], file) == first
    assert sampler.calls == 1
    other = answer_all(ROWS, lambda: sampler, settings, RULES["r1v"], file)
    assert sampler.calls == 1
    assert other[0].in_format == 0.0, "another rule reads the same texts"
    for changed in (replace(settings, seed=1), replace(settings, template=lambda text: f"{text}!")):
        answer_all(ROWS, lambda: sampler, changed, RULES["paper"], file)
    assert sampler.calls == 3
    answer_all(ROWS[:2], lambda: sampler, changed, RULES["paper"], file)
    assert sampler.calls == 4


def test_an_interrupted_file_is_no_finished_one(tmp_path):
    class Broken(Scripted):
        def answer(self, rows, sampling):
            yield Answers(greedy="", samples=())
            raise RuntimeError("out of memory")

    file = tmp_path / "x.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        answer_all(ROWS, lambda: Broken(1), Sampling(), RULES["paper"], file)
    assert not file.exists()


def test_texts_with_every_separator_survive_the_file(tmp_path):
    class Odd(Scripted):
        def answer(self, rows, sampling):
            for _ in rows:
                yield Answers(greedy="a\u2028b\x85c\n\udcff", samples=())

    def run():
        return answer_all(ROWS, lambda: Odd(1), Sampling(), RULES["paper"], tmp_path / "x.jsonl")

    assert run() == run()


def test_choices_count_as_letter_and_as_value():
    row = Row(id="q", problem="?", answer="75", source="t", choices=("70", "75", "80"))
    for text in ("\\boxed{B}", "\\boxed{75}", "B", "75", "<answer>B</answer>"):
        assert judge(row, Answers(greedy=text, samples=()), STATED).found == "right", text
    letter = replace(row, answer="B")
    for text in ("\\boxed{B}", "\\boxed{75}", "(B)"):
        assert judge(letter, Answers(greedy=text, samples=()), STATED).found == "right", text
    assert judge(row, Answers(greedy="\\boxed{C}", samples=()), STATED).found == "wrong"


def test_what_counts_as_stated():
    assert extract_stated("so \\boxed{3}") == "3"
    assert extract_stated(" 12 cm ") == "12 cm"
    assert extract_stated("") is None
    assert extract_stated("I have thought about this for long, and it may be 12.") is None


@pytest.mark.parametrize(
    ("question", "choices"),
    [
        ("Find x.\nChoices:\nA:70\nB:7.5\nC:80°\nD:85", ("70", "7.5", "80°", "85")),
        ("Find x.\n<image1>\nChoices: A. 70\nB. 75\nAnswer directly.", ("70", "75")),
        ("Find x.\nA. 70; B. 75; C. 80", ("70", "75", "80")),
        ("Find x.\n(A) 70", None),
        ("A triangle ABC. Find AB.", None),
        ("In triangle ABC:\nB. is a point", None),
    ],
)
def test_choices_are_read_from_the_question(question, choices):
    assert choices_in(question) == choices


def test_messages_are_those_of_training():
    row = Row(id="q", problem="<image>Find x.", answer="1", images=(Picture(data=b""),), source="t")
    sampling = Sampling(template=lambda text: f"{text} Box it.", system="Be brief.")
    system, user = chat(row, sampling)
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert user["content"] == [{"type": "image"}, {"type": "text", "text": "Find x. Box it."}]
    assert chat(ROWS[1], Sampling())[0]["content"] == "1 + 1?"


def test_the_testbed_is_a_benchmark_of_its_held_out_problems():
    rows = rows_of(BENCHMARKS["testbed"], limit=3)
    assert [row.problem.count("<image>") for row in rows] == [1, 1, 1]
    assert rows[0].images[0].read().startswith(b"\x89PNG")
    assert isinstance(find("geoqa8k"), InDomain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"benchmarks": ["mathvers"]}, "'mathvers' is unknown. Did you mean"),
        ({"benchmarks": []}, "name at least one"),
        ({"benchmarks": ["math"], "k": -1}, "--k -1"),
        ({"benchmarks": ["math"]}, "Name it with --base"),
        ({"benchmarks": ["math"], "base": "b", "reward": "papers"}, "--reward 'papers' is unknown"),
    ],
)
def test_requests_that_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        subject_of(Request(run="some/model", **arguments))


def test_a_run_folder_needs_a_trained_model(tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: {name: testbed}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="no <method>/model folder"):
        subject_of(Request(run=str(tmp_path), benchmarks=["testbed"]))


def test_a_run_folder_says_how_it_was_trained(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "task: {name: math, model: org/base, reward: r1v, prompt: r1v, system: Hi}\nmax_completion_length: 77\n",
        encoding="utf-8",
    )
    for method in ("grpo", "fastrl"):
        (tmp_path / method / "model").mkdir(parents=True)
    found = subject_of(Request(run=str(tmp_path), benchmarks=["math"]))
    assert list(found.models) == ["base", "fastrl", "grpo"]
    assert found.models["base"] == "org/base"
    assert (found.rule, found.template, found.system, found.max_tokens) == (RULES["r1v"], "r1v", "Hi", 77)


def test_sources_belong_to_benchmarks_that_run():
    assert parse_sources(["math=a=b"], ["math"]) == {"math": "a=b"}
    for pair in ("math", "math=", "geo=x"):
        with pytest.raises(ConfigError, match="write BENCHMARK=PATH"):
            parse_sources([pair], ["math"])


FAKE = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1]) / "model"
out.mkdir(parents=True, exist_ok=True)
sampled = "do_sample=True" in sys.argv[sys.argv.index("--gen_kwargs") + 1]
with (pathlib.Path(__file__).parent / "calls.txt").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "fails" in sys.argv[sys.argv.index("--tasks") + 1]:
    sys.exit("no such task")
rows = [{"doc_id": i, "target": "B", "input": "x?\\nA. 1\\nB. 2", "filtered_resps": "2" if i == 0 or sampled else "3"}
        for i in (1, 0)]
rows[0]["resps"] = [["<think> </think> 2"]] if sampled else [["\\\\boxed{1}"]]
(out / "1_samples_t.jsonl").write_text("\\n".join(map(json.dumps, rows)))
results = {"results": {"t": {"gpt_eval_score,none": 0.5, "gpt_eval_score_stderr,none": 0.1, "alias": "t"}}}
(out / "1_results.json").write_text(json.dumps(results))
"""


@pytest.fixture
def fake_lmms(tmp_path, monkeypatch):
    """A Python whose lmms_eval writes logs in the layout of the real one."""
    pytest.importorskip("torch")
    (tmp_path / "site" / "lmms_eval").mkdir(parents=True)
    (tmp_path / "site" / "lmms_eval" / "__init__.py").touch()
    (tmp_path / "site" / "lmms_eval" / "__main__.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site" / "lmms_eval" / "calls.txt"


def test_lmms_eval_is_run_once_per_pass_and_its_logs_are_read(fake_lmms, tmp_path):
    harness = Harness(python=sys.executable, kind="llava_hf")
    sampling = Sampling(num_samples=2, max_tokens=9, temperature=0.7, seed=5)

    def run(**changes):
        return run_task(
            harness, "mathverse", "task", "a/model", replace(sampling, **changes), tmp_path / "out", limit=2
        )

    found = run()
    assert [row.id for row in found.rows] == ["mathverse-00000", "mathverse-00001"]
    assert found.rows[0].choices == ("1", "2")
    assert found.answers[0] == Answers(greedy="2", samples=("2", "2"))
    assert found.answers[1] == Answers(greedy="\\boxed{1}", samples=("<think> </think> 2",) * 2)
    assert found.judged == {}
    calls = fake_lmms.read_text(encoding="utf-8").splitlines()
    assert len(calls) == 3
    assert "pretrained=a/model" in calls[0]
    assert "temperature=0,do_sample=False --seed 0 --predict_only --tasks task --limit 2" in calls[0]
    assert "max_new_tokens=9,temperature=0.7,top_p=1.0,do_sample=True --seed 6" in calls[2]
    assert run() == found
    assert len(fake_lmms.read_text(encoding="utf-8").splitlines()) == 3, "finished passes are not run again"
    run(max_tokens=10)
    assert len(fake_lmms.read_text(encoding="utf-8").splitlines()) == 6


def test_the_judges_score_is_kept_apart(fake_lmms, tmp_path, monkeypatch):
    harness = Harness(python=sys.executable, kind="vllm", judge=True)
    arguments = (harness, "mathverse", "task", "a/model", Sampling(), tmp_path / "out")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="Set OPENAI_API_KEY"):
        run_task(*arguments)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert run_task(*arguments).judged == {"gpt_eval_score": 0.5}
    call = fake_lmms.read_text(encoding="utf-8")
    assert "model=a/model" in call
    assert "--predict_only" not in call


def test_a_failure_of_lmms_eval_says_where_to_look(fake_lmms, tmp_path):
    harness = Harness(python=sys.executable, kind="llava_hf")
    with pytest.raises(ConfigError, match=r"lmms-eval failed; the last line of .*log.txt: no such task"):
        run_task(harness, "mathverse", "fails", "a/model", Sampling(), tmp_path / "out")
    with pytest.raises(ConfigError, match="make venv-lmms"):
        Harness(python="nowhere/python").tasks_folder()


def test_the_kind_of_a_model_is_known_or_asked_for(fake_lmms, tmp_path):
    from fastrl.testbed import checkpoint_path

    harness = Harness(python=sys.executable)
    run_task(harness, "mathverse", "task", str(checkpoint_path()), Sampling(), tmp_path / "out")
    assert "--model llava_hf " in fake_lmms.read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="Name it with --lmms-model"):
        run_task(harness, "mathverse", "task", str(tmp_path), Sampling(), tmp_path / "out2")


@pytest.mark.parametrize("benchmark", ["mathverse", "mathvision", "mathvista", "wemath"])
def test_stand_ins_have_ten_records_and_a_task(tmp_path, benchmark):
    import datasets
    import yaml

    name = write_standin(benchmark, tmp_path, tmp_path / "tasks")
    task = yaml.safe_load((tmp_path / f"{name}.yaml").read_text(encoding="utf-8"))
    assert task["include"].startswith(str(tmp_path / "tasks" / benchmark))
    table = datasets.load_dataset("parquet", **task["dataset_kwargs"], cache_dir=str(tmp_path / "cache"))
    rows = table[task["test_split"]]
    assert len(rows) == NUM_ITEMS
    pictures = [key for key, value in rows[0].items() if hasattr(value, "tobytes")]
    assert len(pictures) == 1
    if benchmark != "wemath":
        assert (
            np.mean(
                [
                    bool(row.get("options") or row.get("choices") or "Choices" in row["question"])
                    for row in rows
                ]
            )
            == 0.5
        )
