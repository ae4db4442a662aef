"""WebDataset shards: pictures and classes in tar files, which may be a stranger's."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import usfan
from small_runs import TINY, adapt_tiny, class_folder, train_tiny
from small_runs import usfan as command
from tiny_models import tiny_model
from usfan.adaptation.verdict import Verdict
from usfan.data import shards
from usfan.data.stream import stream
from usfan.errors import DataError


def png(number: int, side: int = 12) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def pairs(numbers: range, words: list[str]) -> dict[str, bytes]:
    files = {}
    for number in numbers:
        files[f"{number:06}.png"] = png(number)
        files[f"{number:06}.cls"] = f"{words[number % len(words)]}\n".encode()
    return files


@pytest.fixture
def folder(tmp_path):
    """Two shards of three images each, in different forms of tar."""
    root = tmp_path / "shards"
    root.mkdir()
    words = ["mug", "pen", "cup"]
    write_tar(root / "a-000000.tar", pairs(range(3), words))
    write_tar(root / "a-000001.tar", pairs(range(3, 6), words), tarfile.GNU_FORMAT)
    (root / "README.md").write_text("two shards")
    return root


def test_a_folder_a_shard_and_a_list_of_shards(folder):
    data = usfan.ImageData(folder)
    assert data.classes == ("cup", "mug", "pen")
    assert [data.classes[label] for label in data.labels] == ["mug", "pen", "cup"] * 2
    for i in range(6):
        expected = np.asarray(Image.open(io.BytesIO(png(i)))).transpose(2, 0, 1)
        assert (data.load(i).numpy() == expected).all()
    assert data.where(4).endswith("a-000001.tar:000004.png")
    assert len(usfan.ImageData(folder / "a-000000.tar")) == 3
    paths = sorted(folder.glob("*.tar"))
    assert len(usfan.ImageData(paths[::-1])) == 6
    assert usfan.ImageData(paths[::-1]).load(0).equal(data.load(3))
    assert usfan.ImageData(folder, unlabelled=True).labels is None


def test_numbered_classes_and_files_that_are_no_pictures(tmp_path):
    files = {
        "b/x.JPG": png(0),
        "b/x.cls": b"11",
        "b/x.json": b"{}",
        "b/x.mask.png": b"no picture",
        "b/y.cls": b"2",
        "b/z.png": png(1),
        "b/z.CLS": b"0",
    }
    data = usfan.ImageData(write_tar(tmp_path / "x.tar", files))
    assert len(data) == 2
    assert [data.classes[label] for label in data.labels] == ["11", "0"]


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_are_decoded_where_files_are(folder, workers):
    """By the decoding processes too; a picture that is damaged is left out and named."""
    files = pairs(range(6, 8), ["mug"])
    files["000006.png"] = files["000006.png"][:60]
    write_tar(folder / "a-000002.tar", files)
    data = usfan.ImageData(folder)
    (batch,) = stream(data, size=12, workers=workers)
    assert batch[0].tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert (batch[1][1] == data.load(1)).all()
    ((where, reason),) = data.unreadable.items()
    assert where.endswith("a-000002.tar:000006.png")
    assert reason in ("truncated", "damaged", "not an image of a known format")


def test_the_fingerprint_is_that_of_the_pictures(folder):
    before = usfan.ImageData(folder).fingerprint()
    assert usfan.ImageData(folder).fingerprint() == before
    assert usfan.ImageData(folder).subset([0, 1]).fingerprint() != before
    write_tar(folder / "a-000001.tar", pairs(range(13, 16), ["mug"]))
    assert usfan.ImageData(folder).fingerprint() != before


def test_predict_reads_shards(folder, tmp_path, refused):
    model = tiny_model("lenet").save(tmp_path / "model")
    assert command("predict", model, folder, "--out", tmp_path / "table.csv", *TINY) == 0
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"].rpartition(":")[2] for row in rows] == [f"{i:06}.png" for i in range(6)]
    shard = folder / "a-000000.tar"
    line = refused("predict", model, shard, folder, "--out", tmp_path / "t.csv", *TINY)
    assert "they go alone" in line


def test_train_adapt_and_report_on_shards(tmp_path):
    files = {}
    for number, path in enumerate(sorted(class_folder(tmp_path / "data").rglob("*.png"))):
        files[f"{number}.png"] = path.read_bytes()
        files[f"{number}.cls"] = path.parent.name.encode()
    shard = write_tar(tmp_path / "all.tar", files)
    source = train_tiny(shard, tmp_path / "source")
    assert usfan.SourceModel.load(source).classes == ("class-0", "class-1", "class-2")
    run = adapt_tiny(source, shard, tmp_path / "run", "--guard", "off")
    metrics = json.loads((run / "metrics.json").read_text())
    assert 0 <= metrics["after"]["accuracy"] <= 100
    with open(run / "changes.csv", newline="") as file:
        assert all(row["path"].startswith(f"{shard}:") for row in csv.DictReader(file))
    assert command("report", run) == 0
    assert "usfan label" not in (run / "report.html").read_text()


def test_a_run_on_shards_does_not_send_its_user_to_the_label_page(
    tmp_path, monkeypatch, capsys, refused
):
    """The page has no pictures of it."""
    verdict = Verdict("unknown", "Nobody can tell.", "label 9 images: usfan label RUN")
    monkeypatch.setattr("usfan.adaptation.run.verdict_of", lambda *_, **__: verdict)
    folder = class_folder(tmp_path / "data")
    source = train_tiny(folder, tmp_path / "source")
    adapt_tiny(source, folder, tmp_path / "files")
    assert "Label 9 images: usfan label" in capsys.readouterr().err
    files = {path.name: path.read_bytes() for path in folder.glob("*/*.png")}
    shard = write_tar(tmp_path / "all.tar", files)
    adapt_tiny(source, shard, tmp_path / "shards")
    assert "usfan label" not in capsys.readouterr().err
    metrics = json.loads((tmp_path / "shards" / "metrics.json").read_text())
    assert metrics["verdict"] == {**asdict(verdict), "next": ""}
    assert "shards" in refused("label", tmp_path / "shards", "--no-browser")


def reason(path: Path) -> str:
    with pytest.raises(DataError) as raised:
        usfan.ImageData(path)
    return str(raised.value)


def test_names_in_a_shard_lead_nowhere(tmp_path):
    """Links and devices are no files, and a name that points elsewhere is only a name."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(9))
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"{kind!r}.png")
            member.type = kind
            member.linkname = str(secret)
            archive.addfile(member)
    assert "no pictures in" in reason(tmp_path / "x.tar")
    inside = write_tar(tmp_path / "y.tar", {"../../secret.png": png(1), f"{secret}": png(2)})
    data = usfan.ImageData(inside)
    assert data.load(0).equal(usfan.ImageData([png_array(1)]).load(0))
    assert data.load(1).equal(usfan.ImageData([png_array(2)]).load(0))
    with pytest.raises(DataError, match="leaves the root"):
        usfan.ImageData(inside, root=tmp_path / "elsewhere")


