"""A user's mistakes on the command line: exit code 2, one clear line, and nothing left behind."""

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import usfan as package
from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan
from usfan.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    return train_tiny(folder, tmp_path_factory.mktemp("model") / "source")


def text_folder(root: Path) -> Path:
    (root / "texts").mkdir()
    (root / "texts" / "notes.txt").write_text("no picture")
    return root / "texts"


def list_with_a_missing_file(root: Path) -> Path:
    (root / "list.txt").write_text("nowhere/a.png 0\nnowhere/b.png 1\n")
    return root / "list.txt"


def empty_folder(root: Path) -> Path:
    (root / "empty").mkdir()
    return root / "empty"


def one_class(root: Path) -> Path:
    return class_folder(root / "one", classes=1)


def missing(root: Path) -> Path:
    return root / "missing"


def flat_folder(root: Path) -> Path:
    return class_folder(root / "flat", classes=1) / "class-0"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty_folder, "empty"),
        (text_folder, "no image"),
        (one_class, "class-0"),
        (list_with_a_missing_file, "nowhere/a.png"),
        (missing, "no such folder"),
        (flat_folder, "labels"),
    ],
)
def test_data_that_cannot_be_trained_on(refused, tmp_path, make, words):
    """K = 1, no images, no labels: one line, and the output folder is not there."""
    line = refused(
        "train", make(tmp_path), "--out", tmp_path / "run", "--backbone", "digits-cnn", *TINY
    )
    assert words in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["posterior", "adapt", "evaluate", "predict"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty_folder, "empty"),
        (text_folder, "no image"),
        (list_with_a_missing_file, "nowhere/a.png"),
        (missing, "no such folder"),
    ],
)
def test_data_that_no_command_can_use(refused, model, tmp_path, command, make, words):
    assert words in refused(command, model, make(tmp_path), "--out", tmp_path / "run", *TINY)
    assert not (tmp_path / "run").exists()


def test_a_class_whose_images_are_all_broken(refused, tmp_path):
    data = class_folder(tmp_path / "data")
    for file in (data / "class-1").iterdir():
        file.write_bytes(b"not a picture")
    line = refused("train", data, "--out", tmp_path / "run", "--backbone", "digits-cnn", *TINY)
    assert "class-1" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--backbone", "resnet5"), "did you mean"),
        (("--backbone", "digits-cnn", "--prior", "-1"), "prior must lie between"),
        (("--backbone", "digits-cnn", "--prior", "magic"), "evidence"),
        (("--backbone", "digits-cnn", "--epochs", "0"), "at least 1"),
        (("--backbone", "digits-cnn", "--lr", "nan"), "lr"),
        (("--backbone", "digits-cnn", "--seed", "-3"), "seed"),
        (("--backbone", "digits-cnn", "--pretrained", "nowhere.pth"), "nowhere.pth"),
        (("--backbone", "digits-cnn", "--device", "tpu"), "device"),
        (
            ("--backbone", "digits-cnn", "--epoch", "x"),
            "unknown option: --epoch. Did you mean --epochs?",
        ),
        (("--backbone", "digits-cnn", "--epochs", "2.5"), "whole number"),
        (("--backbone", "digits-cnn", "--epochs"), "argument --epochs: expected one argument"),
        (("--backbone", "digits-cnn", "--tune", "nrom"), "did you mean norm?"),
        (("--backbone", "digits-cnn", "--no-such-flag"), "--no-such-flag"),
        (("--backbone", "digits-cnn", "another"), "unexpected argument: 'another'"),
    ],
)
def test_bad_settings_of_train(refused, folder, tmp_path, flags, words):
    assert words in refused(
        "train", folder, "--out", tmp_path / "run", "--workers", "0", *flags
    )
    assert not (tmp_path / "run").exists()


def test_an_output_folder_with_another_run_or_other_files(refused, folder, model, tmp_path):
    before = (model / "model.safetensors").read_bytes()
    assert "already holds a run" in refused(
        "train", folder, "--out", model, "--backbone", "digits-cnn", *TINY
    )
    assert (model / "model.safetensors").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    assert "not empty" in refused(
        "train", folder, "--out", tmp_path / "mine", "--backbone", "digits-cnn", *TINY
    )
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    for command in ("posterior", "adapt", "evaluate"):
        assert "already holds a run" in refused(command, model, folder, "--out", model, *TINY)
    assert (model / "model.safetensors").read_bytes() == before
    assert "is a file" in refused(
        "adapt", model, folder, "--out", tmp_path / "mine" / "thesis.tex", *TINY
    )


