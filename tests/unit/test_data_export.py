"""What the engines' own ways of loading read back is the canonical row."""

import io
import json

import datasets
import pytest
from PIL import Image

from fastrl.cli import main
from fastrl.data.export import EXPORTERS, to_trl, write
from fastrl.data.prompts import blocks, read_template, template_names, template_text
from fastrl.data.rows import Picture, Row
from fastrl.types import ConfigError
from pictures import line_png


@pytest.fixture
def rows(tmp_path):
    """An image on disk, one in memory, two in one problem, and none."""
    (tmp_path / "a.png").write_bytes(line_png(1))
    return [
        Row(id="p1", problem="<image>Find x.", answer="3", images=(Picture(tmp_path / "a.png"),), source="s"),
        Row(
            id="p2",
            problem="Is <image> or <image>\nlarger?",
            answer="145°",
            images=(Picture(data=line_png(2)), Picture(data=line_png(3))),
            source="s",
        ),
        Row(id="p3", problem="1 + {{ 1 }}?", answer="2", source="s"),
    ]


def loaded(path):
    return datasets.load_dataset(
        "parquet", data_files={"train": str(path)}, cache_dir=str(path.parent / "cache")
    )["train"]


def assert_same_images(found, row):
    wanted = [Image.open(io.BytesIO(picture.read())) for picture in row.images]
    assert [image.convert("RGB").tobytes() for image in found] == [image.tobytes() for image in wanted]


def test_trl(rows, tmp_path):
    write(rows, "trl", tmp_path / "out.parquet", template=read_template("paper"), system="Be brief.")
    (tmp_path / "a.png").rename(tmp_path / "moved.png")
    found = [*loaded(tmp_path / "out.parquet")]  # the images are inside
    (tmp_path / "moved.png").rename(tmp_path / "a.png")
    assert list(found[0]) == ["id", "prompt", "answer", "source", "images"]
    for got, row in zip(found, rows, strict=True):
        assert (got["id"], got["answer"], got["source"]) == (row.id, row.answer, row.source)
        assert_same_images(got["images"], row)
        system, user = got["prompt"]
        assert system["content"] == [{"type": "text", "text": "Be brief."}]
        assert [block["type"] for block in user["content"]].count("image") == len(row.images)
        assert "Write the whole line of thought between <thinking>" in user["content"][-1]["text"]
    assert found[1]["prompt"][1]["content"][:4] == [
        {"type": "text", "text": "Is "},
        {"type": "image", "text": None},
        {"type": "text", "text": " or "},
        {"type": "image", "text": None},
    ]


def test_trl_prepares_the_messages_as_its_own(rows, tmp_path):
    from trl.data_utils import is_conversational, prepare_multimodal_messages

    for got, row in zip(to_trl(rows), rows, strict=True):
        assert is_conversational(got)
        (user,) = prepare_multimodal_messages(got["prompt"], images=got["images"])
        inside = [part["image"] for part in user["content"] if part["type"] == "image"]
        assert_same_images(inside, row)


def test_without_images_contents_are_strings_and_there_is_no_column(rows):
    found = to_trl([rows[2]], system="Be brief.")
    assert "images" not in found.column_names, "trainers take that column for a vision model"
    assert found[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + {{ 1 }}?"},
    ]


def test_verl(rows, tmp_path):
    write(rows, "verl", tmp_path / "out.parquet", template=read_template("accuracy"), split="test")
    found = loaded(tmp_path / "out.parquet")
    for index, (got, row) in enumerate(zip(found, rows, strict=True)):
        assert got["data_source"] == row.source
        assert got["reward_model"] == {"style": "rule", "ground_truth": row.answer}
        assert got["extra_info"] == {
            "split": "test", "index": index, "id": row.id, "question": row.problem, "answer": row.answer,
        }  # fmt: skip
        (user,) = got["prompt"]
        assert user["content"].count("<image>") == len(row.images) == len(got["images"])
        assert user["content"].startswith(row.problem)
        assert_same_images(got["images"], row)


def test_easyr1(rows, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    write(rows, "easyr1", folder / "train.parquet")
    # EasyR1 looks at the suffix of the first file of a folder, and loads the folder.
    found = datasets.load_dataset(
        "parquet", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache")
    )
    for got, row in zip(found, rows, strict=True):
        assert (got["id"], got["problem"], got["answer"]) == (row.id, row.problem, row.answer)
        assert_same_images(got["images"], row)


def test_templates():
    assert template_names() == ["accuracy", "easyr1_math", "paper", "r1v"]
    for name in template_names():
        assert template_text(name).startswith("{{ content | trim }}")
        text = read_template(name)(" Find {{ x }} <b>& {% y %}. ")
        assert text.startswith("Find {{ x }} <b>& {% y %}.\n"), "a problem is never a template"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no problem in it", "leaves out the problem"),
        ("{{ content }} {{ other }}", "'other' is undefined"),
        ("{{ content", "Only {{ content }}"),
        ("{{ content.__class__.__mro__ }}{{ content }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_work(tmp_path, text, message):
    file = tmp_path / "mine.jinja"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message.replace("{", r"\{")):
        read_template(str(file))


def test_an_unknown_template_is_named():
    with pytest.raises(ConfigError, match=r"'papers' is neither the path.*Did you mean"):
        read_template("papers")


def test_blocks_keep_the_order_of_text_and_images():
    assert blocks("<image>Find x.") == [{"type": "image"}, {"type": "text", "text": "Find x."}]
    assert blocks("plain") == [{"type": "text", "text": "plain"}]
    assert [block["type"] for block in blocks("<image><image>\n?")] == ["image", "image", "text"]


@pytest.fixture
def own_file(tmp_path):
    rows = [{"question": f"{i} + {i}?", "gold": str(2 * i)} for i in range(3)]
    rows.append({"question": "?", "gold": ""})
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


COLUMNS = ["--columns", "problem=question", "answer=gold"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["fastrl", "data", *map(str, arguments)])
    return main()


@pytest.mark.parametrize("to", EXPORTERS)
def test_the_command_checks_and_writes(monkeypatch, capsys, own_file, tmp_path, to):
    arguments = ("file", "--source", own_file, *COLUMNS, "--to", to, "--out", tmp_path / to)
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert "3 of 4 rows are good" in captured.err
    assert "mine-00003: no answer to grade by" in captured.err
    assert not (tmp_path / to).exists(), "nothing is written of a data set with faults"
    with pytest.warns(UserWarning, match="Rows left out"):
        assert run(monkeypatch, *arguments, "--keep-good") == 0
    assert f"train: written to {tmp_path / to / 'train.parquet'}" in capsys.readouterr().out
    assert len(loaded(tmp_path / to / "train.parquet")) == 3


def test_the_command_only_checks(monkeypatch, capsys, own_file):
    arguments = ("file", "--source", own_file, *COLUMNS, "--check")
    assert run(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert "train: 3 of 4 rows are good\nanswer empty: 1" in captured.out
    assert "1 rows have faults" in captured.err
    assert run(monkeypatch, *arguments, "--keep-good") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("file", "--source", "x.jsonl"), "either --check, or --to with --out"),
        (("file", "--source", "x.jsonl", "--to", "trl"), "--to and --out belong together"),
        (("file", "--source", "x.jsonl", "--check", "--columns", "problem"), "write ours=theirs"),
        (("math", "--to", "easyr1", "--out", "o", "--prompt", "paper"), "data.format_prompt"),
        (("maths", "--check"), "'maths' is unknown"),
    ],
)
def test_the_command_says_what_is_wrong(monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
