"""Every shape in which a data set travels becomes the same rows."""

import csv
import io
import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fastrl.data.readers import READERS, load
from fastrl.types import ConfigError
from pictures import line_png

SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "geometry3k_sample"


def problem(number, split="train", **changes):
    return {
        "id": number,
        "annotat_text": f"Find x in problem {number}.",
        "choices": ["1", "2 \\sqrt { 3 }", "30", "4"],
        "answer": "B",
        "data_type": split,
    } | changes


@pytest.fixture
def originals(tmp_path):
    """Three original problems, two of train and one of test, in one folder."""
    root = tmp_path / "geometry3k"
    for number, split in ((2, "train"), (10, "train"), (7, "test")):
        folder = root / str(number)
        folder.mkdir(parents=True)
        (folder / "data.json").write_text(json.dumps(problem(number, split)), encoding="utf-8")
        (folder / "img_diagram.png").write_bytes(line_png(number))
    return root


def test_original_folders(originals):
    rows = list(load("geometry3k", str(originals), "train"))
    assert [row.id for row in rows] == ["geometry3k-2", "geometry3k-10"], "in the order of numbers"
    assert rows[0].problem == "<image>Find x in problem 2."
    assert rows[0].answer == "2 \\sqrt { 3 }", "the text of the choice, not its letter"
    assert rows[0].images[0].read() == line_png(2)
    assert rows[0].choices == ("1", "2 \\sqrt { 3 }", "30", "4")
    assert [row.id for row in load("geometry3k", str(originals), "test")] == ["geometry3k-7"]


def test_zips_of_splits_and_a_zip_of_all(originals, tmp_path):
    wanted = list(load("geometry3k", str(originals), "train"))
    by_split = tmp_path / "zips"
    by_split.mkdir()
    with zipfile.ZipFile(by_split / "train.zip", "w") as archive:
        for file in sorted(originals.rglob("*.*")):
            if file.parent.name in ("2", "10"):
                archive.write(file, f"train/{file.parent.name}/{file.name}")
        archive.writestr("__MACOSX/._x", b"")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in sorted(originals.rglob("*.*")):
            archive.write(file, f"geometry3k/{file.parent.name}/{file.name}")
    for source in (by_split, tmp_path / "all.zip"):
        found = list(load("geometry3k", str(source), "train"))
        assert [(row.id, row.problem, row.answer) for row in found] == [
            (row.id, row.problem, row.answer) for row in wanted
        ]
        assert [row.images[0].read() for row in found] == [row.images[0].read() for row in wanted]


def test_hub_tables_as_parquet_and_saved_to_disk(tmp_path):
    import datasets

    data = {
        "images": [[{"bytes": line_png(200), "path": None}], [{"bytes": line_png(1), "path": None}]],
        "problem": ["<image>Find x.", "Find y."],
        "answer": ["3", " 4 "],
    }
    features = datasets.Features(
        images=datasets.List(datasets.Image()),
        problem=datasets.Value("string"),
        answer=datasets.Value("string"),
    )
    table = datasets.Dataset.from_dict(data, features=features)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table.to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    datasets.DatasetDict(test=table).save_to_disk(tmp_path / "disk")
    for source in (tmp_path / "hub", tmp_path / "disk", tmp_path / "hub/data/test-00000-of-00001.parquet"):
        rows = list(load("geometry3k", str(source), "test"))
        assert [row.id for row in rows] == ["geometry3k-test-00000", "geometry3k-test-00001"]
        assert [row.problem for row in rows] == ["<image>Find x.", "<image>Find y."], (
            "a missing mark is put in"
        )
        assert [row.answer for row in rows] == ["3", "4"]
        assert rows[1].images[0].read() == line_png(1)


def test_geoqa_takes_the_answer_out_of_its_tags(tmp_path):
    rows = [
        {"image": "a.png", "problem": "How large is it?", "solution": "<answer> 145°\n</answer>"},
        {"image": "a.png", "problem": "<image>And this?", "solution": "<think>7</think><answer>8</answer>"},
        {"image": "a.png", "problem": "And that?", "answer": "9cm"},
    ]
    (tmp_path / "a.png").write_bytes(line_png(200))
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = list(load("geoqa8k-r1v", str(file)))
    assert [row.answer for row in found] == ["145°", "8", "9cm"]
    assert found[0].problem == "<image>How large is it?"
    assert found[1].problem == "<image>And this?"
    assert found[0].images[0].read() == line_png(200)


