"""A folder that holds runs (of the demo, of a morning's work) or a study: the runs below it, and what they share."""

from __future__ import annotations

from pathlib import Path

from usfan.files import Folder
from usfan.report.blocks import Block, Section
from usfan.report.gallery import run_picture
from usfan.report.read_run import MARKS
from usfan.report.read_samples import read_mapping
from usfan.report.study import study_blocks, study_line, study_rows
from usfan.report.tables import metrics_tables

DEEPEST = 3
"""Folders below the one that was named."""
MOST = 24
"""Runs that one page shows."""
MOST_NAMES = 10_000
"""Names in a folder that are looked at."""
PICTURES = {"table": "Methods and tasks as bars", "toy": "Toy: regions by point estimate and posterior"}
"""Titles of pictures whose file names say little."""


def is_run(path: Path) -> bool:
    """Whether a folder is itself a run, or a model, and not one that holds others."""
    if (path / "study.json").is_file() or (path / "results.json").is_file():
        return False
    if any((path / name).is_file() for name in ("samples.safetensors", "config.json")):
        return True
    return any((path / name).is_file() for name in MARKS) and not runs_below(path)


def runs_below(path: Path, depth: int = DEEPEST) -> list[Path]:
    """The runs in a folder, by name. A model alone, which is what runs start from, is none."""
    found: list[Path] = []
    if depth == 0 or not path.is_dir():
        return found
    for inner in inner_folders(path):
        if any((inner / name).is_file() for name in ("config.yaml", "samples.safetensors", "log.jsonl")):
            found.append(inner)
        else:
            found += runs_below(inner, depth - 1)
    return found


def inner_folders(path: Path) -> list[Path]:
    """Those that lie here themselves: the folder may be a stranger's, so links in it are not followed."""
    with Folder(path) as folder:
        names = [name for name in folder.names()[:MOST_NAMES] if folder.kind(name) == "a folder"]
    return [path / name for name in names if not name.startswith((".", "checkpoint"))]


def expand(paths: list[Path]) -> tuple[list[Path], list[Section]]:
    """The runs to show, and sections about the folders that hold several; what is no folder of runs stays."""
    runs: list[Path] = []
    sections: list[Section] = []
    for path in paths:
        if not path.is_dir() or is_run(path):
            runs.append(path)
            continue
        below = runs_below(path)
        section = shared_section(f"all{len(sections) or ''}", path, below)
        if not below and not section.blocks:
            runs.append(path)  # nothing of ours: `read_run` says what was expected
            continue
        runs += below[:MOST]
        sections.append(section)
    return runs, sections


def shared_section(id: str, path: Path, below: list[Path]) -> Section:
    """The tables and pictures that lie in the folder itself."""
    problems: list[str] = []
    blocks: list[Block] = []
    rows = study_rows(path, problems)
    if rows:
        blocks += study_blocks(id, path, rows, problems)
    else:
        with Folder(path) as folder:
            if folder.holds("metrics.json"):
                blocks += metrics_tables(id, read_mapping(folder, "metrics.json", problems))
    for number, picture in enumerate(sorted(path.glob("*.png"))[:12]):
        name = PICTURES.get(picture.stem, picture.stem.replace("_", " "))
        blocks.append(run_picture(f"{id}-picture-{number}", picture, name, picture.name, name))
    shown = f"{len(below)} runs below {path}" + (f"; the first {MOST} are shown" if len(below) > MOST else "")
    about = f"{shown}." if below else study_line(path, rows, problems) if rows else f"What {path} holds."
    return Section(id, f"All of {path.resolve().name}", about, blocks, 2)
