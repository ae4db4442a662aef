"""The run folder: config.yaml, metrics.json, log.jsonl, TensorBoard events, checkpoints; files are whole or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import reprlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from usfan.compute.runtime import Runtime
from usfan.config import WITHHELD
from usfan.config_checks import is_number
from usfan.errors import ArtifactError, ConfigError, UsfanError
from usfan.files import must_be_writable, read_yaml, write_json, write_tensors, write_text

CHECKPOINTS = "checkpoint"
Checkpoint = tuple[int, dict[str, Tensor], dict[str, Any]]
"""Epochs done, tensors, and the rest as JSON."""


def lock_folder(folder: Path) -> int:
    """The handle of the folder's lock, which holds until it is closed; a dead process's lock does not count."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise ConfigError(f"{folder} is in use by another process: wait for it, or choose another --out") from None
        raise
    return lock


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Only this process writes to the folder; what killed writers left in it is removed."""
    must_be_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        for inner in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
            remove_parts(inner)
        yield
    finally:
        os.close(lock)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers of `whole_file` left here. Only for the holder of the lock."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def mend_log(path: Path) -> None:
    """Cut off a last line that was only half written: a disk that was full, a machine that stopped."""
    if path.is_file():
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def read_run_config(folder: Path) -> dict[str, Any] | None:
    """The settings of a run folder; None if it holds none."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    try:
        value = read_yaml(path)
    except ValueError as error:
        raise ArtifactError(f"{path}: not readable as YAML: {error}") from None
    return value if isinstance(value, dict) else None


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """The settings of a run that differ from those it began with, in words: "lr 0.01, not 0.02"."""
    pairs = [(name, before.get(name), value) for name, value in now.items()]
    return [
        f"{word(name)} {word(then)}, not {word(value)}"
        for name, then, value in pairs
        if then != WITHHELD and plain(then) != plain(value)
    ]


def plain(value: Any) -> Any:
    """What a text stands for: a number, on or off, or itself."""
    if not isinstance(value, str):
        return value
    return float(value) if is_number(value) else {"on": True, "off": False}.get(value, value)


def word(value: Any) -> str:
    """A value as a user would write it; a stranger's text is escaped and cut."""
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "none"}[value]
    return value if isinstance(value, str) and value.isprintable() and len(value) < 200 else reprlib.repr(value)