def test_a_run_is_not_resumed_with_other_settings(refused, folder, model):
    flags = (
        "--out",
        model,
        "--backbone",
        "digits-cnn",
        "--epochs",
        9,
        "--batch-size",
        8,
        *TINY,
    )
    assert "epochs" in refused("train", folder, "--resume", *flags)


def test_classes_beyond_the_model(refused, model, tmp_path):
    more = class_folder(tmp_path / "more", classes=5)
    adapting = ("adapt", model, more, "--out", tmp_path / "run", "--setting", "closed")
    for command in (("evaluate", model, more), adapting):
        line = refused(*command, *TINY)
        assert "--open-set" in line
        assert "class-3" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("home", ["command line", "python", "python, several sources"])
def test_a_name_that_the_model_does_not_know_is_said_if_nobody_expects_new_classes(
    home, model, tmp_path, caplog
):
    data = class_folder(tmp_path / "data")
    (data / "class-1").rename(data / "klass-1")

    def adapt(*flags, **settings):
        caplog.clear()
        if home == "command line":
            adapt_tiny(model, data, tmp_path / f"run{len(flags)}", *flags)
        else:
            sources = model if home == "python" else [model, model]
            package.adapt(
                sources, data, epochs=1, batch_size=8, device="cpu", progress=False, **settings
            )
        return [
            record.getMessage() for record in caplog.records if "klass-1" in record.getMessage()
        ]

    said = "data: klass-1: not among the classes of the model; labels of these images count as new classes"
    flag = "--open-set" if home == "command line" else "open_set=True"
    assert adapt() == [f"{said} (check the names, or pass {flag})"]
    assert adapt("--open-set", setting="open") == []


def test_python_too_refuses_classes_that_the_user_said_are_not_there(model, tmp_path):
    """Before the work, as the command line does."""
    more = class_folder(tmp_path / "more", classes=5)
    with pytest.raises(DataError, match=r"2 classes .* the model does not know"):
        package.adapt(
            model, more, setting="closed", run=tmp_path / "run", device="cpu", progress=False
        )
    assert not (tmp_path / "run").exists()


def test_a_class_in_another_case(refused, model, tmp_path):
    data = class_folder(tmp_path / "data")
    (data / "class-1").rename(data / "Class-1")
    assert "1 class (Class-1) that the model does not know" in refused("evaluate", model, data)


@pytest.mark.parametrize("command", [("predict", "--out"), ("export", "--onnx")], ids=str)
def test_a_folder_where_a_file_is_written(refused, model, folder, tmp_path, command):
    name, flag = command
    data = [folder] if name == "predict" else []
    assert f"{tmp_path} is a folder: {flag}" in refused(name, model, *data, flag, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "pipe is no ordinary file" in refused(name, model, *data, flag, tmp_path / "pipe")
    assert f"{flag[2:]} must be a text" in refused(name, model, *data, flag, "")


def test_a_link_is_written_through(model, folder, tmp_path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "table.csv")
    assert usfan("predict", model, folder, "--out", tmp_path / "link.csv", *TINY) == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "table.csv").read_text().startswith("path,")


