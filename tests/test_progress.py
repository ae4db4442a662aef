"""What is shown while something works: on no terminal lines, in a notebook one line that renews itself."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import usfan
from small_runs import TINY, class_folder
from usfan import progress
from usfan.config import RuntimeConfig
from usfan.errors import ConfigError


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)


def labelled() -> usfan.ImageData:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 28, 28), dtype=np.uint8)
    return usfan.ImageData(pixels, labels=[0, 1, 2] * 8)


def train(shown):
    with progress.for_api(shown, "training") as told:
        return usfan.train_source(
            labelled(), backbone="digits-cnn", epochs=3, batch_size=8, bottleneck=8, progress=told,
            runtime=RuntimeConfig(device="cpu"),
        )  # fmt: skip


def test_without_a_terminal_every_epoch_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(progress.Lines, "epoch_wait", 0.0)
    train(None)
    lines = [line for line in capsys.readouterr().err.splitlines() if "epoch" in line]
    assert len(lines) == 3
    wanted = r"training: 44 of 66 images, epoch 2 of 3, loss [\d.]+, validation accuracy [\d.]+ %, .*images/s, .*left"
    assert re.fullmatch(wanted, lines[1])
    assert "left" not in lines[2]


def test_lines_come_now_and_then(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.bar("decoding", 100_000) as shown:
        for _ in range(10_000):
            clock[0] += 0.1
            shown.advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("decoding: 10 of 100,000 images")
    assert 30 < len(lines) < 100  # of 1,000 seconds
    assert re.search(r"100 images/s, \d+ min \d\d s left", lines[2])


def test_what_is_quick_is_not_shown(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    train(None)
    assert capsys.readouterr().err == ""


def test_false_is_silent_and_a_function_is_told(capsys):
    train(False)
    assert capsys.readouterr().err == ""
    assert not progress.console.quiet
    calls = []
    train(lambda *call: calls.append(call))
    assert "training" not in capsys.readouterr().err
    assert calls[-1][:2] == (66, 66)
    assert [call[2]["epoch"] for call in calls if "epoch" in call[2]] == [1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"progress must be True, False or a function .*; got str"
    ):
        train("yes")


def test_an_adaptation_tells_its_epochs():
    source = train(False)
    calls = []
    usfan.adapt(
        source, labelled(), epochs=2, batch_size=8, progress=lambda *call: calls.append(call)
    )
    assert [(c[0], c[2]["epoch"], c[2]["epochs"]) for c in calls if "epoch" in c[2]] == [
        (24, 1, 2),
        (48, 2, 2),
    ]


def test_in_a_notebook_one_line_renews_itself(monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, content, raw):
            shown.append(content)

    def display(content, raw, display_id):
        shown.append(content)
        return Handle()

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=1)
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    train(True)
    assert capsys.readouterr().err == ""
    last = shown[-1]
    assert last["text/plain"].startswith("training: 66 of 66 images, epoch 3 of 3")
    assert '<progress value="66" max="66"' in last["text/html"]


def test_whole_numbers_stay_whole(capsys):
    progress.print_metrics(
        {"epochs": 4, "accuracy": 91.234, "ece": 0.01234, "kept_epoch": 12_345}, "[x]"
    )
    said = capsys.readouterr().err
    for shown in (
        r"epochs +│ +4 ",
        r"accuracy +│ +91\.23",
        r"ece +│ +0\.01234",
        r"kept epoch +│ +12,345",
    ):
        assert re.search(shown, said), said


def test_a_training_that_is_killed_has_left_its_progress_in_the_log(tmp_path):
    """A process of its own with its output in a file, as in a batch job."""
    folder = class_folder(tmp_path / "squares", images=4)
    log = tmp_path / "log.txt"
    words = [
        "train",
        folder,
        "--out",
        tmp_path / "run",
        "--backbone",
        "digits-cnn",
        "--epochs",
        100_000,
        *TINY,
    ]
    with log.open("w") as file:
        command = [sys.executable, "-m", "usfan", *map(str, words)]
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while (
            "epoch" not in log.read_text()
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        process.kill()
        process.wait()
    line = next(line for line in log.read_text().splitlines() if "epoch" in line)
    assert re.match(r"training: [\d,]+ of 1,100,000 images, epoch \d+ of 100000, loss", line)
