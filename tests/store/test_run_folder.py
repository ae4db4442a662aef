"""Run folders: what lies in them, and that an interruption at any moment costs nothing but time."""

import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import usfan as package
from small_runs import TINY, adapt_tiny, child_main, class_folder, forkserver, train_tiny, usfan
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError, DataError
from usfan.files import whole_file, write_json
from usfan.store.run_folder import RunFolder, load_checkpoint

RUN = ("--backbone", "digits-cnn", "--epochs", 6, "--batch-size", 16, *TINY)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    return {
        "source": class_folder(root / "source", images=20),
        "target": class_folder(root / "target", images=20, domain=3),
    }


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    return train_tiny(data["source"], tmp_path_factory.mktemp("runs") / "source")


@pytest.fixture(scope="module")
def adapted(data, source, tmp_path_factory):
    return adapt_tiny(
        source,
        data["target"],
        tmp_path_factory.mktemp("runs") / "adapted",
        "--method",
        "u-sfan+",
    )


@pytest.mark.parametrize("which", ["source", "adapted"])
def test_a_run_folder_holds_what_it_promises_and_is_a_model(which, request):
    run = request.getfixturevalue(which)
    names = {p.name for p in run.iterdir()}
    promised = {
        "config.yaml",
        "metrics.json",
        "log.jsonl",
        "config.json",
        "model.safetensors",
        "posterior.safetensors",
    }
    assert promised <= names
    (events,) = (name for name in names if name.startswith("events.out.tfevents"))
    assert re.search(r"\.[0-9a-f]{16}$", events), (
        "nobody can lay a link at a name that cannot be guessed"
    )
    assert "checkpoint" not in names  # only while it runs
    assert not [name for name in names if name.endswith(".part")]
    assert yaml.safe_load((run / "config.yaml").read_text())["command"] == (
        "train" if which == "source" else "adapt"
    )
    model = package.SourceModel.load(run)
    assert model.classes == ("class-0", "class-1", "class-2")
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    epochs = [e["epoch"] for e in events if e["event"] == "epoch"]
    assert epochs == ([1, 2] if which == "source" else [0, 1, 2])


def test_what_adapt_logs(adapted):
    events = [json.loads(line) for line in (adapted / "log.jsonl").read_text().splitlines()]
    last = [e for e in events if e["event"] == "epoch"][-1]
    assert {
        "loss",
        "loss_entropy",
        "loss_diversity",
        "lr",
        "weight_mean",
        "validators",
    } <= last.keys()
    assert events[-1]["event"] == "kept"
    metrics = json.loads((adapted / "metrics.json").read_text())
    assert {
        "method",
        "epochs",
        "seconds",
        "kept_epoch",
        "guard",
        "validators",
        "before",
        "after",
    } <= metrics.keys()
    samples = load_file(adapted / "samples.safetensors")
    assert samples["probs_after"].shape == (60, 3)
    assert samples["features_before"].shape == (60, 2)
    assert len(json.loads((adapted / "samples.json").read_text())["paths"]) == 60


def test_private_leaves_paths_and_summary_out(data, source, tmp_path):
    run = adapt_tiny(source, data["target"], tmp_path / "private", "--private")
    assert json.loads((run / "samples.json").read_text())["paths"] is None
    assert json.loads((run / "config.json").read_text())["summary"] == {}


