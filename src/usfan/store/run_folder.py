"""The run folder: config.yaml, metrics.json, log.jsonl, TensorBoard events, checkpoints; files are whole or absent."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import reprlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.config import WITHHELD
from usfan.engine.runtime import Runtime
from usfan.errors import ArtifactError, ConfigError, UsfanError, option, printable
from usfan.files import (
    MOST_YAML,
    Folder,
    finish_writing,
    must_be_writable,
    parse_json,
    read_in,
    remove_parts_of,
    write_json,
    write_tensors_in,
    write_text,
    write_yaml,
)
from usfan.store.schema import JsonTable
from usfan.store.trackers import Trackers, check_tracker
from usfan.tensor_file import open_tensors_in

CHECKPOINTS = "checkpoint"
CONFIG = "config.yaml"
LOG = "log.jsonl"
_CHECKPOINT = re.compile(r"epoch-(\d{5,9})\.safetensors")
MISFITS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
)
"""Errors of a state that does not fit the object it is loaded into."""
Checkpoint = tuple[int, dict[str, Tensor], JsonTable]
"""Epochs done, tensors, and the rest as JSON."""


def lock_folder(folder: Folder) -> int:
    """The handle of the folder's lock, which holds until it is closed; a dead process's lock does not count."""
    try:
        return folder.lock(".lock")
    except BlockingIOError:
        raise ConfigError(
            f"{folder.path} is in use by another process: wait for it, or choose another {option('run')}"
        ) from None


@contextlib.contextmanager
def folder_lock(path: Path, command: str) -> Iterator[None]:
    """Only this process writes to the folder of a study or of the demo; what killed writers left in it is removed."""
    must_be_writable(path)
    with Folder(path, create=True) as folder:
        check_study_folder(folder, command)
        lock = lock_folder(folder)
        try:
            for place, names, _, inner in os.fwalk(".", dir_fd=folder.fd):  # follows no link
                for name in names:
                    if os.path.islink(path / place / name):
                        raise ConfigError(
                            f"{path / place / name} is a link: a study's folder holds its own files"
                        )
                remove_parts_of(Folder(path / place, descriptor=inner))
            yield
        finally:
            os.close(lock)


def check_study_folder(folder: Folder, command: str) -> None:
    """Raise unless the folder is empty, or this command began it. The demo and the digits have no settings there."""
    config = read_config_in(folder)
    if config is None:
        is_used = any(not name.startswith(".") for name in folder.names())
        belongs = not is_used or (command != "study" and folder.kind(".lock") == "a file")
    else:
        belongs = config.get("command") == command
    if not belongs:
        raise ConfigError(
            f"{folder.path} is not empty, and usfan {command} did not make it: choose another {option('out')}"
        )


def mend_log(folder: Folder) -> None:
    """Cut off a last line that was only half written: a disk that was full, a machine that stopped."""
    if folder.kind(LOG) == "missing":
        return
    with folder.in_place(LOG, append=False) as file:
        end = file.read().rfind(b"\n") + 1
        file.truncate(end)


def read_run_config(folder: Path) -> JsonTable | None:
    """The settings of a run folder; None if it holds none."""
    if not folder.is_dir():
        return None
    with Folder(folder) as opened:
        return read_config_in(opened)


def read_config_in(folder: Folder) -> JsonTable | None:
    if folder.kind(CONFIG) == "missing":
        return None
    settings = read_in(folder, CONFIG, MOST_YAML)
    if not isinstance(settings, dict):
        return None
    return {str(name): value for name, value in settings.items()}


def differences(now: JsonTable, before: JsonTable) -> str:
    """The settings of a run that differ from those it began with: "lr 0.01, not 0.02"."""
    changes = []
    for name in {**before, **now}:
        value = now.get(name)
        previous = before.get(name)
        if previous not in (value, WITHHELD):
            changes.append(f"{word(name)} {word(previous)}, not {word(value)}")
    return printable(", ".join(changes), 600)


def word(value: object) -> str:
    """A value as a user would write it."""
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "none"}[value]
    return value if isinstance(value, str) else reprlib.repr(value)


class RunFolder:
    """One run's folder. A second process that opens it for writing is refused; a dead process's lock does not count.

    With `writes=False` (a process that follows the first one of the same run) it is only read.
    """

    def __init__(
        self,
        path: str | Path,
        config: JsonTable,
        *,
        command: str,
        resume: bool = False,
        writes: bool = True,
        tracker: str = "tensorboard",
    ) -> None:
        check_tracker(tracker)
        self.tracker = tracker
        self.path = Path(path)
        self.command = command
        self.config = {"command": command, **config}
        self._exit = contextlib.ExitStack()
        self._new_paths: list[Path] = []
        if not writes:
            self.folder = self._exit.enter_context(Folder(self.path))
            return
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file: {option('run')} names a folder")
        paths = (self.path / CONFIG, self.path / ".lock", self.path)
        new_paths = [path for path in paths if not path.exists()]
        must_be_writable(self.path)
        self.folder = self._exit.enter_context(Folder(self.path, create=True))
        try:
            self._exit.callback(os.close, lock_folder(self.folder))
            self._new_paths = new_paths
            self._claim(resume)
        except BaseException:
            self._undo()
            raise

    def _claim(self, resume: bool) -> None:
        """Refuse a folder with other content; else write the settings."""
        before = read_config_in(self.folder)
        content = [name for name in self.folder.names() if not name.startswith(".")]
        if before is None and content:
            raise ConfigError(
                f"{self.path} is not empty and is not a run folder: choose another {option('run')}"
            )
        if before is not None:
            self._check_same_run(before, resume)
        finish_writing(self.folder)
        remove_parts_of(self.folder)
        if self.folder.kind(CHECKPOINTS) != "missing":
            with self.folder.inner(CHECKPOINTS) as inner:
                remove_parts_of(inner)
        mend_log(self.folder)
        if before is None:
            write_yaml(self.path / CONFIG, self.config)

    def _check_same_run(self, before: JsonTable, resume: bool) -> None:
        if not resume:
            choice = f"pass {option('resume', True)}, or another {option('run')}"
            if self.command == "evaluate":
                choice = f"choose another {option('run')}"
            command = printable(before.get("command", "?"), 40)
            raise ConfigError(f"{self.path} already holds a run ({command}): {choice}")
        changes = differences(self.config, before)
        if changes:
            raise ConfigError(
                f"{self.path} holds a run with other settings ({changes}): "
                f"leave these settings out to continue it, or choose another {option('run')}"
            )

    def _undo(self) -> None:
        """Remove the files that this process created: nothing has been computed yet."""
        for path in self._new_paths:
            with contextlib.suppress(OSError):
                path.rmdir() if path == self.path else path.unlink(missing_ok=True)
        self.close()

    def first_record(self, name: str, record: JsonTable) -> JsonTable:
        """The record that the run wrote under this name first; `record` is written if there is none."""
        if self.folder.kind(name) == "missing":
            write_json(self.path / name, record)
            return record
        before = read_in(self.folder, name, MOST_YAML)
        return before if isinstance(before, dict) else {}

    def inside(self, name: str) -> Path:
        """A folder in this one, made if it is missing; a link at the name is refused."""
        with self.folder.inner(name, create=True) as inner:
            return inner.path

    def log(self, event: str, **values: Any) -> None:
        """One line in log.jsonl, in one write."""
        entry = {"event": event, "time": round(time.time(), 3), **values}
        line = json.dumps(entry, default=str) + "\n"
        with self.folder.in_place(LOG, append=True) as file:
            file.write(line.encode())

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.trackers.scalars(values, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        values = values.detach().float().cpu()
        finite = values[torch.isfinite(values)]
        if len(finite):  # TensorBoard draws none of nothing
            self.trackers.histogram(name, finite.numpy(), step)

    @functools.cached_property
    def trackers(self) -> Trackers:
        """Opened by the first figure: a run that is finished already has none to give."""
        names = tuple(dict.fromkeys(("tensorboard", self.tracker)))
        return Trackers(names, self.path, self.config)

    def save_metrics(self, metrics: JsonTable) -> None:
        write_json(self.path / "metrics.json", metrics)

    def finished(self) -> JsonTable | None:
        """The metrics of a run that ended, else None."""
        if self.folder.kind("metrics.json") == "missing":
            return None
        with contextlib.suppress(ArtifactError):
            metrics: JsonTable = read_in(self.folder, "metrics.json")
            return metrics
        return None

    def save_checkpoint(self, epoch: int, tensors: dict[str, Tensor], state: JsonTable) -> None:
        """Write a checkpoint, and keep the one before, in case that this one is damaged."""
        with self.folder.inner(CHECKPOINTS, create=True) as inner:
            write_tensors_in(
                inner, f"epoch-{epoch:05d}.safetensors", tensors, {"state": json.dumps(state)}
            )
            for old in checkpoints(inner)[:-2]:
                inner.remove(old)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that can be read, or None."""
        with contextlib.suppress(FileNotFoundError), self.folder.inner(CHECKPOINTS) as inner:
            for name in reversed(checkpoints(inner)):
                with contextlib.suppress(*MISFITS):
                    return read_checkpoint(inner, name)
        return None

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Around what puts a checkpoint's state in place: one that does not fit the run is named."""
        try:
            yield
        except UsfanError:
            raise
        except MISFITS as error:
            reason = printable(" ".join(str(error).split()), 120)
            raise ArtifactError(
                f"{self.path / CHECKPOINTS}: a checkpoint does not fit this run ({type(error).__name__}: "
                f"{reason}). Another version of usfan began the run, or the file "
                "is damaged: resume with that version, or remove this checkpoint folder to start the run again"
            ) from None

    def drop_checkpoints(self) -> None:
        with contextlib.suppress(OSError):
            with self.folder.inner(CHECKPOINTS) as inner:
                for name in inner.names():
                    inner.remove(name)
            os.rmdir(CHECKPOINTS, dir_fd=self.folder.fd)

    def withhold(self, *names: str) -> None:
        """For a private run that is done: these settings leave config.yaml, or with no name all of them and the log.

        Curves go too: they hold the time of every epoch.
        """
        hidden = dict.fromkeys(names or self.config, WITHHELD)
        hidden["command"] = self.command
        public = {name: hidden.get(name, value) for name, value in self.config.items()}
        write_yaml(self.path / CONFIG, public)
        for name in self.folder.names():
            if name.startswith("events.out.tfevents."):
                self.folder.remove(name)
        if not names:
            write_text(
                self.path / LOG, json.dumps({"event": "finished", "private": True}) + "\n"
            )

    def close(self, *, failed: bool = False) -> None:
        if "trackers" in vars(self):
            self.trackers.close(failed=failed)
        self._exit.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A user's mistake before the first epoch leaves nothing behind."""
        mistake = kind is not None and issubclass(kind, UsfanError)
        if mistake and not os.path.lexists(self.path / LOG):
            self._undo()
        self.close(failed=kind is not None)