def test_math_folders_and_tables(tmp_path):
    solution = "First \\boxed{1}, then $x = \\boxed{\\frac{1}{2}}$."
    values = {"problem": "Solve.", "level": "Level 1", "type": "Algebra", "solution": solution}
    for number in (2, 11):
        file = tmp_path / "MATH" / "train" / "algebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    rows = list(load("math", str(tmp_path / "MATH")))
    assert [row.id for row in rows] == ["math-train-algebra-2", "math-train-algebra-11"]
    assert rows[0].answer == "\\frac{1}{2}"
    assert not rows[0].images
    with pytest.raises(ConfigError, match="no split 'test'; there is train"):
        list(load("math", str(tmp_path / "MATH"), "test"))
    table = tmp_path / "test.jsonl"
    table.write_text(json.dumps(values) + "\n" + json.dumps({**values, "answer": "0.5"}), encoding="utf-8")
    assert [row.answer for row in load("math", str(table), "test")] == ["\\frac{1}{2}", "0.5"]


COLUMNS = {"id": "key", "problem": "question", "answer": "gold", "images": "picture"}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_own_files_with_their_own_columns(tmp_path, suffix):
    (tmp_path / "img").mkdir()
    (tmp_path / "img" / "a.png").write_bytes(line_png(200))
    rows = [
        {"key": f"q{i}", "question": f"Frage {i}: ä?", "gold": str(i), "picture": "img/a.png"}
        for i in range(3)
    ]
    file = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    elif suffix == "csv":
        with file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    found = list(load("file", str(file), columns=COLUMNS))
    assert [(row.id, row.problem, row.answer) for row in found] == [
        (f"q{i}", f"<image>Frage {i}: ä?", str(i)) for i in range(3)
    ]
    assert found[0].images[0].read() == line_png(200)
    assert found[0].source == "mine"


def test_own_files_without_ids_are_numbered_and_take_several_images(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"problem": "<image>or<image>?", "answer": 2, "images": ["a.png", "b.png"]}))
    (row,) = load("file", str(file))
    assert row.id == "mine-00000"
    assert row.answer == "2"
    assert [picture.path.name for picture in row.images] == ["a.png", "b.png"]
    assert row.problem == "<image>or<image>?"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "geometry3"}, "'geometry3' is unknown. Did you mean"),
        ({"name": "file"}, "no source. Give the path"),
        ({"name": "file", "source": "nothing.jsonl"}, "no such file or folder"),
        ({"name": "geometry3k", "source": "{file}", "columns": {"problem": "q"}}, "a mapping belongs to file"),
        ({"name": "file", "source": "{file}", "columns": {"question": "q"}}, "'question' is none of ours"),
        ({"name": "file", "source": "{file}", "columns": {"answer": "golds"}}, "no column 'golds' for answer. Did"),
        ({"name": "file", "source": "{file}", "columns": {"problem": "gold"}}, "no column 'answer' for answer"),
        ({"name": "file", "source": "{file}", "split": "test"}, "this file is the split train, not 'test'"),
        ({"name": "file", "source": "{other}"}, ".txt is not read"),
        ({"name": "file", "source": "{parquet}"}, "not a whole parquet file"),
        ({"name": "geometry3k", "source": "{zip}"}, "not a whole zip file"),
        ({"name": "file", "source": "{folder}", "split": "validation"}, "no .jsonl or .csv or .parquet file with"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_why(tmp_path, arguments, message):
    places = {
        "{file}": tmp_path / "mine.jsonl",
        "{other}": tmp_path / "mine.txt",
        "{parquet}": tmp_path / "bad.parquet",
        "{zip}": tmp_path / "bad.zip",
        "{folder}": tmp_path,
    }
    for path in places.values():
        if path.suffix:
            path.write_text('{"gold": "1"}\n', encoding="utf-8")
    if arguments.get("source") in places:
        arguments = {**arguments, "source": str(places[arguments["source"]])}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace("?", r"\?")):
        list(load(**arguments))


def test_a_single_file_is_train_unless_its_name_says_otherwise(tmp_path):
    line = json.dumps({"problem": "1+1", "answer": "2"})
    for name in ("gsm_test.jsonl", "val.jsonl"):
        (tmp_path / name).write_text(line, encoding="utf-8")
    assert len(list(load("file", str(tmp_path / "gsm_test.jsonl"), "test"))) == 1
    assert len(list(load("file", str(tmp_path / "val.jsonl"), "validation"))) == 1
    with pytest.raises(ConfigError, match="is the split test"):
        list(load("file", str(tmp_path / "gsm_test.jsonl"), "train"))


def test_every_reader_but_file_has_a_published_name():
    assert {name for name, reader in READERS.items() if reader.hub is None} == {"file"}


@pytest.mark.skipif(not SAMPLE.exists(), reason="the ten original problems are not on this machine")
def test_ten_original_problems():
    rows = list(load("geometry3k", str(SAMPLE)))
    assert [row.id for row in rows] == [f"geometry3k-{number}" for number in range(11, 21)]
    assert rows[0].answer == "80"
    assert rows[0].problem.startswith("<image>In $\\odot X, A B=30")
    for row in rows:
        assert row.answer in row.choices
        assert Image.open(io.BytesIO(row.images[0].read())).size[0] > 50
