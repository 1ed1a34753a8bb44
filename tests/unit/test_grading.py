"""Is this answer right? Pairs that were decided by hand, real and made up, and what no input may do to the grader."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from fastrl.rewards import engine
from fastrl.rewards.exact import Unreadable, read_number
from fastrl.rewards.extraction import extract_answer
from fastrl.rewards.grading import Status, grade, grade_answer
from fastrl.rewards.mathruler import grade_mathruler

DECISIONS = [
    json.loads(line)
    for line in (Path(__file__).parent / "decisions" / "geoqa_r1v.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
OUTPUTS = Path(__file__).parents[3] / "shared" / "data" / "geoqa_r1v" / "test_with_completions.jsonl"

# (prediction, gold)
RIGHT = [
    ("27", "27°"), ("27°", "27"), ("27^\\circ", "27°"), ("27^{\\circ}", "27°"), ("27 degrees", "27°"),
    ("27 degree", "27"), ("27度", "27°"), ("27\\degree", "27°"), ("27 deg.", "27°"),
    ("$27^\\circ$", "27"), ("\\(27^{\\circ}\\)", "27°"), ("\\text{27 degrees}", "27°"),
    ("22.5°", "22°30'"), ("22°30′", "22.5"), ("8 cm", "8cm"), ("8", "8cm"), ("8cm", "8"),
    ("8\\text{ cm}", "8cm"), ("8~\\mathrm{cm}", "8cm"), ("8\\,cm", "8厘米"), ("80 mm", "8cm"),
    ("0.08 m", "8cm"), ("8 centimeters", "8厘米"), ("9 meters", "9米"), ("9m", "9米"),
    ("40 nautical miles", "40海里"), ("40", "40海里"), ("12 feet", "12 ft"), ("1 ft", "12 in"),
    ("1.5 hours", "90分钟"), ("(\\sqrt{3}+1) hours", "(√{3}+1)小时"), ("√3+1 h", "(√{3}+1)小时"),
    ("400 cm^2", "400cm²"), ("400cm^{2}", "400cm²"), ("400 square centimeters", "400cm²"),
    ("400 sq cm", "400cm²"), ("400平方厘米", "400cm²"), ("0.04 m²", "400cm²"), ("16π m²", "16π平方米"),
    ("27 cm²", "27cm^{2}"), ("400", "400cm²"), ("5 cm^3", "5立方厘米"), ("5 cubic centimetres", "5cm³"),
    ("400 cm**2", "400cm²"), ("12 units", "12"), ("12 square units", "12"), ("65\\pi", "65π"),
    ("65pi", "65π"), ("65 \\cdot \\pi", "65π"), ("π*65", "65π"), ("204.2035", "65π"), ("204.20", "65π"),
    ("\\frac{\\pi}{6}", "\\frac{1}{6}π"), ("pi/6", "\\frac{1}{6}π"), ("240\\pi", "240πcm^{2}"),
    ("3.1416", "π"), ("3.14", "π"), ("\\sqrt{3}", "√{3}"), ("√3", "√{3}"), ("sqrt(3)", "√{3}"),
    ("\\sqrt3", "√{3}"), ("√(3)", "√{3}"), ("1.732", "√{3}"), ("1.73", "√{3}"), ("3^(1/2)", "√{3}"),
    ("4\\sqrt{2}", "4√{2}"), ("4*sqrt(2)", "4√{2}"), ("√32", "4√{2}"), ("\\sqrt{32}", "4√{2}"),
    ("8/\\sqrt{2}", "4√{2}"), ("6+2\\sqrt{3}", "6+2√{3}"), ("2\\sqrt{3}+6", "6+2√{3}"),
    ("2(3+\\sqrt{3})", "6+2√{3}"), ("\\frac{\\sqrt{2}}{2}", "\\frac{√{2}}{2}"),
    ("\\dfrac{\\sqrt{2}}{2}", "\\frac{√{2}}{2}"), ("1/\\sqrt{2}", "\\frac{√{2}}{2}"),
    ("sqrt(2)/2", "\\frac{√{2}}{2}"), ("0.7071", "\\frac{√{2}}{2}"),
    ("\\frac{10\\sqrt{3}}{3}", "\\frac{10√{3}}{3}m"), ("10/√3 m", "\\frac{10√{3}}{3}m"),
    ("7√2", "7√{2}海里"), ("0.6", "\\frac{3}{5}"), ("3/5", "\\frac{3}{5}"), ("6/10", "\\frac{3}{5}"),
    ("\\frac35", "\\frac{3}{5}"), ("\\tfrac{3}{5}", "0.6"), ("0.333", "\\frac{1}{3}"), ("0.33", "1/3"),
    ("0.3333333333333333", "1/3"), ("4.8", "\\frac{24}{5}cm"), ("1\\frac{1}{2}", "1.5"),
    ("1 1/2", "\\frac{3}{2}"), ("5.71", "\\frac{40}{7}米"), ("0.66667", "2/3"), ("x = 5", "5"),
    ("x=5 cm", "5cm"), ("\\angle A = 40^\\circ", "40°"), ("m\\angle ABC = 40", "40°"),
    ("AB = 2\\sqrt{13}", "2√{13}"), ("The answer is 5 cm.", "5cm"), ("the length is 5", "5"),
    ("Answer: 12", "12"), ("≈ 17.32", "10√{3}"), ("10√3 ≈ 17.32 m", "10√{3}m"),
    ("180° - 110° = 70°", "70"), ("答案是5", "5"), ("5.", "5"), ("5 cm.", "5cm"), ("70.0", "70"),
    ("+70", "70"), ("-46.0", "-46"), ("−46", "-46"), ("1,234", "1234"), ("1234", "1,234"),
    ("12,345.5", "12345.5"), ("50%", "0.5"), ("50\\%", "50%"), ("50", "50%"), ("0.5", "50%"),
    ("14.9", "14.87"), ("14.87", "14.9"), ("\\sqrt{222}", "14.9"), ("54.999999999", "55"),
    ("2.0/3.0", "\\frac{2}{3}"), ("7e1", "70"), ("B", "B"), ("(B)", "B"), ("b", "B"), ("B.", "B"),
    ("Option B", "B"), ("\\text{B}", "B"), ("B. 45°", "B"), ("isosceles", "Isosceles"),
    ("parallelogram", "parallelogram"), ("a parallelogram", "a  parallelogram"),
    ("x^2+2x+1", "(x+1)^2"), ("2x+3", "3+2x"), ("(1,2)", "(1, 2)"), ("\\{1,2\\}", "\\{2,1\\}"),
    ("[0,1)", "[0,1)"), ("y=2x+3", "y = 3 + 2x"), ("\\frac{x}{2}", "x/2"), ("x\\le 3", "x \\leq 3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("1+i", "i+1"), ("10^5", "100000"), ("2^{10}", "1024"), ("\\sqrt[3]{8}", "2"), ("3:4", "3:4"),
    ("\\infty", "\\infty"), ('\u200b27', "27"), ('\u202e27\u202c', "27"), ("２７", "27"),
]  # fmt: skip
WRONG = [
    ("72", "27°"), ("27", "72°"), ("-27", "27°"), ("27 cm", "27°"), ("2.7", "27"), ("27.1", "27"),
    ("26.9", "27"), ("5 m", "5cm"), ("5cm", "5m"), ("500 m", "5m"), ("8 cm^2", "8cm"), ("8 cm", "8cm²"),
    ("8 cm^3", "8cm²"), ("8°", "8cm"), ("8 hours", "8cm"), ("9 feet", "9米"), ("4 m²", "400cm²"),
    ("40 km", "40海里"), ("400.0^2", "400cm²"), ("48.0^2", "27cm^{2}"), ("65", "65π"), ("65π", "65"),
    ("188", "60π"), ("157", "50π"), ("157.0", "50π"), ("3.1", "π"), ("3", "π"), ("22/7", "π"),
    ("240", "240πcm^{2}"), ("6", "\\frac{1}{6}π"), ("3", "√{3}"), ("√2", "√{3}"), ("1.7", "√{3}"),
    ("1.74", "√{3}"), ("2√10", "2√{13}"), ("2", "2√{13}"), ("4", "4√{2}"), ("4.0", "4√{3}"),
    ("10", "10√{2}"), ("12.6", "6√{2}"), ("6", "6√{5}m"), ("6√3+2", "6+2√{3}"), ("2√2", "2√{2}-2"),
    ("2", "2√{2}-2"), ("\\frac{√{3}}{2}", "\\frac{√{2}}{2}"), ("√13.1", "\\frac{9}{2}"), ("5√2", "5cm"),
    ("60√3", "60√{3}+1"), ("0.5", "\\frac{3}{5}"), ("5/3", "\\frac{3}{5}"), ("0.3", "\\frac{1}{3}"),
    ("3.3", "\\frac{10}{3}"), ("0.34", "1/3"), ("3.5", "1\\frac{1}{4}"), ("1.5", "\\frac{1}{2}"),
    ("0.6667", "0.6"), ("17.31", "10√{3}"), ("17.33", "10√{3}"), ("17", "10√{3}"), ("1/0", "0"),
    ("36, 27", "27"), ("27 and 36", "27"), ("36 27", "27"), ("27 or 36", "27"), ("x = 5 or x = 3", "3"),
    ("36°, 54°", "54°"), ("2x = 6", "6"), ("10.0 * tan(60.0) ≈ 22.7 meters", "10√{3}"),
    ("27 = 36", "27"), ("±5", "5"), ("1234", "1.234"), ("1,23", "123"), ("12,34", "1234"),
    ("5%", "5.0001"), ("0.05", "50%"), ("A", "B"), ("BC", "B"), ("C. 45°", "B"), ("B or C", "B"),
    ("scalene", "isosceles"), ("", "27"), ("   ", "27"), ("no idea", "27"), ("I cannot tell", "27"),
    ("nan", "0"), ("inf", "1"), ("None", "1"), ("__import__('os').system('true')", "27"),
    ("eval('27')", "27"), ("9^9^9^9", "27"), ("27!", "27"), ("1e400", "27"), ("x^2", "x^3"),
    ("(2,1)", "(1,2)"), ("(1,2)", "[1,2]"), ("2x", "x"), ("\\frac{x}{3}", "x/2"), ("4:3", "3:4"),
    ("\\sqrt[3]{9}", "2"), ("0{3}{5}", "\\frac{4}{5}"), ("0", "9π"),
]  # fmt: skip
UNREADABLE = ["", "  ", "$$", "((", "\\frac{", "9" * 40, "?", "\\foo{bar}{", "x" * 300]


@pytest.mark.parametrize(("prediction", "gold"), RIGHT)
def test_right_answers(prediction, gold):
    assert grade(prediction, gold).status is Status.RIGHT


@pytest.mark.parametrize(("prediction", "gold"), WRONG)
def test_wrong_answers(prediction, gold):
    assert grade_answer(prediction, gold) == 0.0


@pytest.mark.parametrize("gold", UNREADABLE)
def test_an_unreadable_gold_is_worth_nothing_to_anyone(gold):
    for prediction in ("5", gold, None):
        assert grade(prediction, gold).status is Status.UNPARSABLE_GOLD
        assert grade_answer(prediction, gold) is None


@pytest.mark.parametrize("row", DECISIONS, ids=lambda row: f"{row['id']}-{row['model']}")
def test_decisions_on_real_answers(row):
    assert grade(row["prediction"], row["gold"]).status.value == row["decision"]


def test_the_decisions_cover_both_kinds_and_say_why_they_differ():
    decided = Counter(row["decision"] for row in DECISIONS)
    assert decided["right"] > 200
    assert decided["wrong"] > 400
    for row in DECISIONS:
        differs = "other_grader" in row and (row["other_grader"] == "right") != (row["decision"] == "right")
        assert differs == bool(row.get("reason"))


@pytest.mark.skipif(not OUTPUTS.exists(), reason="the shared outputs are not on this machine")
def test_the_decisions_are_about_the_real_outputs_and_list_every_disagreement():
    decided = {(row["id"], row["model"]): row for row in DECISIONS}
    for line in OUTPUTS.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        for completion in question["completions"]:
            row = decided.pop((question["id"], completion["model"]))
            assert row["gold"] == question["answer"]
            assert row["prediction"] == extract_answer(completion["text"])
            differs = completion["judged_correct"] != (row["decision"] == "right")
            assert differs == ("reason" in row)
    assert not decided


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{70}", "70"),
        ("<answer>70</answer>", "70"),
        ("<answer>\n 70\n</answer>", "70"),
        (r"<answer>the result is \boxed{70} degrees</answer>", "70"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>", "1"),
        ("<answer>1</answer><answer></answer>", "1"),
        ("<answer>a <answer>b</answer>", "b"),
        ("</answer><answer>1</answer>", "1"),
        (r"\boxed{1} <answer>2</answer>", "2"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> I do not know", "1"),
        (r"<thinking>\boxed{1}</thinking><answer>2</answer>", "2"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("the answer is 70", None),
        (r"\boxed{70", None),
        ("<answer>70", None),
        ("", None),
    ],
)
def test_where_the_answer_stands(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("prediction", "gold", "value"),
    [
        ("B", "B", 1.0), ("45°", "B", 1.0), ("45", "B", 1.0), ("B. 45°", "B", 1.0), ("B", "45°", 1.0),
        ("(B)", "45", 1.0),
        ("C", "B", 0.0), ("60", "B", 0.0), ("A", "45°", 0.0), ("D", "60", 0.0), ("H", "45°", 0.0), (None, "B", 0.0),
    ],
)  # fmt: skip
def test_choices_stand_for_their_texts(prediction, gold, value):
    assert grade_answer(prediction, gold, choices=["30°", "45°", "60°"]) == value


def test_kinds_of_failures_are_told_apart():
    assert grade(None, "5").status is Status.NO_ANSWER
    assert grade(" ", "5").status is Status.NO_ANSWER
    assert grade(r"\frac{", "5").status is Status.UNPARSABLE_PREDICTION
    assert grade("9^9^9^9", "x+1").status is Status.UNPARSABLE_PREDICTION
    assert grade("6", "5").status is Status.WRONG


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14), ("2(3+4)", 14), ("-(2-5)", 3), ("2^3^2", 512), ("2^3", 8), ("4^(1/2)", 2), ("2**-2", 0.25),
        ("1\\frac{1}{2}", 1.5), ("2 1/2", 2.5), ("1/(2-√3)", 3.732050807568877), ("√{8}√{2}", 4), ("√2+√8-3√2", 0),
        ("\\frac{√{3}}{3}*√3", 1), ("1/3/2", 1 / 6), ("π/π", 1), ("1e3", 1000), ("5.", 5), (".5", 0.5), ("2 3", None),
        ("2{3}", None), ("√", None), ("(1", None), ("1)", None), ("(1]", None), ("1/0", None), ("√{-1}", None),
        ("x", None),
        ("\\sqrt[3]{8}", None), ("2^100", None), ("√{10000000000001}", None), ("1/(1+π)", None), ("((1)", None),
        ("", None),
    ],
)  # fmt: skip
def test_exact_numbers(text, value):
    if value is None:
        with pytest.raises(Unreadable):
            read_number(text)
    else:
        assert float(read_number(text)) == pytest.approx(value, rel=1e-15, abs=1e-15)


def test_exact_numbers_are_not_rounded():
    assert read_number("0.1+0.2") == read_number("0.3")
    assert read_number("(√2+√3)(√3-√2)") == read_number("1")
    assert read_number("1/3") != read_number("0." + "3" * 28)


HOSTILE = [
    "9^9^9^9", "9**9**9", "(" * 1000 + "1" + ")" * 1000, "{" * 1000, "1" * 10_000, r"\sqrt{" * 500 + "2" + "}" * 500,
    r"\frac{" * 300, "x!" * 50, r"\int_0^{\infty} e^{-x^2} dx", r"\prod_{n=1}^{99999} n", "\u202e" * 1000 + "27x",
    "\x00" * 1000, "\x00", r"\boxed{" * 5000, "x^{x^{x^x}}", "2^{999}x", "(x+y+z+w)^{50}", "1," * 90, "import os",
    "\U0001f600",
    r"\left(\frac{x+1}{x-1}\right)^{60}+\left(\frac{x+1}{x-2}\right)^{60}", r"\begin{pmatrix}" + "1&" * 60,
    "\n" * 500 + "{",
]  # fmt: skip


@pytest.mark.timeout(120)
def test_hostile_answers_are_wrong_within_a_second_each():
    """The bound is the engine's: it is killed after `engine.SECONDS`. A hang would meet the time limit of this test."""
    for text in HOSTILE:
        for gold in ("27", "x^2+1"):
            found = grade(text, gold).status
            assert found in (Status.WRONG, Status.UNPARSABLE_PREDICTION, Status.OUT_OF_TIME, Status.NO_ANSWER)
        assert grade("27", text).value in (0.0, None)
        extract_answer(text * 50)


