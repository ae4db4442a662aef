"""Run folders as they are. Files that are missing or damaged are named in `problems`, which the page shows."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeGuard, TypeVar

from usfan.data.lists import Entry, entries_of
from usfan.errors import DataError, printable
from usfan.files import Folder, parse_json
from usfan.labelling.answers import ANSWERS_FILE, Answer, answers_of
from usfan.metrics.stored_images import (
    NAMES_FILE,
    PREDICTIONS_FILE,
    ImageTable,
    damaged,
    read_image_table,
    read_mapping,
)
from usfan.report.formatting import is_number, mapping

RUN_FILES = ("config.yaml", "metrics.json", "log.jsonl", PREDICTIONS_FILE, "config.json")
"""A folder with none of these is no run."""
LOG = "log.jsonl"
QUESTIONS = "label_first.csv"
MOST_LOG = 64 << 20
MOST_LINES = 200_000
MOST_ENTRY = 64 << 20
"""Bytes of the log, lines of the log, and bytes that one of its lines may take when it is read."""
LATEST = 2e11
"""Seconds since 1970 that a date can hold."""
COMMANDS = ("adapt", "train", "posterior", "evaluate")
ADAPT_FILES = ("config.yaml", "metrics.json", LOG, PREDICTIONS_FILE, NAMES_FILE)
MODEL_ALONE = (
    "This folder holds a model alone: charts need the predictions of a run. `usfan adapt … --out FOLDER` "
    'writes them; in Python give adapt a folder, run="FOLDER", or call target.report("FILE.html").'
)
Row = TypeVar("Row")
Figures = dict[str, object]
"""Names and values of a file."""


@dataclass
class Run:
    """The readable parts of one run folder."""

    name: str
    kind: str = ""
    """The command: adapt, train, posterior or evaluate; empty if it is not known."""
    settings: Figures = field(default_factory=dict)
    metrics: Figures = field(default_factory=dict)
    model: Figures = field(default_factory=dict)
    """config.json of the model folder."""
    epochs: list[Figures] = field(default_factory=list)
    started: str = ""
    """The date and time of the first line of the log."""
    images: ImageTable | None = None
    questions: list[Entry] = field(default_factory=list)
    """The images to label first."""
    answers: list[Answer] = field(default_factory=list)
    """Of labels.csv."""
    problems: list[str] = field(default_factory=list)
    folder: str = ""
    """For commands on the page."""

    def figures(self, when: str) -> Figures:
        """The evaluation `before` or `after`; empty without labels."""
        return mapping(self.metrics.get(when))


def read_runs(paths: list[Path], root: Path | None = None) -> list[Run]:
    """`root` is the folder that images may be shown from; without it, those of runs made here."""
    if not paths:
        raise DataError("no run folder was given: name at least one")
    names = short_names(paths)
    return [read_run(path, name, root) for path, name in zip(paths, names, strict=True)]


def read_run(
    path: Path,
    name: str = "",
    root: Path | None = None,
) -> Run:
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: give a run folder")
    run = Run(printable(name or path.resolve().name))
    # a page goes to others: of an absolute path it shows the name alone
    run.folder = shlex.quote(run.name if path.is_absolute() else printable(str(path)))
    with Folder(path) as folder:
        if not any(folder.holds(file) for file in RUN_FILES):
            raise DataError(
                f"{path} is not a run folder: it holds none of {', '.join(RUN_FILES)}"
            )
        for setting, value in read_mapping(folder, "config.yaml", run.problems).items():
            run.settings[setting] = short_path(value)
        run.metrics = read_mapping(folder, "metrics.json", run.problems)
        stored = read_mapping(folder, "config.json", run.problems)
        inner = stored.get("usfan")  # beside the settings of transformers
        run.model = inner if isinstance(inner, dict) else stored
        read_log(folder, run)
        run.images = read_image_table(folder, run.problems, root)
        run.questions = read_rows(folder, QUESTIONS, run, entries_of)
        run.answers = read_rows(folder, ANSWERS_FILE, run, answers_of)
        command = str(run.settings.get("command", ""))
        if command in COMMANDS:
            run.kind = command
        elif run.images is not None:
            run.kind = "adapt"
        for file in ADAPT_FILES:
            if run.kind == "adapt" and folder.kind(file) == "missing":
                run.problems.append(f"{file} is missing.")
    if run.model and not run.settings and not run.metrics and run.images is None:
        run.problems.append(MODEL_ALONE)
    return run


def read_rows(
    folder: Folder, name: str, run: Run, parse: Callable[[str, str], list[Row]]
) -> list[Row]:
    """The rows of a table; none if it is missing, or damaged, which is a problem."""
    if folder.kind(name) == "missing":
        return []
    try:
        return parse(folder.read(name, MOST_LOG).decode("utf-8-sig"), name)
    except (OSError, ValueError) as error:
        run.problems.append(damaged(name, error, folder))
        return []


def read_log(folder: Folder, run: Run) -> None:
    """The epochs, each once: a resumed run logs some again, and the later counts."""
    if folder.kind(LOG) == "missing":
        return
    try:
        lines = folder.read(LOG, MOST_LOG).splitlines()[:MOST_LINES]
    except (OSError, ValueError) as error:
        run.problems.append(damaged(LOG, error, folder))
        return
    epochs: dict[int, Figures] = {}
    entries = [log_entry(line) for line in lines]
    if {} in entries:
        run.problems.append(f"{LOG} cannot be read: some of its lines are damaged.")
    for entry in entries:
        epoch = entry.get("epoch")
        if entry.get("event") == "epoch" and is_epoch(epoch):
            epochs[epoch] = entry
    run.epochs = [epochs[epoch] for epoch in sorted(epochs)]
    time = entries[0].get("time") if entries else None
    if is_number(time) and 0 <= time < LATEST:
        run.started = f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"


def log_entry(line: bytes) -> Figures:
    """One line of the log; empty if it is damaged."""
    try:
        return mapping(parse_json(line, MOST_ENTRY))
    except ValueError:
        return {}


def is_epoch(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 1_000_000


def short_names(paths: list[Path]) -> list[str]:
    """The paths below the folder that holds them all."""
    folders = [path.resolve() for path in paths]
    parent = os.path.commonpath(folders)
    names = []
    for folder in folders:
        inner = os.path.relpath(folder, parent)
        names.append(folder.name if inner == "." else inner)
    return names


def short_path(value: object) -> object:
    """A page goes to others: of an absolute path it shows the end."""
    if isinstance(value, str) and os.path.isabs(value) and len(Path(value).parts) > 3:
        return os.path.join("…", *Path(value).parts[-2:])
    return value
