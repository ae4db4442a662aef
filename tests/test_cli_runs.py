"""Runs from the command line: going on with one, what is said at the end, own networks, predictions as JSON."""

import csv
import functools
import io
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import usfan as package
from small_runs import TINY, adapt_tiny, class_folder, in_child, train_tiny, usfan
from usfan.cli import commands
from usfan.cli.main import parse_settings
from usfan.store.run_folder import RunFolder

ADAPT = ("--epochs", 2, "--batch-size", 8, *TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    return train_tiny(folder, tmp_path_factory.mktemp("model") / "source")


@pytest.fixture
def stopped(monkeypatch):
    """Makes runs stop at their first checkpoint, as by Ctrl-C."""
    plain = RunFolder.save_checkpoint

    def save_and_stop(self, *arguments):
        plain(self, *arguments)
        raise KeyboardInterrupt

    def turn(on):
        monkeypatch.setattr(RunFolder, "save_checkpoint", save_and_stop if on else plain)

    return turn


@pytest.mark.parametrize("command", ["train", "adapt"])
def test_ctrl_c_names_the_command_that_goes_on_and_it_does(
    command, model, folder, tmp_path, stopped, capsys
):
    """`--resume` alone: data, method, seed and all the rest are read from the run."""
    whole = tmp_path / "whole"
    out = tmp_path / "a run"
    if command == "train":
        call = (
            "train",
            folder,
            "--backbone",
            "digits-cnn",
            "--seed",
            3,
            "--lr",
            0.02,
            "--strict",
            *ADAPT,
        )
    else:
        own = ("--method", "shot", "--set", "pseudo_label_weight=0.2", "momentum=0.8")
        call = ("adapt", model, folder, "--seed", 3, *own, *ADAPT)
    assert usfan(*call, "--out", whole) == 0
    stopped(True)
    capsys.readouterr()
    assert usfan(*call, "--out", out) == 130
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (
        line
        == f"usfan {command}: interrupted; to continue: usfan {command} --resume --out '{out}'"
    )
    stopped(False)
    assert usfan(command, "--resume", "--out", out) == 0
    assert (out / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()
    assert yaml.safe_load((out / "config.yaml").read_text()) == yaml.safe_load(
        (whole / "config.yaml").read_text()
    )
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    epochs = [e["epoch"] for e in events if e["event"] == "epoch"]
    assert sorted(set(epochs)) == ([1, 2] if command == "train" else [0, 1, 2])
    assert len(epochs) <= len(set(epochs)) + 1  # it did not begin anew


def test_ctrl_c_before_there_is_anything_to_go_on_with(
    model, folder, tmp_path, capsys, monkeypatch
):
    def interrupting(function):
        @functools.wraps(function)
        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        return interrupted

    for name in ("adapt", "evaluate", "reproduce"):
        monkeypatch.setitem(commands.COMMANDS, name, interrupting(commands.COMMANDS[name]))
    for call, end in (
        (("adapt", model, folder, "--out", tmp_path / "run"), "interrupted"),
        (("evaluate", model, folder), "interrupted"),
        (("reproduce", "toy"), "interrupted; run the same command again to continue"),
    ):
        assert usfan(*call) == 130
        assert capsys.readouterr().err.strip() == f"usfan {call[0]}: {end}"


def test_a_real_interrupt(model, folder, tmp_path):
    """The signal of Ctrl-C, to a process of its own, in the middle of a run."""
    out = tmp_path / "run"
    process = in_child(
        "adapt", model, folder, "--out", out, "--epochs", 5000, "--batch-size", 8, *TINY
    )
    deadline = time.monotonic() + 60
    while (
        not (out / "log.jsonl").is_file() and process.is_alive() and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130
    assert not (out / "metrics.json").exists()


def test_a_dry_run_prints_the_plan_and_does_nothing(model, folder, tmp_path, capsys):
    out = tmp_path / "run"
    run = ("adapt", model, folder, "--out", out, "--epochs", 3, "--batch-size", 8, *TINY)
    assert usfan(*run, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("method: u-sfan, ")
    assert "training: 3 epochs, 9 steps" in lines
    assert any(line.startswith("expected: about ") for line in lines)
    assert not out.exists()


def test_resuming_with_other_settings_shows_both_values(refused, model, folder, tmp_path):
    out = adapt_tiny(model, folder, tmp_path / "run", "--seed", 4)
    again = ("adapt", "--resume", "--out", out)
    for flags, words in (
        (("--lr", "0.02"), "(lr 0.01, not 0.02)"),
        (("--seed", "5", "--epochs", "9"), "(epochs 2, not 9, seed 4, not 5)"),
        (("--method", "shot"), "(method u-sfan, not shot"),
        (("--guard", "off"), "(guard on, not off)"),
        (("--open-set",), "(setting auto, not open)"),
        (("--set", "balance=off"), "(balance on, not off)"),
        (("--set", "cache=elsewhere"), "(cache none, not elsewhere)"),
        (("--unlabelled",), "(unlabelled none, not on)"),
        (("--private",), "(private off, not on)"),
    ):
        line = refused(*again, *flags)
        assert words in line, flags
        assert "leave these settings out" in line
    assert f"(data {folder}, not {folder / 'class-0'})" in refused(
        "adapt", model, folder / "class-0", "--resume", "--out", out
    )
    assert "(command adapt, not train" in refused("train", folder, "--resume", "--out", out)
    assert (
        usfan(*again, "--seed", 4, "--lr", "1e-2", "--set", "balance=on", "momentum=0.9") == 0
    )


def test_resume_where_there_is_nothing(refused, model, folder, tmp_path):
    assert "SOURCE is missing" in refused("adapt", "--resume", "--out", tmp_path / "none")
    assert "--out is missing" in refused("adapt", model, folder, "--resume")
    adapt_tiny(model, folder, tmp_path / "fresh", "--resume")  # begins


def test_a_run_to_go_on_with_may_be_a_strangers(refused, model, folder, tmp_path):
    """Its config.yaml is checked like any other, and cannot name a module to import."""
    out = adapt_tiny(model, folder, tmp_path / "run")
    config = yaml.safe_load((out / "config.yaml").read_text())
    for more, words in (
        ({"epochs": "many"}, "whole number"),
        ({"no_such": 1}, "no_such 1, not none"),
        ({"module": "os:getcwd"}, "module os:getcwd, not none"),
    ):
        (out / "config.yaml").write_text(yaml.safe_dump({**config, **more}))
        assert words in refused("adapt", "--resume", "--out", out)
    (out / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    assert "aliases" in refused("adapt", "--resume", "--out", out)


def test_without_labels_a_few_plain_lines_say_what_came_of_it(model, folder, tmp_path, capsys):
    flat = tmp_path / "my photos"
    flat.mkdir()
    for file in folder.rglob("*.png"):
        shutil.copy(file, flat / f"{file.parent.name}-{file.name}")
    capsys.readouterr()
    out = adapt_tiny(model, flat, tmp_path / "run")
    lines = capsys.readouterr().err.strip().splitlines()
    metrics = json.loads((out / "metrics.json").read_text())
    tried = "adaptation was tried with u-sfan; the source model is kept"
    kept = "the model, adapted by u-sfan" if metrics["kept_epoch"] else tried
    assert lines[0] == f"{out}: {kept}"
    assert lines[1].startswith(f"verdict: {metrics['verdict']['sentence']}")
    assert lines[2] == f"guard: {metrics['guard']['reason']}"
    assert lines[3].startswith("classes of the target: ")
    assert re.match(r"changes: (none|\d+) of 24 predictions changed", lines[4])
    assert ("No prediction changed" in lines[1]) == lines[4].startswith("changes: none")
    assert lines[5] == f"next: usfan predict {out} '{flat}' --out predictions.csv"
    assert lines[6] == f"      usfan report {out}"
    assert len(lines) == 7


def test_a_method_that_trains_nothing_says_what_it_does_with_epochs(
    model, folder, tmp_path, capsys, caplog
):
    out = adapt_tiny(model, folder, tmp_path / "a", "--method", "bn-adapt", "--guard", "off")
    assert [r.getMessage() for r in caplog.records] == [
        "bn-adapt trains nothing: --epochs 2 is not used"
    ]
    assert json.loads((out / "config.json").read_text())["method"] == "bn-adapt"
    caplog.clear()
    call = ("adapt", model, folder, "--out", tmp_path / "b", "--method", "bn-adapt", *TINY)
    assert usfan(*call) == 0
    assert caplog.records == []
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["epochs"] == 1


def test_a_few_labels_of_ones_own(refused, model, folder, tmp_path, capsys):
    """label_first.csv of a first run, filled in half-way, goes into a second one."""
    target = class_folder(tmp_path / "target", domain=2)
    first = adapt_tiny(model, target, tmp_path / "first", "--guard", "off")
    rows = list(csv.DictReader((first / "label_first.csv").read_text().splitlines()))
    for row in rows[:2]:
        row["label"] = Path(row["path"]).parent.name
    table = tmp_path / "few.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    capsys.readouterr()
    second = adapt_tiny(model, target, tmp_path / "second", "--guard", "off", "--labels", table)
    assert re.search(r"labels: 2 images of \d classes", capsys.readouterr().err)
    metrics = json.loads((second / "metrics.json").read_text())
    assert metrics["labels"]["count"] == 2
    assert metrics["after"]["count"] == 22  # images whose labels were given are no test
    assert yaml.safe_load((second / "config.yaml").read_text())["labels"] == str(table)
    again = {
        row["path"]
        for row in csv.DictReader((second / "label_first.csv").read_text().splitlines())
    }
    assert again.isdisjoint(row["path"] for row in rows[:2])
    private = adapt_tiny(
        model,
        target,
        tmp_path / "private",
        "--labels",
        table,
        "--private",
    )
    assert "few.csv" not in (private / "config.yaml").read_text()
    call = ("adapt", model, target, "--out", tmp_path / "bad", *ADAPT)
    table.write_text("path,label\nnowhere.png,class-0\n")
    assert "few.csv, line 2: nowhere.png is not an image of target" in refused(
        *call, "--labels", table
    )
    table.write_text("path,label\nclass-0/000.png,class-9\n")
    assert "few.csv, line 2: the model has no class class-9: did you mean" in refused(
        *call, "--labels", table
    )
    table.write_text("path,label\nclass-0/000.png,class-1\n")
    assert "bn-adapt trains nothing" in refused(
        *call, "--labels", table, "--method", "bn-adapt"
    )
    assert not (tmp_path / "bad").exists()


def evaluated(*arguments):
    """The figures of `usfan evaluate`; the last argument is its run folder."""
    out = Path(arguments[-1])
    assert usfan("evaluate", *arguments[:-1], "--out", out, *TINY) == 0
    return json.loads((out / "metrics.json").read_text())


def test_evaluate_with_a_few_labels_of_unlabelled_images(
    refused, model, folder, tmp_path, capsys
):
    """A half-filled table and the photographs of a camera: the figures are of the labelled images, with an interval."""
    camera = tmp_path / "DCIM"
    for number, place in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
        shutil.copytree(place, camera / f"10{number}CANON")
    shutil.copy(camera / "100CANON" / "000.png", camera)  # beside the folders
    table = tmp_path / "few.csv"
    table.write_text(
        "path,label\n100CANON/000.png,class-0\n100CANON/001.png,\n101CANON/000.png,class-0\n"
    )
    figures = evaluated(model, camera, "--labels", table, tmp_path / "run")
    assert figures["count"] == 2
    assert figures["accuracy_low"] <= figures["accuracy"] <= figures["accuracy_high"]
    assert figures["accuracy_high"] - figures["accuracy_low"] > 60  # two labels say little
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["labels"] == str(
        table
    )
    data = package.ImageData(camera, unlabelled=True)
    pairs = {"100CANON/000.png": "class-0", "101CANON/000.png": "class-0"}
    assert package.evaluate(model, data, labels=pairs, progress=False, device="cpu") == figures
    table.write_text("path,label\n100CANON/000.png,class-9\n")
    assert "few.csv, line 2: the model has no class class-9" in refused(
        "evaluate", model, camera, "--labels", table
    )


def test_evaluate_takes_labels_of_new_classes_in_open_set(
    refused, model, folder, tmp_path, capsys
):
    table = tmp_path / "few.csv"
    call = ("evaluate", model, folder, "--labels", tmp_path / "few.csv", "--open-set")
    table.write_text(
        "path,label\nclass-0/000.png,class-0\nclass-1/000.png,class-1\nclass-2/000.png,zebra\n"
    )
    figures = evaluated(*call[1:], tmp_path / "run")
    assert figures["count"] == 3
    assert "hos" in figures
    pairs = {
        "class-0/000.png": "class-0",
        "class-1/000.png": "class-1",
        "class-2/000.png": "zebra",
    }
    assert (
        package.evaluate(
            model, folder, labels=pairs, open_set=True, progress=False, device="cpu"
        )
        == figures
    )
    table.write_text("path,label\nclass-0/000.png,Class-0\n")
    assert "the model has no class Class-0: did you mean class-0?" in refused(*call)
    assert "the model has no class Class-0" in refused(*call[:-1])


def test_unlabelled_by_choice(model, folder, tmp_path):
    """Folders of a camera, and labels that are ignored."""
    camera = tmp_path / "DCIM"
    for number, place in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
        shutil.copytree(place, camera / f"10{number}CANON")
    for data, flags in ((camera, ()), (camera, ("--unlabelled",)), (folder, ("--unlabelled",))):
        out = tmp_path / f"run-{data.name}-{len(flags)}"
        adapt_tiny(model, data, out, *flags)
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["images"] == 24
        assert "after" not in metrics


def test_several_sources_are_parsed(refused, model, tmp_path):
    settings = parse_settings("adapt", ["one", "two", "data", "--out", "run"])
    assert (settings["source"], settings["data"]) == (["one", "two"], "data")
    assert "SOURCE is missing" in refused("adapt", model, "--out", tmp_path / "run")


def table(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_predictions_of_single_photographs_as_json(
    refused, model, folder, tmp_path, capsys, monkeypatch
):
    photos = sorted(folder.rglob("*.png"))[:3]
    capsys.readouterr()
    assert usfan("predict", model, *photos, "--json", *TINY) == 0
    rows = table(capsys.readouterr().out)
    assert [row["path"] for row in rows] == [str(photo) for photo in photos]
    assert set(rows[0]) >= {"path", "label", "confidence", "entropy", "weight", "unknown"}
    assert isinstance(rows[0]["confidence"], float)
    assert rows[0]["unknown"] is False
    out = tmp_path / "table.json"
    assert (
        usfan("predict", model, photos[0], "--json", "--out", out, "--coverage", 0.4, *TINY)
        == 0
    )
    (row,) = table(out.read_text())
    assert (row["abstained"], row.get("label")) == (True, None)
    assert usfan("predict", model, photos[0], "--out", tmp_path / "table.csv", *TINY) == 0
    assert (tmp_path / "table.csv").read_text().count("\n") == 2
    assert (
        "table.csv: 1 prediction, as CSV (--json writes JSON lines)" in capsys.readouterr().err
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{photos[0]}\n{photos[1]}\n"))
    capsys.readouterr()
    assert usfan("predict", model, "-", "--json", *TINY) == 0
    assert [row["path"] for row in table(capsys.readouterr().out)] == [
        str(photos[0]),
        str(photos[1]),
    ]
    line = refused("predict", model, photos[0], *TINY)
    assert (
        "--out is missing: name the file to write, or print the predictions with --json" in line
    )
    capsys.readouterr()
    assert usfan("predict", model, photos[0], folder, "nowhere.png", "--json", *TINY) == 0
    rows = table(capsys.readouterr().out)
    assert len(rows) == 26
    assert (Path(rows[-1]["path"]).name, bool(rows[-1]["error"])) == ("nowhere.png", True)
    assert "no such image" in refused("predict", model, "nowhere.png", "--json", *TINY)


def test_class_names_for_a_posterior(refused, model, folder, tmp_path):
    (tmp_path / "names.txt").write_text("class-0\nclass-1\nclass-2\n")
    out = tmp_path / "run"
    assert (
        usfan(
            "posterior", model, folder, "--out", out, "--classes", tmp_path / "names.txt", *TINY
        )
        == 0
    )
    assert package.SourceModel.load(out).classes == ("class-0", "class-1", "class-2")
    (tmp_path / "names.txt").write_text("class-0\nclass-1\n")
    line = refused(
        "posterior",
        model,
        folder,
        "--out",
        tmp_path / "two",
        "--classes",
        tmp_path / "names.txt",
        *TINY,
    )
    assert "2 names" in line


NETWORK = """
import torch
from torch import nn
(__import__("pathlib").Path(__file__).with_name("imported")).touch()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        self.body = nn.Sequential(*layers)
        self.top = nn.Linear(16, 3)

    def forward(self, x):
        return self.top(self.body(x))


def make():
    return Net()


wrong = dict
"""


@pytest.fixture
def own(folder, tmp_path, monkeypatch):
    """A saved model of a network that is the user's own, whose module lies in the current folder."""
    name = f"own_network_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    space: dict = {"__name__": "own", "__file__": str(tmp_path / "x.py")}
    exec(NETWORK, space)
    (tmp_path / "imported").unlink()
    torch.manual_seed(0)
    spec = package.InputSpec(3, 16, 16)
    package.attach_posterior(
        space["make"](), package.ImageData(folder), head="top", spec=spec
    ).save(tmp_path / "own")
    yield tmp_path / "own", name
    sys.modules.pop(name, None)


def test_an_own_network_is_imported_only_if_the_user_names_it(
    refused, own, folder, tmp_path, capsys
):
    source, name = own
    named = ("--module", f"{name}:make")
    assert "--module" in refused("predict", source, folder, "--out", tmp_path / "t.csv", *TINY)
    for text in (f"module: {name}:make", f"out: t.csv\nmodule: {name}:make"):
        (tmp_path / "c.yaml").write_text(text)
        assert "give it on the command line" in refused(
            "predict", source, folder, "--config", tmp_path / "c.yaml", *TINY
        )
    assert not (tmp_path / "imported").exists()
    assert usfan("predict", source, folder, "--out", tmp_path / "t.csv", *named, *TINY) == 0
    assert (tmp_path / "imported").exists()
    assert (tmp_path / "t.csv").read_text().count("\n") == 25
    assert usfan("evaluate", source, folder, *named, *TINY) == 0
    out = adapt_tiny(source, folder, tmp_path / "run", *named)
    assert f"--out predictions.csv --module {name}:make\n" in capsys.readouterr().err
    assert "make" not in (out / "config.yaml").read_text()
    assert usfan("predict", out, folder, "--out", tmp_path / "u.csv", *named, *TINY) == 0
    assert usfan("export", source, "--onnx", tmp_path / "m.onnx", *named) == 0


def test_modules_that_cannot_be_used(refused, own, folder, tmp_path):
    source, name = own
    for given, words in (
        ("no_such_module:make", "No module named 'no_such_module'"),
        (f"{name}:nothing", "has no attribute 'nothing'"),
        (f"{name}:wrong", "must give a torch.nn.Module; got a dict"),
        (name, "write MODULE:FUNCTION"),
    ):
        assert words in refused("evaluate", source, folder, "--module", given, *TINY), given


def test_of_a_flag_given_twice_the_last_counts():
    """As in a shell's alias or a script: what is appended goes on top. Lists grow."""
    words = [
        "a",
        "b",
        "--out",
        "o",
        "--epochs",
        "2",
        "--set",
        "momentum=0.5",
        "--epochs",
        "8",
        "--set",
        "samples=3",
    ]
    settings = parse_settings("adapt", words)
    assert (settings["epochs"], settings["momentum"], settings["samples"]) == (8, 0.5, 3)


def test_the_place_of_a_model_is_said_with_brackets_as_it_is(model, folder, tmp_path, capsys):
    out = adapt_tiny(model, folder, Path(tmp_path / "[bold]x"))
    assert f"{out}: the model" in capsys.readouterr().err
