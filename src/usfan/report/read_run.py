"""Read a run folder as it is. Missing or damaged parts are noted in `problems` and shown on the page."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from usfan.errors import DataError
from usfan.files import Folder, parse_json
from usfan.report.blocks import is_number
from usfan.report.read_samples import Samples, first_words, read_mapping, read_samples

MARKS = ("config.yaml", "metrics.json", "log.jsonl", "samples.safetensors", "config.json")
"""A folder with none of these is no run."""
LOG = "log.jsonl"
MOST_LOG = 64 << 20
MOST_LINES = 200_000
MOST_ENTRY = 64 << 20
"""Bytes of the log, lines of the log, and bytes that one of its lines may take when it is read."""
EXPECTED = {
    "adapt": ("config.yaml", "metrics.json", "log.jsonl", "samples.safetensors", "samples.json"),
    "train": ("config.yaml", "metrics.json", "log.jsonl"),
    "posterior": ("config.yaml", "metrics.json"),
    "evaluate": ("config.yaml", "metrics.json"),
}
WITHOUT = {
    "config.yaml": "the settings of the run are not known",
    "metrics.json": "the run has not finished, or was interrupted",
    "log.jsonl": "there is no record of each epoch",
    "samples.safetensors": "what needs each image's prediction is left out",
    "samples.json": "class names and file names are not known",
}


@dataclass
class Run:
    """What could be read of one run folder."""

    path: Path
    name: str
    kind: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """config.json of the model folder."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    times: tuple[float, float] | None = None
    """When the first and the last line were logged, seconds since 1970."""
    samples: Samples | None = None
    problems: list[str] = field(default_factory=list)

    def figures(self, when: str) -> dict[str, Any]:
        """The evaluation `before` or `after`; empty without labels."""
        value = self.metrics.get(when)
        return value if isinstance(value, dict) else {}


def read_runs(paths: list[Path], root: Path | None = None) -> list[Run]:
    """`root` is the folder that images may be shown from; without it, those of runs made here."""
    if not paths:
        raise DataError("no run folder was given: name at least one")
    return [read_run(path, name, root) for path, name in zip(paths, short_names(paths), strict=True)]


def read_run(path: Path, name: str | None = None, root: Path | None = None) -> Run:
    if not path.is_dir():
        raise DataError(f"{path} is not a folder: give the --out of a run")
    with Folder(path) as folder:
        return read_folder(folder, name or path.resolve().name, root)


def read_folder(folder: Folder, name: str, root: Path | None) -> Run:
    path = folder.path
    if not any(folder.holds(mark) for mark in MARKS):
        raise DataError(f"{path} is not a run folder: it holds none of {', '.join(MARKS)}")
    run = Run(path, name)
    run.settings = {k: short_path(v) for k, v in read_mapping(folder, "config.yaml", run.problems).items()}
    run.metrics = read_mapping(folder, "metrics.json", run.problems)
    run.model = read_mapping(folder, "config.json", run.problems)
    read_log(folder, run)
    run.kind = kind_of(folder, run)
    classes = run.model.get("classes")
    run.samples = read_samples(folder, classes if isinstance(classes, list) else None, run.problems, root)
    if not run.epochs and isinstance(run.metrics.get("validators_by_epoch"), list):
        rows = [r for r in run.metrics["validators_by_epoch"] if isinstance(r, dict) and is_epoch(r.get("epoch"))]
        run.epochs = [{"epoch": r["epoch"], "validators": {k: r[k] for k in r if k != "epoch"}} for r in rows]
    if run.model and not run.settings and not run.metrics and run.samples is None:
        run.problems.append(
            "This folder holds a model alone: charts need what was seen of each image. `usfan adapt … --out FOLDER` "
            'keeps it; in Python give adapt a folder, run="FOLDER", or call target.report("FILE.html").'
        )
    missing = [f for f in EXPECTED.get(run.kind, ()) if not folder.holds(f)]
    run.problems[:0] = [f"{f} is missing: {WITHOUT[f]}." for f in missing]
    return run


def read_log(folder: Folder, run: Run) -> None:
    """The epochs, each once (a resumed run logs some again: the later counts), and what was kept."""
    if folder.kind(LOG) == "missing":
        return
    try:
        lines = folder.read(LOG, MOST_LOG).split(b"\n")[:MOST_LINES]
    except (OSError, ValueError) as error:
        run.problems.append(f"log.jsonl cannot be read: {first_words(error, folder)}.")
        return
    bad, epochs, times = 0, {}, []
    lines = [line for line in lines if line.strip()]
    for line in lines:
        try:
            entry = parse_json(line, MOST_ENTRY)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            bad += 1
            continue
        if is_number(entry.get("time")):
            times.append(float(entry["time"]))
        if entry.get("event") == "epoch" and is_epoch(entry.get("epoch")):
            epochs[entry["epoch"]] = entry
        elif entry.get("event") == "kept":
            run.kept = entry
    if bad:
        run.problems.append(f"log.jsonl: {bad} of {len(lines)} lines cannot be read and were left out.")
    run.epochs = [epochs[e] for e in sorted(epochs)]
    run.times = (min(times), max(times)) if times else None


def is_epoch(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1_000_000


def kind_of(folder: Folder, run: Run) -> str:
    """The command that made it, or the one whose files it looks like."""
    command = str(run.settings.get("command", ""))
    if command in EXPECTED:
        return command
    if "kept_epoch" in run.metrics or folder.holds("samples.safetensors"):
        return "adapt"
    if "log_evidence" in run.metrics:
        return "posterior"
    if "best_epoch" in run.metrics:
        return "train"
    return "evaluate" if "accuracy" in run.metrics else command


def short_names(paths: list[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    deepest = max(len(p) for p in parts)
    for depth in range(1, deepest + 1):
        names = ["/".join(p[-depth:]).replace("//", "/") for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: dict[str, int] = {}
    for i, name in enumerate(names):  # the same folder given twice
        seen[name] = seen.get(name, 0) + 1
        names[i] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def short_path(value: Any) -> Any:
    """A page goes to others: of an absolute path it shows the end."""
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.join("…", *Path(value).parts[-2:]) if len(Path(value).parts) > 3 else value
    return value
