"""The command line as a user meets it: start-up, help, exit codes, one clear line per mistake, nothing half written."""

import dataclasses
import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from small_runs import TINY, adapt_tiny, class_folder, train_tiny, usfan
from usfan.adaptation.methods import METHODS
from usfan.cli.commands import COMMANDS
from usfan.cli.flags import describe
from usfan.cli.main import parse_settings
from usfan.config import AdaptConfig


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    return train_tiny(folder, tmp_path_factory.mktemp("model") / "source")


@pytest.mark.parametrize("command", [(), ("train",), ("adapt",)], ids=str)
def test_help_starts_fast(command):
    """Half a second of work, the best of a few: a busy machine is not the program's fault."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call = [sys.executable, "-m", "usfan.cli.main", *command, "--help"]
        subprocess.run(call, capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.25


@pytest.mark.parametrize(
    "code",
    [
        "import usfan",
        "from usfan.cli.main import main; main(['--help'])",
        "from usfan.cli.main import main; main(['adapt', '--help'])",
        "from usfan.cli.main import main; main(['train', 'nowhere', '--out', 'run', '--epochs', 'x'])",
    ],
    ids=["import", "help", "help of a command", "mistake"],
)
def test_nothing_heavy_is_imported(code):
    heavy = "{'torch', 'timm', 'torchvision', 'matplotlib', 'sklearn'}"
    assert run_python(
        f"{code}\nimport sys; print('heavy:', sorted({heavy} & set(sys.modules)))"
    ).endswith("heavy: []\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert usfan(command, "--help") == 0
    text = capsys.readouterr().out
    assert {"--config", "--device", "--seed", "--budget"} <= set(re.findall(r"--[a-z-]+", text))


def test_help_explains_every_setting(capsys):
    usfan("adapt", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--open-set",
        "--partial-set",
        "--preset",
        "--guard on|off",
        "--setting auto|closed|partial|open|universal",
        "--resume",
        "Passes over the target. Default: 15.",
    ):
        assert words in text
    usfan("train", "--help")
    text = " ".join(capsys.readouterr().out.split())
    tune = "--tune auto|affine|new|norm|all Which parameters are trained: affine (scales and shifts of BatchNorm, "
    assert f"{tune}and the head)" in text
    usfan("predict", "--help")
    assert "weight, unknown, error." in capsys.readouterr().out
    usfan("report", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Usage: usfan report RUN [RUN …]" in text
    assert "Arguments: RUN Run folders" in text
    usfan("methods", "u-sfan")
    assert "τ of the certainty weights" in capsys.readouterr().out


def test_a_missing_argument_is_named_as_in_the_help(refused):
    assert (
        refused("report")
        == "usfan report: RUN is missing: give it, or put it into the --config file (see --help)"
    )


def test_adapt_has_few_flags_and_the_common_ones_come_first(capsys):
    """At most 27."""
    usfan("adapt", "--help")
    text = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", text, flags=re.M)
    assert len(flags) == len(set(flags)) <= 27
    assert flags[:4] == ["--out", "--method", "--epochs", "--seed"]
    titles = re.findall(r"^([A-Z][a-z ]+):$", text, flags=re.M)
    assert titles == ["Arguments", "Common", "Adaptation", "Data and model", "Computing"]
    command = describe(COMMANDS["adapt"])
    for name in command.hidden.keys() - command.flags.keys():
        assert f"--{name.replace('_', '-')} " not in text


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_needs_no_indentation_of_docstrings(name, monkeypatch):
    """Python 3.13 removes it when it compiles."""
    command = COMMANDS[name]
    texts = [flag.text for flag in describe(command).flags.values()]
    monkeypatch.setattr(command, "__doc__", inspect.cleandoc(command.__doc__))
    assert [flag.text for flag in describe.__wrapped__(command).flags.values()] == texts


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
        "import sys; from usfan.cli import commands; from usfan.cli.main import main\n"
        "def broken(): raise RuntimeError('a fault')\n"
        "commands.COMMANDS['methods'] = broken; sys.exit(main(['methods']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_a_full_disk_is_a_fault_in_one_line(model, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    command = (
        "adapt",
        model,
        folder,
        "--out",
        tmp_path / "run",
        "--set",
        f"cache={tmp_path / 'cache'}",
        *TINY,
    )
    assert usfan(*command) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "cannot write the image cache: No space left" in line
    assert not list((tmp_path / "cache").glob("*.p*"))


def test_a_file_that_cannot_be_written_is_a_fault_in_one_line(model, folder, capsys):
    assert usfan("predict", model, folder, "--out", "/proc/nowhere/table.csv", *TINY) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_flags_go_on_top_of_yaml(folder, tmp_path):
    config = tmp_path / "settings.yaml"
    config.write_text(
        "backbone: digits-cnn\nepochs: 5\nbatch-size: 8\nhead_bias: off\nlr: 0.02\n"
    )
    code = usfan(
        "train", folder, "--out", tmp_path / "run", "--config", config, "--epochs", 1, *TINY
    )
    assert code == 0
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (used["epochs"], used["batch_size"], used["lr"], used["head_bias"]) == (
        1,
        8,
        0.02,
        False,
    )
    assert (
        json.loads((tmp_path / "run" / "config.json").read_text())["architecture"]["head_bias"]
        is False
    )


def test_the_settings_of_a_run_make_another(model, folder, tmp_path):
    """Its own config.yaml will do for --config."""
    first = adapt_tiny(model, folder, tmp_path / "first", "--method", "shot", "--guard", "off")
    settings = yaml.safe_load((first / "config.yaml").read_text())
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({**settings, "guard": "off"}))
    more = ("--config", tmp_path / "more.yaml", "--out", tmp_path / "second")
    assert usfan("adapt", model, folder, *more) == 0
    again = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    assert again == settings
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_settings_of_another_command_and_missing_ones(refused, model, folder, tmp_path):
    line = refused(
        "adapt", model, folder, "--out", tmp_path / "run", "--config", model / "config.yaml"
    )
    assert "of usfan train, not of adapt" in line
    (tmp_path / "settings.yaml").write_text("epochs: 1\n")
    line = refused("evaluate", model, folder, "--config", tmp_path / "settings.yaml")
    assert "unknown setting 'epochs'" in line
    assert "--out is missing" in refused(
        "adapt", model, folder, "--config", tmp_path / "settings.yaml"
    )
    assert "--onnx is missing" in refused("export", model)
    (tmp_path / "settings.yaml").write_text("methods: []\n")
    assert "no method is given" in refused(
        "reproduce", "toy", "--config", tmp_path / "settings.yaml"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("head: 3", "head must be a text"),
        ('head: "a\\0b"', "head must be a text"),
        ('head: ""', "head must be a text"),
        ("{strict: maybe}", "strict must be true or false"),
        ("{backbone: [a]}", "backbone must be a text"),
    ],
)
def test_settings_that_are_no_text_and_no_switch(refused, model, folder, tmp_path, text, words):
    (tmp_path / "settings.yaml").write_text(text)
    assert words in refused("posterior", model, folder, "--config", tmp_path / "settings.yaml")


def test_a_path_with_brackets_is_shown_as_it_is(model, folder, tmp_path, capsys):
    out = tmp_path / "run[" / "c]" / "[bold]x"
    out.parent.mkdir(parents=True)
    assert usfan("posterior", model, folder, "--out", out, *TINY) == 0
    said = "".join(capsys.readouterr().err.split())
    assert "[bold]x:posterior" in said
    files = {path.name.split(".")[0] for path in out.iterdir()}
    assert {"config", "metrics", "log", "events", "model", "posterior"} <= files


def test_methods_are_one_line_each_in_a_pipe(capsys):
    assert usfan("methods") == 0
    lines = capsys.readouterr().out.splitlines()
    for name in METHODS:
        assert (
            len([line for line in lines if re.match(rf"[│|] {re.escape(name)} +[│|]", line)])
            == 1
        ), name


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
    assert words in refused(
        "train", folder, "--out", tmp_path / "run", "--config", tmp_path / "settings.yaml"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["settings", "computing", "set", "config", "module"])
def test_a_file_cannot_hold_what_belongs_to_the_command_line(
    refused, model, folder, tmp_path, name
):
    (tmp_path / "settings.yaml").write_text(f"{name}: a:b")
    command = ("adapt", model, folder, "--out", tmp_path / "run")
    assert name in refused(*command, "--config", tmp_path / "settings.yaml", *TINY)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["methods", "demo", "report"])
def test_an_unknown_yaml_key_is_refused_by_every_command(refused, tmp_path, command):
    (tmp_path / "settings.yaml").write_text("nonsense: 1")
    more = [tmp_path] if command == "report" else []
    assert "nonsense" in refused(command, *more, "--config", tmp_path / "settings.yaml")


def test_benchmarks_of_the_parser_are_those_of_the_catalogue():
    from usfan.data.benchmarks.catalogue import BENCHMARKS as CATALOGUE

    benchmark = describe(COMMANDS["reproduce"]).flags["benchmark"]
    assert set(benchmark.choices) == {"toy", *CATALOGUE}


def test_every_on_off_setting_can_be_given():
    """Whatever is true or false in the config takes on and off, or stands alone if it is off by default."""
    for item in dataclasses.fields(AdaptConfig):
        if not str(item.type).startswith("bool"):
            continue
        flag = "--" + item.name.replace("_", "-")
        given = [flag] if item.default is False else [flag, "off"]
        settings = parse_settings("adapt", ["m", "d", "--out", "o", *given])
        assert settings[item.name] is (item.default is False), flag


def test_a_run_that_diverges_keeps_the_source_model_and_says_so(
    model, folder, tmp_path, capsys
):
    out = tmp_path / "run"
    assert (
        usfan(
            "adapt",
            model,
            folder,
            "--out",
            out,
            "--lr",
            1e12,
            "--epochs",
            3,
            "--batch-size",
            8,
            *TINY,
        )
        == 0
    )
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["kept_epoch"] == 0
    assert "(the loss is not finite)" in metrics["guard"]["reason"]
    assert metrics["verdict"]["value"] == "worse"
    assert metrics["verdict"]["sentence"].startswith("The adapted model collapsed")
    assert usfan("predict", out, folder, "--out", tmp_path / "p.csv", *TINY) == 0


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `usfan train --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "usfan", "train", "--help"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
