"""Two processes on one folder: the second is refused in one line. What a dead one left is in no one's way."""

import pytest
from faults import attempt, finish, start

from lookalikes import make
from small_runs import TINY, class_folder, usfan
from usfan.errors import ConfigError
from usfan.store.run_folder import RunFolder, folder_lock


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return class_folder(tmp_path_factory.mktemp("data"), images=20)


def test_a_second_process_is_refused_while_the_first_runs(data, tmp_path):
    command = (
        "train",
        data,
        "--out",
        tmp_path / "run",
        "--backbone",
        "digits-cnn",
        "--epochs",
        200,
        *TINY,
    )
    process, reader = start(*command)
    try:
        while not (tmp_path / "run" / "log.jsonl").exists():
            assert process.is_alive()
        for more in ((), ("--resume",)):
            second = attempt(*command, *more)
            assert second.code == 2
            assert "in use by another process" in second.text
            assert len(second.text.strip().splitlines()) == 1
        assert process.is_alive()
    finally:
        process.kill()
        finish(process, reader)
    assert (tmp_path / "run" / ".lock").exists()  # stale now
    flags = (
        "--out",
        tmp_path / "run",
        "--backbone",
        "digits-cnn",
        "--epochs",
        199,
        *TINY,
        "--resume",
    )
    assert "other settings (epochs 200, not 199)" in attempt("train", data, *flags).text
    with pytest.raises(ConfigError, match="other settings"):  # past the lock
        RunFolder(tmp_path / "run", {"epochs": 199}, command="train", resume=True)


def test_a_study_and_the_demo_are_guarded_too(tmp_path, capsys):
    study = (
        "reproduce",
        "digits",
        "--data",
        make("digits", tmp_path / "digits"),
        "--out",
        tmp_path / "run",
    )
    for command in (
        (*study, "--allow-classes"),
        ("demo", "--out", tmp_path / "run"),
        ("reproduce", "toy", *study[-2:]),
    ):
        with folder_lock(tmp_path / "run", command[0]):
            assert usfan(*command, "--device", "cpu") == 2
        assert "in use by another process" in capsys.readouterr().err


def test_what_killed_writers_left_is_cleared_away(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoint").mkdir(parents=True)
    parts = [
        folder / ".model.safetensors.01234567.part",
        folder / "checkpoint" / ".epoch-00001.safetensors.0123abcd.part",
    ]
    for part in parts:
        part.mkdir()
        (part / "half").write_bytes(b"half")
    (folder / "log.jsonl").write_text('{"event": "epoch", "epoch": 1}\n{"event": "epo')
    (folder / "config.yaml").write_text("command: train\n")
    with RunFolder(folder, {}, command="train", resume=True) as run:
        assert not any(part.exists() for part in parts)
        run.log("epoch", epoch=2)
    assert [line[:17] for line in (folder / "log.jsonl").read_text().splitlines()] == [
        '{"event": "epoch"'
    ] * 2
    study = tmp_path / "study"
    (study / "cells").mkdir(parents=True)
    (study / "cells" / ".a.json.0123abcd.part").write_bytes(b"half")
    (study / "config.yaml").write_text("command: study\n")
    with folder_lock(study, "study"):
        assert not list(study.rglob("*.part"))