def checkpoints(folder: Folder) -> list[str]:
    """Their names, the oldest first."""
    return sorted(name for name in folder.names() if _CHECKPOINT.fullmatch(name))


def read_checkpoint(folder: Folder, name: str) -> Checkpoint:
    with open_tensors_in(folder, name) as file:
        state = parse_json(file.metadata()["state"].encode())
        if not isinstance(state, dict):
            raise ValueError("its state is not a table")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    epoch = name.removeprefix("epoch-").removesuffix(".safetensors")
    return int(epoch), tensors, state


@contextlib.contextmanager
def open_run(
    runtime: Runtime,
    path: str | Path,
    config: JsonTable,
    *,
    command: str,
    resume: bool = False,
    tracker: str = "tensorboard",
) -> Iterator[RunFolder]:
    """The folder of a run, which the first process writes and the others read. Only the first reports an error."""
    run = None
    try:
        if runtime.rank == 0:
            run = RunFolder(path, config, command=command, resume=resume, tracker=tracker)
    finally:
        is_open = run is not None or runtime.rank > 0
        if not runtime.agree(is_open) and is_open:
            raise SystemExit(0)
    run = run or RunFolder(path, config, command=command, writes=False)
    try:
        with run:
            yield run
    except UsfanError:  # a user's mistake is the same in all processes
        if runtime.rank == 0:
            raise
        raise SystemExit(0) from None


def must_fit(state: dict[str, Tensor], network: torch.nn.Module) -> None:
    """ValueError unless a state that is put in place later is empty, or one of this network."""
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    if state and {name: tensor.shape for name, tensor in state.items()} != expected:
        raise ValueError("a state in it is that of another network")


def checked_records(records: list[JsonTable]) -> list[JsonTable]:
    """The epochs in a checkpoint; raises if one lacks its number, or its figures are not numbers."""
    checked = []
    for record in records:
        validators = {str(name): float(value) for name, value in record["validators"].items()}
        checked.append({**record, "epoch": int(record["epoch"]), "validators": validators})
    return checked


def load_checkpoint(run: RunFolder | None, runtime: Runtime) -> Checkpoint | None:
    """The newest checkpoint of the run folder, which every process reads; None if there is none."""
    checkpoint = None if run is None else run.load_checkpoint()
    if not runtime.agree(checkpoint[0] if checkpoint else 0):
        raise ArtifactError(
            "the processes found different checkpoints: the run folder must lie where all nodes can read it"
        )
    return checkpoint
