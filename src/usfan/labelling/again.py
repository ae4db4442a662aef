"""Adapt again with the labels: `usfan adapt` in a child process, with the settings of the run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

from usfan.adaptation.verdict import Verdict
from usfan.files import Folder
from usfan.labelling.answers import ANSWERS_FILE
from usfan.metrics.stored_images import read_mapping

REPEATED = ("root", "cache", "budget")
"""Settings that no config file may set. Labels are asked only for a run that was made here, so these are the user's."""


class SecondRun:
    """The adaptation with the labels of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.out = free_folder(run)
        self.child: subprocess.Popen[str] | None = None
        self.line = ""
        """The last line that the child wrote."""
        settings = read(run, "config.yaml")
        source = settings.get("source")
        self.pairs = [f"{name}={settings[name]}" for name in REPEATED if settings.get(name)]
        if str(settings.get("witness")) not in ("None", "auto", "none"):
            self.pairs.append(
                f"witness={settings['witness']}"
            )  # a config file may download nothing
        paths = [*(source if isinstance(source, list) else [source]), settings.get("data")]
        self.missing = ", ".join(str(path) for path in paths if not os.path.exists(str(path)))
        """Parts of the source model and the data that are missing here."""

    @property
    def words(self) -> list[str]:
        config = str(self.run / "config.yaml")
        labels = str(self.run / ANSWERS_FILE)
        words = ["adapt", "--config", config, "--labels", labels, "--out", str(self.out)]
        return words + [word for pair in self.pairs for word in ("--set", pair)]

    @property
    def command(self) -> str:
        """For the user to type."""
        return shlex.join(["usfan", *self.words])

    @property
    def status(self) -> str:
        """idle, running, failed or done."""
        if self.child is None:
            return "idle"
        code = self.child.poll()
        return "running" if code is None else "failed" if code else "done"

    def start(self) -> None:
        """Nothing if it runs already, or cannot."""
        if self.status == "running" or self.missing:
            return
        self.out = free_folder(self.run)
        self.line = "starting"
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "usfan", *self.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        threading.Thread(target=self.follow, args=(self.child,), daemon=True).start()

    def follow(self, child: subprocess.Popen[str]) -> None:
        """Read what the child writes until it ends."""
        assert child.stderr is not None
        with child.stderr as lines:
            for line in lines:
                self.line = line.strip() or self.line
        child.wait()

    def state(self) -> dict[str, object]:
        """State of the page, for JSON."""
        status = self.status
        line = self.line
        verdict = read(self.out, "metrics.json").get("verdict") if status == "done" else None
        if isinstance(verdict, dict):
            line = Verdict(**verdict).in_folder(shlex.quote(str(self.out)))
        return {
            "status": status,
            "line": line,
            "command": self.command,
            "missing": self.missing,
        }

    def close(self) -> None:
        """End the child, which takes at most five seconds; its run can be continued with --resume."""
        if self.child is not None and self.status == "running":
            self.child.terminate()
            self.child.wait()


def read(run: Path, name: str) -> dict[str, object]:
    with Folder(run) as folder:
        return read_mapping(folder, name, [])


def free_folder(run: Path) -> Path:
    """RUN-labelled, or RUN-labelled-2, … if there is one."""
    path = run.with_name(f"{run.name}-labelled")
    number = 1
    while path.exists():
        number += 1
        path = run.with_name(f"{run.name}-labelled-{number}")
    return path
