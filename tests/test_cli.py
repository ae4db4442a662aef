"""The command line as a user meets it: start-up, help, exit codes, one clear line per mistake, nothing half written."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from small_runs import TINY, class_folder, train_tiny, usfan
from usfan.cli import BENCHMARKS

COMMANDS = ("demo", "train", "posterior", "adapt", "evaluate", "predict", "report", "export", "methods", "reproduce")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    return train_tiny(folder, tmp_path_factory.mktemp("model") / "source")


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused: exit code 2, one line on stderr, no traceback. Gives the line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert usfan(*arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert "Traceback" not in lines[0]
        return lines[0]

    return run


def test_help_starts_fast():
    """Half a second, the best of a few: a busy machine is not the program's fault."""

    def seconds() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "usfan.cli", "--help"], capture_output=True, check=True, timeout=60)
        return time.perf_counter() - started

    assert min(seconds() for _ in range(5)) < 0.5


@pytest.mark.parametrize(
    "code",
    [
        "import usfan",
        "from usfan.cli import main; main(['methods'])",
        "from usfan.cli import build_parser; build_parser().format_help()",
    ],
    ids=["import", "methods", "help"],
)
def test_nothing_heavy_is_imported(code):
    heavy = "{'torch', 'timm', 'torchvision', 'matplotlib', 'sklearn', 'lightning'}"
    assert run_python(f"{code}\nimport sys; print('heavy:', sorted({heavy} & set(sys.modules)))").endswith(
        "heavy: []\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert usfan(command, "--help") == 0
    text = capsys.readouterr().out
    assert {"--config", "--device", "--seed"} <= set(re.findall(r"--[a-z-]+", text))


def test_help_explains_every_setting(capsys):
    usfan("adapt", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--open-set",
        "--partial-set",
        "--preset",
        "--guard {on,off}",
        "--resume",
        "τ of the certainty weights",
    ):
        assert words in text


def test_methods_are_six(capsys):
    assert usfan("methods") == 0
    text = capsys.readouterr().out
    for name in ("source-only", "shot-im", "shot-im-entropy", "shot", "u-sfan", "u-sfan+"):
        assert re.search(rf"[│|] {re.escape(name)} +[│|]", text), name


def test_version_and_no_command(capsys):
    assert usfan("--version") == 0
    assert usfan() == 0
    assert "COMMAND" in capsys.readouterr().out


def test_a_fault_exits_with_one():
    """In a process of its own: a fault shows its traceback, a user's mistake does not."""
    code = (
        "import sys; from usfan import commands; from usfan.cli import main\n"
        "def broken(settings): raise RuntimeError('a fault')\n"
        "commands.COMMANDS['methods'] = broken; sys.exit(main(['methods']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_a_file_that_cannot_be_written_is_a_fault_in_one_line(model, folder, capsys):
    assert usfan("predict", model, folder, "--out", "/proc/nowhere/table.csv", *TINY) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_flags_go_on_top_of_yaml(folder, tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text("backbone: digits-cnn\nepochs: 5\nbatch-size: 8\nhead_bias: off\nlr: 0.02\n")
    code = usfan("train", folder, "--out", tmp_path / "run", "--config", config, "--epochs", 1, *TINY)
    assert code == 0
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (used["epochs"], used["batch_size"], used["lr"], used["head_bias"]) == (1, 8, 0.02, False)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["architecture"]["head_bias"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", "epochs"),
        ("epochs: many", "whole number"),
        ("epochs: 1.5", "whole number"),
        ("- 1\n- 2", "names and values"),
        ("a: [", "settings.yaml"),
        ("head_bias: 3", "true or false"),
    ],
)
def test_bad_yaml(refused, folder, tmp_path, text, words):
    (tmp_path / "settings.yaml").write_text(text)
    assert words in refused("train", folder, "--out", tmp_path / "run", "--config", tmp_path / "settings.yaml")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["methods", "demo", "report"])
def test_an_unknown_yaml_key_is_refused_by_every_command(refused, tmp_path, command):
    (tmp_path / "settings.yaml").write_text("nonsense: 1")
    more = [tmp_path] if command == "report" else []
    assert "nonsense" in refused(command, *more, "--config", tmp_path / "settings.yaml")


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
    line = refused("train", make(tmp_path), "--out", tmp_path / "run", "--backbone", "digits-cnn", *TINY)
    assert words in line
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
        (("--backbone", "digits-cnn", "--prior", "-1"), "positive"),
        (("--backbone", "digits-cnn", "--prior", "magic"), "evidence"),
        (("--backbone", "digits-cnn", "--epochs", "0"), "at least 1"),
        (("--backbone", "digits-cnn", "--lr", "nan"), "lr"),
        (("--backbone", "digits-cnn", "--seed", "-3"), "seed"),
        (("--backbone", "digits-cnn", "--pretrained", "nowhere.pth"), "nowhere.pth"),
        (("--backbone", "digits-cnn", "--device", "tpu"), "device"),
        (("--backbone", "digits-cnn", "--epoch", "x", "--no-such-flag"), "--no-such-flag"),
    ],
)
def test_bad_settings_of_train(refused, folder, tmp_path, flags, words):
    assert words in refused("train", folder, "--out", tmp_path / "run", "--workers", "0", *flags)
    assert not (tmp_path / "run").exists()


