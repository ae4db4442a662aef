"""Files that are no images: every command names them, counts them and goes on; with --strict it ends with one line."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from lookalikes import picture
from small_runs import TINY, class_folder, train_tiny, usfan
from usfan.labelling.questions import open_board

BROKEN = {
    "class-0/001.png": b"",
    "class-1/003.jpg": None,
    "class-2/notes.jpeg": b"no picture\n",
}
"""Name → content; None: a JPEG that is cut short."""
COMMANDS = ("train", "posterior", "adapt", "evaluate", "predict")
SMALL = ("--epochs", 1, "--batch-size", 8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "whole")


@pytest.fixture(scope="module")
def model(whole, tmp_path_factory):
    return train_tiny(whole, tmp_path_factory.mktemp("model") / "source")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """24 images in three classes; one is made empty, two broken ones are added."""
    root = class_folder(tmp_path_factory.mktemp("data") / "broken")
    for name, content in BROKEN.items():
        if content is None:
            Image.fromarray(picture(1, 0, 99)).convert("RGB").resize((90, 90)).save(root / name)
            content = (root / name).read_bytes()[:-400]
        (root / name).write_bytes(content)
    return root


def arguments(command: str, model: Path, data: Path, out: Path) -> tuple:
    before = {
        "train": (data, "--backbone", "digits-cnn", *SMALL),
        "adapt": (model, data, *SMALL),
    }
    return (command, *before.get(command, (model, data)), "--out", out, *TINY)


@pytest.mark.parametrize("command", COMMANDS)
def test_broken_images_are_named_counted_and_left_out(command, model, broken, tmp_path, capsys):
    out = tmp_path / ("table.csv" if command == "predict" else "run")
    assert usfan(*arguments(command, model, broken, out)) == 0
    said = capsys.readouterr().err.splitlines()
    for name in BROKEN:
        assert sum(str(broken / name) in line for line in said) == 1, said
    assert "skipped 3 unreadable files of 26 images" in said
    if command == "predict":
        with open(out, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        lost = {row["path"]: row["error"] for row in rows if not row["label"]}
        assert (len(rows), set(lost)) == (26, {str(broken / name) for name in BROKEN})
        assert lost[str(broken / "class-1/003.jpg")] == "truncated"
        assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
        return
    metrics = json.loads((out / "metrics.json").read_text())
    if command in ("posterior", "evaluate"):
        assert metrics["count"] == 23
    if command != "evaluate":
        assert metrics["skipped"] == 3
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    (skipped,) = [event for event in events if event["event"] == "skipped"]
    assert skipped["count"] == 3
    assert skipped["files"] == {
        "class-0/001.png": "empty file",
        "class-1/003.jpg": "truncated",
        "class-2/notes.jpeg": "not an image of a known format",
    }


def less_common(command: str, **values: object) -> list[object]:
    """As flags, or by --set if the command has none for them."""
    words: list[object] = []
    for name, value in values.items():
        if command == "adapt" and name != "strict":
            words += ["--set", f"{name}={value}"]
        else:
            words += [f"--{name}"] if value == "on" else [f"--{name}", value]
    return words


@pytest.mark.parametrize("command", COMMANDS)
def test_strict_makes_them_an_error(command, model, broken, tmp_path, capsys):
    assert (
        usfan(
            *arguments(command, model, broken, tmp_path / "out"),
            *less_common(command, strict="on"),
        )
        == 2
    )
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"cannot read {broken / 'class-0/001.png'}: empty file" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "posterior", "adapt"])
def test_a_kept_cache_names_them_again(command, model, broken, tmp_path, capsys):
    for run in ("first", "second"):
        call = arguments(command, model, broken, tmp_path / run)
        assert usfan(*call, *less_common(command, cache=tmp_path / "cache")) == 0
        assert str(broken / "class-1/003.jpg") in capsys.readouterr().err
    flags = less_common(command, cache=tmp_path / "cache", strict="on")
    assert usfan(*arguments(command, model, broken, tmp_path / "third"), *flags) == 2


def test_a_private_run_writes_no_file_name(model, broken, tmp_path, capsys):
    for command in ("train", "posterior", "adapt"):
        assert usfan(*arguments(command, model, broken, tmp_path / command), "--private") == 0
        assert str(broken / "class-1/003.jpg") in capsys.readouterr().err
        for file in (tmp_path / command).iterdir():
            assert b"003.jpg" not in file.read_bytes(), file


def test_labels_of_broken_images_are_left_out_of_the_answers(model, broken, tmp_path):
    """The page of `usfan label` opens on such a run, and asks for no image that has an answer."""
    names = ["class-0/000.png", *BROKEN]
    rows = [f"{broken / name},{name[:7]},judge" for name in names]
    (tmp_path / "answers.csv").write_text("\n".join(["path,label,question", *rows]))
    out = tmp_path / "run"
    labels = ("--labels", tmp_path / "answers.csv")
    assert usfan(*arguments("adapt", model, broken, out), *labels) == 0
    answered = {question.image for question in open_board(out).answers}
    assert answered == {str(broken / "class-0/000.png")}
    with open(out / "label_first.csv", newline="", encoding="utf-8") as file:
        assert not answered & {row["path"] for row in csv.DictReader(file)}