def run_for(arguments: list[str], seconds: float, spent: str) -> None:
    """What a child does: the command, which the kernel kills after so many seconds of its own processor time (0:
    never), whatever else the machine does. `spent`: a file for the seconds of a run that ended."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # no handler: the process is gone at once
    try:
        child_main(arguments)
    finally:
        Path(spent).write_text(str(time.process_time()))


def child(command: list, out: Path, seconds: float = 0) -> int:
    """The exit code of a command in a process of its own."""
    arguments = [str(a) for a in (*command, "--out", out)]
    process = forkserver().Process(target=run_for, args=(arguments, seconds, f"{out}.seconds"))
    process.start()
    process.join()
    return process.exitcode


def kill_and_resume(command: list, out: Path, seconds: float, rng: random.Random) -> int:
    """Start, kill at a random moment, resume. The number of epochs that were logged when it was killed."""
    share = rng.uniform(0.15, 0.95)
    while child(command, out, share * seconds) != -signal.SIGPROF:  # it ended before
        shutil.rmtree(out)
        share *= 0.7
    logged = (
        (out / "log.jsonl").read_text().count('"event": "epoch"')
        if (out / "log.jsonl").is_file()
        else 0
    )
    assert child([*command, "--resume"], out) == 0
    return logged


@pytest.mark.parametrize("stage", ["train", "adapt"])
def test_killed_at_five_random_moments_and_resumed_it_ends_the_same(
    stage, data, source, tmp_path
):
    if stage == "train":
        command = ["train", data["source"], *RUN]
    else:
        command = ["adapt", source, data["target"], "--method", "u-sfan+", *RUN[2:]]
    assert child(command, tmp_path / "whole") == 0
    seconds = float((tmp_path / "whole.seconds").read_text())
    rng = random.Random(7)
    logged = []
    for number in range(5):
        out = tmp_path / f"killed-{number}"
        logged.append(kill_and_resume(command, out, seconds, rng))
        for file in ("model.safetensors", "posterior.safetensors"):
            assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), (
                number,
                file,
            )
        assert not (out / "checkpoint").exists()
    assert any(0 < n < 6 for n in logged), logged  # some of the kills hit the middle


def test_a_second_process_is_refused_and_a_stale_lock_is_not_in_the_way(data, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("12345")  # left by a process that died
    command = ("train", data["source"], "--out", tmp_path / "run", *RUN)
    with RunFolder(tmp_path / "run", {}, command="train"):
        assert usfan(*command) == 2
        assert "in use by another process" in capsys.readouterr().err
        assert usfan(*command, "--resume") == 2
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_a_finished_run_is_not_run_again(source, data, capsys):
    before = (source / "model.safetensors").stat().st_mtime_ns
    train_tiny(data["source"], source, "--resume")
    assert "finished already" in capsys.readouterr().err
    assert (source / "model.safetensors").stat().st_mtime_ns == before


def test_the_newest_good_checkpoint_wins(tmp_path):
    with RunFolder(tmp_path / "run", {"a": 1}, command="train") as run:
        for epoch in (1, 2, 3):
            run.save_checkpoint(
                epoch, {"x": torch.full((1000,), float(epoch))}, {"epoch": epoch}
            )
        files = sorted((tmp_path / "run" / "checkpoint").iterdir())
        assert [f.stem for f in files] == ["epoch-00002", "epoch-00003"]
        assert run.load_checkpoint()[0] == 3
        files[1].write_bytes(files[1].read_bytes()[:-500])
        epoch, tensors, state = run.load_checkpoint()
        assert (epoch, float(tensors["x"][0]), state) == (2, 2.0, {"epoch": 2})
        files[0].write_bytes(b"")
        assert run.load_checkpoint() is None
        run.drop_checkpoints()
        assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_mistake_before_the_first_epoch_leaves_the_folder_as_it_was(tmp_path):
    def open_and_fail(path, error):
        with RunFolder(path, {}, command="train"):
            raise error

    with pytest.raises(DataError):
        open_and_fail(tmp_path / "new", DataError("no images"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(RuntimeError):  # a fault keeps the folder, to be resumed
        open_and_fail(tmp_path / "kept", RuntimeError("out of memory"))
    assert (tmp_path / "kept" / "config.yaml").is_file()
    with pytest.raises(ConfigError):
        RunFolder(tmp_path / "kept", {}, command="train")
    assert (tmp_path / "kept" / "config.yaml").is_file()


def test_whole_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "file.json"
    write_json(path, {"a": 1})

    def fail():
        with whole_file(path) as part:
            part.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(TypeError):
        write_json(path, {(1, 2): "a key that JSON has not"})
    assert json.loads(path.read_text()) == {"a": 1}


def test_no_run_folder_no_checkpoint():
    assert load_checkpoint(None, Runtime(torch.device("cpu"))) is None
