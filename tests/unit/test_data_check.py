"""Two hundred broken rows: each is reported with its id and the reason, and nothing else is."""

import io
import json
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from fastrl.data.check import Report, TokenLimit, checked, examine, faults_of
from fastrl.data.prompts import image_tokens, token_count
from fastrl.data.readers import load
from fastrl.data.rows import Picture, Row
from fastrl.types import ConfigError


def image(size=(40, 30), mode="RGB"):
    picture = Image.new("L", size, 255)
    ImageDraw.Draw(picture).line((0, 0, *size), fill=0, width=2)
    return picture.convert(mode)


def encoded(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


GOOD = encoded(image())
CMYK = encoded(image(mode="CMYK"), "TIFF")
ANIMATED = encoded(image(), "GIF", save_all=True, append_images=[image((40, 30)).rotate(90)])
WIDE = encoded(Image.new("1", (30_000, 3_000)))


def noisy_png():
    """A picture that does not compress away, so that any cut loses pixels."""
    return encoded(Image.effect_noise((64, 64), 80))


NOISY = noisy_png()


def row(number, *, problem="<image>Find x.", answer="3", data=GOOD, **changes):
    return Row(
        **{
            "id": f"p{number}",
            "problem": problem,
            "answer": answer,
            "images": (Picture(data=data),),
            "source": "t",
        }
        | changes
    )


def broken_rows():
    """(row, kind of its fault): two hundred, of every way to be broken."""
    made = []

    def add(kind, number, make):
        made.extend([(make(len(made) + i, i), kind) for i in range(number)])

    add("image unreadable", 25, lambda n, i: row(n, data=NOISY[: 40 + i * (len(NOISY) - 200) // 24]))
    add("image unreadable", 10, lambda n, i: row(n, data=bytes([i]) * 100))
    add(
        "image unreadable",
        5,
        lambda n, i: row(n, data=b"<svg xmlns='http://www.w3.org/2000/svg'/>" + b" " * i),
    )
    add("image empty", 5, lambda n, i: row(n, data=b""))
    add("image mode", 5, lambda n, i: row(n, data=CMYK))
    add("image mode", 5, lambda n, i: row(n, data=encoded(image((40 + i, 30), "CMYK"), "JPEG")))
    add("image animated", 5, lambda n, i: row(n, data=ANIMATED))
    add("image too small", 10, lambda n, i: row(n, data=encoded(Image.effect_noise((1, 1 + i), 50))))
    add("image too large", 5, lambda n, i: row(n, data=WIDE))
    add("image blank", 10, lambda n, i: row(n, data=encoded(Image.new("RGB", (30, 30 + i), (i, 0, 0)))))
    add("image missing", 10, lambda n, i: row(n, images=(Picture(path=Path(f"/nowhere/{i}.png")),)))
    add("image missing", 5, lambda n, i: row(n, images=(Picture(path=Path("/")),)))
    add("image marks", 10, lambda n, i: row(n, problem="Find x" + "<image>" * (i + 2)))
    add("image marks", 5, lambda n, i: row(n, problem="<image>Find x", images=()))
    add("image marks", 5, lambda n, i: row(n, images=(Picture(data=GOOD),) * (i + 2)))
    add("problem empty", 10, lambda n, i: row(n, problem="<image>" + " \n" * i))
    add("answer empty", 10, lambda n, i: row(n, answer=" " * i))
    add("answer no choice", 15, lambda n, i: row(n, answer="5", choices=(str(10 + i), "20", "30", "40")))
    add("answer unreadable", 10, lambda n, i: row(n, answer="\\frac{" * (i + 1)))
    add("id missing", 10, lambda n, i: row(n, id=" " * i))
    add("text not UTF-8", 10, lambda n, i: row(n, problem=f"<image>Gr\udcf6\udcdfe {i}"))
    add("text not UTF-8", 5, lambda n, i: row(n, answer=f"{i}\udcff"))
    add("id twice", 10, lambda n, i: row(0, id="p0"))
    return made


def test_every_broken_row_is_reported_with_its_id_and_reason():
    made = broken_rows()
    assert len(made) == 200
    for bad, kind in made:
        if kind == "id twice":
            continue
        faults = faults_of(bad)
        assert [fault.kind for fault in faults][:1] == [kind], (bad, faults)
        for fault in faults:
            assert fault.reason.strip(), bad


def test_totals_and_the_first_ten_of_each_kind():
    made = broken_rows()
    wanted = {}
    for _, kind in made:
        wanted[kind] = wanted.get(kind, 0) + 1
    report = Report()
    good = [r for r, is_good in examine([row(1000), *(r for r, _ in made), row(1001)], report) if is_good]
    assert [r.id for r in good] == ["p1000", "p1001"]
    assert (report.num_rows, report.num_good) == (202, 2)
    # One of the smallest images has one colour too, and an answer that is no UTF-8 cannot be read either.
    assert report.counts == wanted | {"image blank": 11, "answer unreadable": 15}
    for kind, count in report.counts.items():
        assert len(report.examples[kind]) == min(10, count)
        assert all(": " in line for line in report.examples[kind])
    text = str(report)
    assert text.startswith("2 of 202 rows are good")
    assert "image unreadable: 40\n  p0: " in text
    assert "... and 30 more" in text
    assert "30000 x 3000 pixels; 64,000,000 are the most" in text


def test_good_rows_of_every_usual_kind_pass():
    kinds = [
        encoded(image(mode=mode), kind)
        for mode, kind in [
            ("L", "PNG"),
            ("RGBA", "PNG"),
            ("P", "PNG"),
            ("RGB", "JPEG"),
            ("1", "PNG"),
            ("RGB", "WEBP"),
        ]
    ]
    answers = ["3", "2 \\sqrt { 3 }", "A", "145°", "\\frac{1}{2}", "6.5", "30 \\pi", "x=4", "$12$"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in kinds:
            assert faults_of(row(1, data=data)) == []
        for answer in answers:
            assert faults_of(row(1, answer=answer)) == []
    assert faults_of(row(1, answer="2", choices=("1", "2", "3", "4"))) == []
    assert faults_of(row(1, problem="no image", images=())) == []


def test_bad_rows_stop_unless_good_ones_are_kept():
    rows = [row(1), row(2, answer=""), row(3)]
    with pytest.raises(ConfigError, match=r"(?s)2 of 3 rows are good.*p2: no answer.*--keep-good"):
        checked(rows)
    with pytest.warns(UserWarning, match="Rows left out. 2 of 3"):
        assert [r.id for r in checked(rows, keep_good=True)] == ["p1", "p3"]
    assert [r.id for r in checked(rows, limit=1)] == ["p1"], "what follows is not asked for"
    with pytest.raises(ConfigError, match="No row is left"):
        checked([row(2, answer="")], keep_good=True)
    with pytest.raises(ConfigError, match="No row is left"):
        checked([])


def test_broken_files_name_line_and_reason(tmp_path):
    lines = [
        json.dumps({"problem": "1+1", "answer": "2"}).encode(),
        b"{not json",
        b"[1, 2]",
        b"",
        '{"problem": "Größe", "answer": "1"}'.encode("latin-1"),
        b'{"problem": {"a": 1}, "answer": "2"}',
        b'{"problem": "p", "answer": true}',
        b'{"problem": "p", "answer": "2", "images": [7]}',
        b"[" * 100_000,
    ]
    (tmp_path / "mine.jsonl").write_bytes(b"\n".join(lines))
    report = Report()
    for _ in examine(load("file", str(tmp_path / "mine.jsonl")), report):
        pass
    assert report.counts == {"row unreadable": 6, "text not UTF-8": 1}
    text = str(report)
    assert "mine.jsonl, line 2: not JSON" in text
    assert "line 3: list instead of {...}" in text
    assert "mine-00003: problem: " in text
    (tmp_path / "mine.csv").write_text('problem,answer\n1+1,2\n"a",b,c\nx\n', encoding="utf-8")
    report = Report()
    assert [good for _, good in examine(load("file", str(tmp_path / "mine.csv")), report)] == [
        True,
        False,
        False,
    ]
    assert "line 3: another number of cells than of columns" in str(report)


def test_a_parquet_column_with_bytes_that_are_no_text(tmp_path):
    strings = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
    table = pa.table({"problem": strings, "answer": ["1", "2"]})
    pq.write_table(table, tmp_path / "mine.parquet")
    report = Report()
    assert [good for _, good in examine(load("file", str(tmp_path / "mine.parquet")), report)] == [
        True,
        False,
    ]
    assert report.counts == {"text not UTF-8": 1}


def test_broken_original_problems(tmp_path):
    good = {"id": 1, "annotat_text": "x", "choices": ["1", "2"], "answer": "B", "data_type": "train"}
    variants = {
        "1": (json.dumps(good), GOOD),
        "2": (json.dumps({**good, "id": 2, "answer": "E"}), GOOD),
        "3": ("{", GOOD),
        "4": (json.dumps({**good, "id": 4}), None),
        "5": (json.dumps({**good, "id": None}), GOOD),
        "6": (json.dumps({**good, "id": 1}), GOOD),
        "7": (json.dumps({**good, "id": 7}), NOISY[:200]),
        "8": ("[]", GOOD),
    }
    for name, (text, data) in variants.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.json").write_text(text, encoding="utf-8")
        if data is not None:
            (tmp_path / name / "img_diagram.png").write_bytes(data)
    report = Report()
    goods = [r.id for r, is_good in examine(load("geometry3k", str(tmp_path)), report) if is_good]
    assert goods == ["geometry3k-1"]
    assert report.counts == {
        "answer no choice": 1, "row unreadable": 2, "image missing": 1, "id missing": 1, "id twice": 1,
        "image unreadable": 1,
    }  # fmt: skip
    assert "geometry3k-3: data.json: " in str(report)


def test_image_tokens_by_qwens_rule():
    assert image_tokens(280, 140) == 50
    assert image_tokens(1, 1) == 1
    assert image_tokens(2800, 2800) == 10_000
    assert image_tokens(2800, 2800, max_pixels=1_003_520) <= 1_280
    limit = TokenLimit(max_tokens=49, count=token_count(), of="image tokens")
    (fault,) = faults_of(row(1, data=encoded(image((280, 140)))), limit)
    assert fault.kind == "prompt too long"
    assert fault.reason.startswith("50 image tokens, 49 fit")
    assert (
        faults_of(row(1, data=encoded(image((280, 140)))), TokenLimit(max_tokens=50, count=token_count()))
        == []
    )


def test_a_models_own_processor_counts_exactly():
    from fastrl.testbed import checkpoint_path
    from fastrl.testbed import load as load_model

    _, processor = load_model()
    size = (processor.image_processor.size["width"], processor.image_processor.size["height"])
    asked = row(1, data=encoded(image(size, "L")), problem="<image>Find x.")
    found = token_count(str(checkpoint_path()))(asked)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}],
        add_generation_prompt=True,
    )
    assert found == len(processor(text=[text], images=[image(size, "L")])["input_ids"][0])
