"""A row for every input: tables of predictions, JSON lines, photographs by name, and files that cannot be read."""

from __future__ import annotations

import csv
import io
import json
import os
import resource

import numpy as np
import pytest
from PIL import Image

import usfan
from tiny_models import tiny_model
from usfan.data.decoding import decode
from usfan.data.sources import open_inputs
from usfan.errors import ConfigError, DataError
from usfan.metrics.partial_table import partial_table
from usfan.metrics.predictions import (
    COLUMNS,
    as_json,
    job_of,
    prediction_records,
    write_predictions,
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("lenet")


@pytest.fixture
def photos(tmp_path):
    """Nine pictures in two camera folders; the third, and the last two, cannot be read."""
    root = tmp_path / "DCIM"
    rng = np.random.default_rng(0)
    for i in range(9):
        folder = root / ("100CANON" if i < 5 else "101CANON")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"IMG_{i}.png"
        if i in (2, 7, 8):
            path.write_bytes(b"" if i == 2 else b"no picture")
        else:
            Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    return root


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_for_every_image_in_order(model, photos, tmp_path):
    out = tmp_path / "table.csv"
    data = open_inputs([str(photos)])
    assert write_predictions(out, model, data) == 6
    rows = rows_of(out)
    assert list(rows[0]) == list(COLUMNS)
    assert [row["path"] for row in rows] == data.paths
    assert [row["error"] for row in rows] == [
        "", "", "empty file", "", "", "", "", "not an image of a known format", "not an image of a known format",
    ]  # fmt: skip
    assert rows[2] == dict.fromkeys(COLUMNS, "") | {
        "path": data.paths[2],
        "error": "empty file",
    }
    expected = model.predict(data.paths[0])
    assert rows[0]["label"] == expected.names[0]
    assert float(rows[0]["weight"]) == pytest.approx(float(expected.weight), abs=1e-6)


def test_json_lines_say_the_same(model, photos, tmp_path):
    data = open_inputs([str(photos)])
    write_predictions(tmp_path / "table.csv", model, data)
    write_predictions(tmp_path / "table.jsonl", model, data, json_lines=True)
    rows = rows_of(tmp_path / "table.csv")
    records = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert records[2] == {"path": data.paths[2], "error": "empty file"}
    assert set(records[0]) == set(COLUMNS) - {"error"}
    assert [r.get("label", "") for r in records] == [row["label"] for row in rows]
    assert records[0]["unknown"] is False
    assert [json.loads(as_json(r)) for r in prediction_records(model, data)] == records


@pytest.mark.parametrize("json_lines", [False, True])
def test_abstaining_leaves_errors_alone(model, photos, tmp_path, json_lines):
    out = tmp_path / "table"
    write_predictions(out, model, open_inputs([str(photos)]), 0.5, json_lines=json_lines)
    rows = (
        [json.loads(line) for line in out.read_text().splitlines()]
        if json_lines
        else rows_of(out)
    )
    assert len(rows) == 9
    assert sum(bool(row["label"]) for row in rows if row.get("label")) == 3
    assert sum(bool(row.get("error")) for row in rows) == 3
    assert sum(int(row["abstained"]) for row in rows) == 3


def test_photographs_by_name(model, photos, tmp_path, monkeypatch):
    one = str(photos / "100CANON" / "IMG_0.png")
    data = open_inputs([one])
    assert [r["path"] for r in prediction_records(model, data)] == [one]
    gone = str(photos / "gone.jpg")
    lines = io.StringIO(f"{one}\n\n{photos / '100CANON' / 'IMG_1.png'}\n")
    monkeypatch.setattr("sys.stdin", lines)
    data = open_inputs([one, gone, str(photos / "101CANON"), "-"])
    records = list(prediction_records(model, data))
    assert [os.path.basename(r["path"]) for r in records] == [
        "IMG_0.png", "gone.jpg", "IMG_5.png", "IMG_6.png", "IMG_7.png", "IMG_8.png", "IMG_0.png", "IMG_1.png",
    ]  # fmt: skip
    assert [r["error"] for r in records][:2] == [None, "file is missing"]
    (photos / "list.csv").write_text("path,label\n100CANON/IMG_0.png,mug\n")
    assert len(open_inputs([str(photos / "list.csv")])) == 1


def test_inputs_that_are_not_there(photos, monkeypatch):
    with pytest.raises(DataError, match=r"no such image: .*gone\.jpg"):
        open_inputs([str(photos / "gone.jpg")])
    with pytest.raises(DataError, match="no such folder, image or list file"):
        open_inputs([str(photos / "gone")])
    with pytest.raises(DataError, match=r"no such image: .*, "):
        open_inputs([str(photos / "gone.jpg"), str(photos / "too.jpg")])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(DataError, match="no image was given"):
        open_inputs(["-"])
    with pytest.raises(DataError, match="leaves the root"):
        open_inputs(
            [str(photos / "100CANON/IMG_0.png"), str(photos / "101CANON/IMG_5.png")],
            root=str(photos / "100CANON"),
        )


def test_nothing_readable_is_an_error_without_a_table(model, photos, tmp_path):
    with pytest.raises(DataError, match=r"IMG_2\.png \(empty file\)"):
        write_predictions(
            tmp_path / "table.csv", model, open_inputs([str(photos / "100CANON" / "IMG_2.png")])
        )
    assert not (tmp_path / "table.csv").exists()


def test_a_file_name_that_is_not_utf8(model, photos, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    name = os.path.join(os.fsencode(folder), b"caf\xe9.png")
    with open(photos / "100CANON" / "IMG_0.png", "rb") as good, open(name, "wb") as odd:
        odd.write(good.read())
    assert write_predictions(tmp_path / "table.csv", model, usfan.ImageData(folder)) == 1
    assert rows_of(tmp_path / "table.csv")[0]["path"].endswith("caf\\xe9.png")
    write_predictions(tmp_path / "table.jsonl", model, usfan.ImageData(folder), json_lines=True)
    record = json.loads((tmp_path / "table.jsonl").read_text())
    assert os.fsencode(record["path"]) == name


def test_a_photograph_of_108_megapixels(model, tmp_path):
    Image.linear_gradient("L").resize((12_000, 9_000), Image.Resampling.NEAREST).save(
        tmp_path / "large.jpg"
    )
    small = Image.linear_gradient("L").resize((1200, 900), Image.Resampling.NEAREST)
    (record,) = prediction_records(model, open_inputs([str(tmp_path / "large.jpg")]))
    assert record["error"] is None
    assert record["confidence"] == pytest.approx(
        float(model.predict(small).probs.max()), abs=0.01
    )


def test_only_plain_jpegs_are_decoded_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "MAX_PIXELS", 2000)
    picture = Image.linear_gradient("L").resize((80, 60)).convert("RGB")
    picture.save(tmp_path / "a.jpg")
    picture.save(tmp_path / "b.jpg", progressive=True)
    picture.save(tmp_path / "c.png")
    assert decode.decode_file(str(tmp_path / "a.jpg")).size == (40, 30)
    for name in ("b.jpg", "c.png"):
        with pytest.raises(decode.UnreadableImage, match="too large"):
            decode.decode_file(str(tmp_path / name))
    monkeypatch.setattr(decode, "MAX_PIXELS", 1000)
    with pytest.raises(decode.UnreadableImage, match="too large: 40x30"):
        decode.decode_file(str(tmp_path / "a.jpg"))


def test_an_interrupted_table_is_continued(model, tmp_path):
    """Killed after 100 images, and in the middle of a line: every image has one row, with the same figures."""
    rng = np.random.default_rng(1)
    for i in range(150):
        path = tmp_path / "photos" / f"{i:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    (tmp_path / "photos" / "070.png").write_bytes(b"no picture")
    photos = str(tmp_path / "photos")
    whole = tmp_path / "whole.csv"
    write_predictions(whole, model, open_inputs([photos]))
    out = tmp_path / "table.csv"
    part = tmp_path / "table.csv.part"

    def kill(count):
        kill.seen += count
        if kill.seen == 140:
            raise KeyboardInterrupt

    kill.seen = 0
    with pytest.raises(KeyboardInterrupt):
        write_predictions(out, model, open_inputs([photos]), progress=kill)
    assert not out.exists()
    with open(part, "ab") as file:
        file.write(b'{"path": "cut o')
    passed = []
    data = open_inputs([photos])
    write_predictions(out, model, data, progress=passed.append, resume=True)
    assert out.read_bytes() == whole.read_bytes()
    assert sum(passed) == 150
    assert not part.exists()

    kill.seen = 0
    with pytest.raises(KeyboardInterrupt):
        write_predictions(out, model, open_inputs([photos]), progress=kill)
    with pytest.raises(ConfigError, match="other images"):
        write_predictions(out, model, data.subset(range(149)), resume=True)
    with pytest.raises(ConfigError, match="another model"):
        write_predictions(out, tiny_model("dtn"), data, resume=True)


@pytest.fixture(scope="module")
def rows_of_a_part(model):
    """200 images in memory, their records, and the first line of the table's part."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 28, 28, 3), dtype=np.uint8)
    data = usfan.ImageData(pixels)
    lines = [json.dumps(record) for record in prediction_records(model, data)]
    return data, json.dumps({"job": job_of(model, data, None)}), lines


def changed(line, **fields):
    return json.dumps(json.loads(line) | fields)


STRANGE_LINES = {
    "no table": lambda line: "3",
    "a list": lambda line: "[]",
    "no figures": lambda line: "{}",
    "another image": lambda line: changed(line, path="array[7]"),
    "a table as a label": lambda line: changed(line, label={"a": 1}),
    "a text as a figure": lambda line: changed(line, confidence="=1+1"),
    "no error": lambda line: changed(line, error=3),
    "one field more": lambda line: changed(line, more=3),
    "nested": lambda line: "[" * 50_000,
    "many digits": lambda line: changed(line).replace("0.", "9" * 5000 + "."),
    "long": lambda line: changed(line, label="x" * (1 << 20)),
    "no end": lambda line: line[:-1],
}


@pytest.mark.parametrize("kind", STRANGE_LINES)
@pytest.mark.parametrize("row", [3, 127])
def test_a_part_that_somebody_changed(kind, row, rows_of_a_part, model, tmp_path):
    """What cannot be a record of its image counts as damaged: the batch is computed again."""
    data, header, lines = rows_of_a_part
    write_predictions(tmp_path / "whole.csv", model, data)
    strange = [*lines[:row], STRANGE_LINES[kind](lines[row]), *lines[row + 1 : 128]]
    (tmp_path / "table.csv.part").write_text("\n".join([header, *strange]) + "\n")
    write_predictions(tmp_path / "table.csv", model, data, resume=True)
    assert (tmp_path / "table.csv").read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_part_that_ends_within_a_line_or_has_too_many(
    ending, rows_of_a_part, model, tmp_path
):
    data, header, lines = rows_of_a_part
    write_predictions(tmp_path / "whole.csv", model, data)
    for rows in (lines[:64], lines * 3):
        (tmp_path / "table.csv.part").write_text("\n".join([header, *rows]) + ending)
        write_predictions(tmp_path / "table.csv", model, data, resume=True)
        assert (tmp_path / "table.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_large_jpegs_are_decoded_at_a_part_of_their_size(tmp_path):
    picture = Image.linear_gradient("L").resize((800, 600)).convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6
    for name in ("a.jpg", "b.png"):
        picture.save(tmp_path / name, exif=turned)
    jpeg = decode.decode_file(str(tmp_path / "a.jpg"), 3, 64)
    whole = decode.decode_file(str(tmp_path / "b.png"), 3, 64)
    assert jpeg.size == (300, 400)
    assert whole.size == (600, 800)
    assert decode.decode_file(str(tmp_path / "a.jpg"), 3, 200).size == (600, 800)
    small, exact = (np.asarray(decode.squared(image, 64), float) for image in (jpeg, whole))
    assert abs(small - exact).mean() < 1


def test_a_full_disk_names_the_table(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "table.csv"

    def write_rows() -> None:
        with partial_table(out, "job", lambda *_: True, resume=False) as part:
            for number in range(1_000):
                part.append({"path": f"{number:0100}"})

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        with pytest.raises(OSError, match="File too large") as caught:
            write_rows()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == f"{out}.part"