def test_after_a_killed_engine_the_next_answer_is_graded():
    assert engine.compare("(x+y+z+w)^{49}", "x^2+1") is Status.OUT_OF_TIME
    assert grade("(x+1)^2", "x^2+2x+1").status is Status.RIGHT


def test_nothing_is_executed(tmp_path):
    mark = tmp_path / "executed"
    for code in (
        f"__import__('os').system('touch {mark}')", f"open('{mark}','w')", f"exec(\"open('{mark}','w')\")",
        rf"\text{{open('{mark}','w')}}", f"lambda: open('{mark}','w')", f"x=open('{mark}','w')",
    ):  # fmt: skip
        grade(code, "27")
        grade("27", code)
        engine.compare(code[:190], "x+1")
    assert not mark.exists()


PAIRS = [
    ("4√{2}", "\\sqrt{32}"),
    ("x+1", "1+x"),
    ("5 m", "5cm"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("9^9^9^9", "x"),
    ("1", ""),
]


def test_threads_grade_as_the_main_thread_does():
    expected = [grade_answer(*pair) for pair in PAIRS]
    found: dict[int, list] = {}

    def work(number: int) -> None:
        engine.compare.cache_clear()
        found[number] = [grade_answer(*pair) for pair in PAIRS]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(found.values()) == [expected] * 8


def test_a_process_without_a_main_module_grades_the_same():
    code = f"from fastrl.rewards import grade_answer; print([grade_answer(*pair) for pair in {PAIRS!r}])"
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    ).stdout
    assert output.strip() == repr([grade_answer(*pair) for pair in PAIRS])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_starts_an_engine_of_its_own():
    assert engine.compare("x+1", "1+x") is Status.RIGHT
    engine.compare.cache_clear()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, engine.compare("x+2", "2+x").value.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"right"
    assert engine.compare("x+3", "3+x") is Status.RIGHT