@pytest.mark.parametrize(
    "command",
    [
        ("train", "DATA", "--out", "FILE/run"),
        ("adapt", "MODEL", "DATA", "--out", "FILE/run"),
        ("predict", "MODEL", "DATA", "--out", "FILE/deep/table.csv"),
        ("export", "MODEL", "--onnx", "FILE/model.onnx"),
        ("report", "MODEL", "--out", "FILE/page.html"),
        ("demo", "--out", "FILE"),
        ("reproduce", "toy", "--out", "FILE/toy"),
    ],
    ids=lambda command: command[0],
)
def test_output_below_a_file(refused, model, folder, tmp_path, command):
    """Found before the work, for none of which there is time here."""
    (tmp_path / "notes.txt").write_text("mine")
    places = {"DATA": str(folder), "MODEL": str(model), "FILE": str(tmp_path / "notes.txt")}
    words = [
        re.sub("DATA|MODEL|FILE", lambda found: places[found[0]], word) for word in command
    ]
    assert "notes.txt is not a folder" in refused(*words)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_flags_that_a_command_does_not_have(refused, model, folder, tmp_path):
    assert "usfan evaluate: unknown option: --resume (see usfan evaluate --help)" in refused(
        "evaluate", model, folder, "--resume"
    )
    assert usfan("evaluate", model, folder, "--out", tmp_path / "run", *TINY) == 0
    assert "--resume" not in refused(
        "evaluate", model, folder, "--out", tmp_path / "run", *TINY
    )
    for command in (
        ("methods",),
        ("export", model, "--onnx", tmp_path / "m.onnx"),
        ("report", model),
    ):
        assert "device" in refused(*command, "--device", "tpu")
        assert "unknown option: --nodes" in refused(*command, "--nodes", "2")
        assert "unknown option: --workers" in refused(*command, "--workers", "2")
    assert "unknown option: --compile" in refused("evaluate", model, folder, "--compile", "off")
    assert "unknown command 'adpat': did you mean adapt?" in refused("adpat", model, folder)
    assert "unknown option '--no-such'" in refused("--no-such")
    assert "seed" in refused("evaluate", model, folder, "--seed", "-5")
    line = refused(
        "posterior", model, folder, "--out", tmp_path / "p", "--backbone", "resnet18", *TINY
    )
    assert "leave --backbone and --head out" in line
    assert "data must be a text" in refused("evaluate", model, "", *TINY)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_wrong_shaped_tensor(refused, model, folder, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    for name in ("config.json", "posterior.safetensors"):
        (bad / name).write_bytes((model / name).read_bytes())
    state = load_file(model / "model.safetensors")
    name = next(iter(state))
    save_file({**state, name: torch.zeros(3, 5)}, bad / "model.safetensors")
    line = refused("predict", bad, folder, "--out", tmp_path / "table.csv", *TINY)
    assert "model.safetensors" in line
    assert name in line
    assert not (tmp_path / "table.csv").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--method", "dann"), "u-sfan"),
        (("--open-set", "--partial-set"), "exclude"),
        (("--method", "usfan"), "did you mean u-sfan"),
        (("--setting", "opne"), "did you mean open?"),
        (("--set", "temperature=0"), "between 0.001 and 1000"),
        (("--set", "split=guess"), "entropy"),
        (("--set", "balance=maybe"), "on or off"),
        (("--set", "balnce=off"), "did you mean balance"),
        (("--set", "momentum=fast"), "momentum must be a number"),
        (("--set", "epochs"), "NAME=VALUE"),
        (("--temperature", "0"), "--set temperature=VALUE"),
        (("--momentum", "0"), "--set momentum=VALUE"),
        (("--guard", "maybe"), "on or off"),
        (("--metod", "shot"), "Did you mean --method?"),
        (("--coverage", "2"), "--coverage"),
    ],
)
def test_bad_settings_of_adapt(refused, folder, model, tmp_path, flags, words):
    assert words in refused("adapt", model, folder, "--out", tmp_path / "run", *TINY, *flags)
    assert not (tmp_path / "run").exists()


def test_other_mistakes(refused, folder, model, tmp_path):
    table = tmp_path / "table.csv"
    assert "coverage" in refused(
        "predict", model, folder, "--out", table, "--coverage", "1.5", *TINY
    )
    assert "no such model" in refused(
        "predict", tmp_path / "none", folder, "--out", table, *TINY
    )
    assert "no labels" in refused("evaluate", model, folder / "class-0", *TINY)
    assert "--backbone" in refused(
        "posterior", model / "model.safetensors", folder, "--out", tmp_path / "p", *TINY
    )
    assert "seeds" in refused("reproduce", "toy", "--epochs", "3", "--out", tmp_path / "toy")
    assert "once" in refused(
        "reproduce", "digits", "--seeds", "1", "1", "--out", tmp_path / "toy"
    )
    assert "dann" in refused("reproduce", "toy", "--methods", "dann", "--out", tmp_path / "toy")
    assert "once" in refused(
        "reproduce", "toy", "--methods", "shot", "shot", "--out", tmp_path / "toy"
    )
    for name in ("toy", "digits"):
        assert "seed must lie" in refused(
            "reproduce", name, "--seeds", "1", "-1", "--out", tmp_path / "toy"
        )
    assert "published" in refused("reproduce", "office31", "--out", tmp_path / "study")
    assert os.listdir(tmp_path) == []