def png_array(number: int) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png(number))))


def test_damaged_and_hostile_shards(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "x.tar", pairs(range(2), ["a"]))
    whole = path.read_bytes()
    path.write_bytes(whole[: 512 + 100])  # the first picture is cut off
    assert "is damaged, packed, or no tar file" in reason(path)
    middle = bytearray(whole)
    middle[whole.index(b"000001.png")] ^= 1
    path.write_bytes(middle)
    assert "a header in it is damaged" in reason(path)
    path.write_bytes(b"no shard at all")
    assert "is damaged, packed, or no tar file" in reason(path)
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as archive:
        archive.add(tmp_path / "x.tar", "a.png")
    assert "packed" in reason(tmp_path / "packed.tar")
    header = tarfile.TarInfo("a.png")
    header.size = 1 << 40
    path.write_bytes(header.tobuf() + bytes(1024))
    assert "outside of it" in reason(path)
    header = tarfile.TarInfo("long")
    header.type = tarfile.XHDTYPE  # it claims a name of 32 MiB
    header.size = 1 << 25
    path.write_bytes(header.tobuf() + bytes(1 << 25))
    assert "a header is too large" in reason(path)
    for blocks in (1, 8):
        path.write_bytes(backwards(blocks))
        assert "has a negative size" in reason(path)
    write_tar(path, {f"{i}.png": b"" for i in range(5)})
    monkeypatch.setattr(shards, "MOST_FILES", 4)
    assert "over the limit of 4" in reason(path)


def backwards(blocks: int) -> bytes:
    """A header whose size is negative: the next file would be this one again, or lie before it."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf())
    header[124:136] = (-512 * blocks).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header) + bytes(1024)


def test_samples_that_contradict_each_other(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, {"a.png": png(0), "a.jpg": png(1)})
    assert "x.tar:a.jpg: a second picture of one sample" in reason(path)
    write_tar(path, {"a.png": png(0), "a.cls": b"x", "b.png": png(1)})
    assert "x.tar:b.png: no label, but others have one" in reason(path)
    write_tar(path, {"a.png": png(0), "a.cls": b"\xff\xfe"})
    assert "expected a class, one number or name" in reason(path)
    write_tar(path, {"a.png": png(0), "a.cls": b"x" * 5000})
    assert "a class of 5000 bytes" in reason(path)