class RunFolder:
    """One run's folder. A second process that opens it for writing is refused; a dead process's lock does not count.

    With `writes=False` (a process that follows the first one of the same run) it is only read.
    """

    def __init__(
        self, path: str | Path, config: dict[str, Any], *, command: str, resume: bool = False, writes: bool = True
    ) -> None:
        self.path = Path(path)
        self.command = command
        self.config = {"command": command, **config}
        self._writer: Any = None
        self._lock = -1
        self._made: list[Path] = []
        if not writes:
            return
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file: --out names a folder")
        self._made = [p for p in (self.path / "config.yaml", self.path / ".lock", self.path) if not p.exists()]
        must_be_writable(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.path)
        try:
            self._claim(resume)
        except BaseException:
            self._undo()
            raise

    def _claim(self, resume: bool) -> None:
        """Refuse a folder with something else in it; else write the settings."""
        before = self.read_config()
        if before is None and any(p for p in self.path.iterdir() if not p.name.startswith(".")) and not resume:
            raise ConfigError(f"{self.path} is not empty and is not a run folder: choose another --out")
        if before is not None and not resume:
            choice = "choose another --out" if self.command == "evaluate" else "pass --resume, or another --out"
            raise ConfigError(f"{self.path} already holds a run ({before.get('command', '?')}): {choice}")
        if before is not None:
            gone = {name: None for name in before if name not in self.config}
            changed = differences({**self.config, **gone}, before)
            if changed:
                found = f"{self.path} holds a run with other settings ({', '.join(changed)})"
                raise ConfigError(f"{found}: it cannot be resumed with these")
        for folder in (self.path, self.path / CHECKPOINTS):
            remove_parts(folder)
        mend_log(self.path / "log.jsonl")
        if before is None:
            write_text(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))

    def _undo(self) -> None:
        """Take back what was made here: nothing has been computed yet."""
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir() if path == self.path else path.unlink(missing_ok=True)
        self.close()

    def read_config(self) -> dict[str, Any] | None:
        return read_run_config(self.path)

    def log(self, event: str, **values: Any) -> None:
        """One line in log.jsonl, in one write."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, default=str) + "\n"
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(line)

    def scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        values = values.detach().float().cpu()
        finite = values[torch.isfinite(values)]
        if len(finite):  # TensorBoard draws none of nothing
            self.writer.add_histogram(name, finite.numpy(), step)

    @property
    def writer(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.path))
        return self._writer

    def save_metrics(self, metrics: dict[str, Any]) -> None:
        write_json(self.path / "metrics.json", metrics)

    def finished(self) -> dict[str, Any] | None:
        """The metrics of a run that ended, else None."""
        path = self.path / "metrics.json"
        if not path.is_file():
            return None
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            return json.loads(path.read_text(encoding="utf-8"))
        return None

    def save_checkpoint(self, epoch: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """The newest two are kept: should the last be bad, the one before is there."""
        folder = self.path / CHECKPOINTS
        write_tensors(folder / f"epoch-{epoch:05d}.safetensors", tensors, {"state": json.dumps(state)})
        for old in sorted(folder.glob("epoch-*.safetensors"))[:-2]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self, *, tensors: bool = True) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None. Without `tensors` only its epoch and state are read."""
        from safetensors import SafetensorError, safe_open

        for path in sorted((self.path / CHECKPOINTS).glob("epoch-*.safetensors"), reverse=True):
            try:
                with safe_open(path, "pt") as file:
                    state = json.loads(file.metadata()["state"])
                    if not isinstance(state, dict):
                        continue
                    names = file.keys() if tensors else ()
                    return int(path.stem.split("-")[1]), {k: file.get_tensor(k) for k in names}, state
            except (SafetensorError, OSError, KeyError, TypeError, ValueError):
                continue
        return None

    def drop_checkpoints(self) -> None:
        for path in (self.path / CHECKPOINTS).glob("*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            (self.path / CHECKPOINTS).rmdir()

    def withhold(self, *names: str) -> None:
        """For a private run that is done: these settings leave config.yaml. With no name all do, and log and curves go.

        The names of TensorBoard's files hold the name of the machine.
        """
        hidden = {k: WITHHELD if k != "command" and k in (names or self.config) else v for k, v in self.config.items()}
        write_text(self.path / "config.yaml", yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True))
        if names:
            return
        write_text(self.path / "log.jsonl", json.dumps({"event": "finished", "private": True}) + "\n")
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for path in self.path.glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A user's mistake that is found before the first epoch leaves nothing behind."""
        if kind is not None and issubclass(kind, UsfanError) and not (self.path / "log.jsonl").exists():
            self._undo()
        self.close()


@contextlib.contextmanager
def open_run(
    runtime: Runtime, path: str | Path, config: dict[str, Any], *, command: str, resume: bool = False
) -> Iterator[RunFolder]:
    """The folder of a run, which the first process writes and the others read. What went wrong only the first says."""
    opened = False
    try:
        run = RunFolder(path, config, command=command, resume=resume, writes=runtime.rank == 0)
        opened = True
    finally:
        if not runtime.agree(opened) and opened:
            raise SystemExit(0)
    try:
        with run:
            yield run
    except UsfanError:  # a user's mistake is the same in all processes
        if runtime.rank == 0:
            raise
        raise SystemExit(0) from None


def load_checkpoint(run: RunFolder | None, runtime: Runtime) -> Checkpoint | None:
    """The newest checkpoint of the run folder, which every process reads; None where there is none."""
    found = None if run is None else run.load_checkpoint()
    if not runtime.agree(found[0] if found else 0):
        raise ArtifactError(
            "the processes found different checkpoints: the run folder must lie where all nodes can read it"
        )
    return found