@pytest.mark.parametrize(
    ("prediction", "gold", "value"),
    [
        ("70", "70", 1.0), ("70.0", "70", 1.0), (r"70^\circ", "70", 1.0), ("70 degrees", "70", 1.0),
        ("70 cm", "70", 1.0),
        ("1,234", "1234", 1.0), (r"\frac{1}{2}", "1/2", 1.0), ("0.5", "1/2", 1.0), (r"4\sqrt{2}", r"\sqrt{32}", 1.0),
        ("x+1", "1+x", 1.0), ("(1,2)", "(1, 2)", 1.0), (r"\text{70}", "70", 1.0), (r"50\%", "50", 1.0),
        ("2/4", "1/2", 0.0), ("140/2", "70", 0.0), ("71", "70", 0.0), ("[1,2]", "(1,2)", 0.0),
        ("(1,2,3)", "(1,2)", 0.0),
        ("17.32", r"10\sqrt{3}", 0.0), ("9", "9米", 0.0), (None, "70", 0.0), ("", "70", 0.0), ("70", "", None),
        ("5 m", "5cm", 0.0), ("x" * 500, "70", 0.0),
    ],
)  # fmt: skip
def test_as_mathruler_would(prediction, gold, value):
    assert grade_mathruler(prediction, gold).value == value