def test_an_output_folder_with_another_run_or_other_files(refused, folder, model, tmp_path):
    before = (model / "model.safetensors").read_bytes()
    assert "already holds a run" in refused("train", folder, "--out", model, "--backbone", "digits-cnn", *TINY)
    assert (model / "model.safetensors").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    assert "not empty" in refused("train", folder, "--out", tmp_path / "mine", "--backbone", "digits-cnn", *TINY)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert "is a file" in refused("adapt", model, folder, "--out", tmp_path / "mine" / "thesis.tex", *TINY)


def test_a_run_is_not_resumed_with_other_settings(refused, folder, model):
    flags = ("--out", model, "--backbone", "digits-cnn", "--epochs", 9, "--batch-size", 8, *TINY)
    assert "epochs" in refused("train", folder, "--resume", *flags)


def test_classes_beyond_the_model(refused, model, tmp_path):
    more = class_folder(tmp_path / "more", classes=5)
    for command in (("evaluate", model, more), ("adapt", model, more, "--out", tmp_path / "run")):
        line = refused(*command, *TINY)
        assert "--open-set" in line
        assert "class-3" in line
    assert not (tmp_path / "run").exists()


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
        (("--temperature", "0"), "positive"),
        (("--split", "guess"), "entropy"),
        (("--guard", "maybe"), "on"),
        (("--coverage", "2"), "--coverage"),
    ],
)
def test_bad_settings_of_adapt(refused, folder, model, tmp_path, flags, words):
    assert words in refused("adapt", model, folder, "--out", tmp_path / "run", *TINY, *flags)
    assert not (tmp_path / "run").exists()


def test_other_mistakes(refused, folder, model, tmp_path):
    table = tmp_path / "table.csv"
    assert "coverage" in refused("predict", model, folder, "--out", table, "--coverage", "1.5", *TINY)
    assert "no such model" in refused("predict", tmp_path / "none", folder, "--out", table, *TINY)
    assert "no labels" in refused("evaluate", model, folder / "class-0", *TINY)
    assert "--backbone" in refused("posterior", model / "model.safetensors", folder, "--out", tmp_path / "p", *TINY)
    assert "seeds" in refused("reproduce", "toy", "--epochs", "3", "--out", tmp_path / "toy")
    assert "published" in refused("reproduce", "office31", "--out", tmp_path / "study")
    assert os.listdir(tmp_path) == []


def test_benchmarks_of_the_parser_are_those_of_the_catalogue():
    from usfan.data.catalogue import BENCHMARKS as CATALOGUE

    assert set(BENCHMARKS) == {"toy", *CATALOGUE}
