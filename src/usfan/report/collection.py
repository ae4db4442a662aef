"""A folder that holds runs (of the demo, of a morning's work) or a study: the runs below it, and what they share."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from usfan.files import Folder
from usfan.report.blocks import Block, Cell, Section, Table, is_number
from usfan.report.gallery import run_picture
from usfan.report.read_run import MARKS, read_mapping
from usfan.report.tables import column_cells, metrics_tables

DEEPEST = 3
"""Folders below the one that was named."""
MOST = 24
"""Runs that one page shows."""
MOST_NAMES = 10_000
"""Names in a folder, and cells of a study, that are looked at."""


def is_run(path: Path) -> bool:
    """Whether a folder is itself a run, or a model, and not one that holds others."""
    if (path / "study.json").is_file() or (path / "results.json").is_file():
        return False
    if any((path / name).is_file() for name in ("samples.safetensors", "config.json", "toy.png")):
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
    table = study_table(id, path, problems)
    if table is not None:
        blocks += filter(None, (table, agreement_table(id, path, problems)))
    else:
        with Folder(path) as folder:
            if folder.holds("metrics.json"):
                blocks += metrics_tables(id, read_mapping(folder, "metrics.json", problems))
    for number, picture in enumerate(sorted(path.glob("*.png"))[:12]):
        name = picture.stem.replace("_", " ")
        blocks.append(run_picture(f"{id}-picture-{number}", picture, name, picture.name, name))
    shown = f"{len(below)} runs below {path}" + (f"; the first {MOST} are shown" if len(below) > MOST else "")
    return Section(id, f"All of {path.resolve().name}", f"{shown}." if below else f"What {path} holds.", blocks, 2)


def study_table(id: str, path: Path, problems: list[str]) -> Table | None:
    """Mean accuracy (or HOS) of each method on each task over the seeds, from the cells of a study."""
    rows = study_rows(path, problems)
    if not rows:
        return None
    key = "hos" if all(is_number(row.get("hos")) for row in rows) else "accuracy"
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    tasks = list(dict.fromkeys(str(row["task"]) for row in rows))
    values: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if is_number(row.get(key)):
            values.setdefault((str(row["method"]), str(row["task"])), []).append(float(row[key]))
    columns = {t: [statistics.fmean(v) if (v := values.get((m, t))) else None for m in methods] for t in tasks}
    means = [[c[i] for c in columns.values()] for i in range(len(methods))]
    if len(tasks) > 1:
        columns["mean"] = [
            statistics.fmean(known) if (known := [v for v in m if v is not None]) else None for m in means
        ]
    marked = {n: ["best" if v is not None and v == max(x for x in c if x is not None) else "" for v in c]
              for n, c in columns.items()}  # fmt: skip
    cells = {name: column_cells(column, marked[name]) for name, column in columns.items()}
    seeds = len({row.get("seed") for row in rows})
    caption = (
        f"{'HOS' if key == 'hos' else 'Accuracy'} in %, mean of {seeds} seed{'s' if seeds > 1 else ''}; best in bold."
    )
    table = [[Cell(m, m), *(cells[name][i] for name in columns)] for i, m in enumerate(methods)]
    return Table(f"{id}-study", "Methods and tasks", caption, ["method", *columns], table, wide=True)


def agreement_table(id: str, path: Path, problems: list[str]) -> Table | None:
    """On how many images the runs with different seeds agree, from agreement.json; None of one seed."""
    with Folder(path) as folder:
        found = read_mapping(folder, "agreement.json", problems) if folder.holds("agreement.json") else {}
    rows = {name: row for name, row in found.items() if isinstance(row, dict)}
    if not rows:
        return None
    columns = list(dict.fromkeys(str(name) for row in rows.values() for name in row))[:MOST_NAMES]
    cells = {name: column_cells([row.get(name) for row in rows.values()]) for name in columns}
    table = [[Cell(m, m), *(cells[name][i] for name in columns)] for i, m in enumerate(map(str, rows))]
    caption = "Share of the target's images with the same prediction, in %, mean over pairs of seeds; no label is used."
    return Table(f"{id}-agreement", "Agreement between seeds", caption, ["method", *columns], table, wide=True)


def study_rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    with Folder(path) as folder:
        rows = read_mapping(folder, "results.json", problems).get("rows")
        if not isinstance(rows, list):  # a study that is still running
            rows = []
            if folder.kind("cells") == "a folder":
                with folder.inner("cells") as cells:
                    names = [name for name in cells.names()[:MOST_NAMES] if name.endswith(".json")]
                    rows = [read_mapping(cells, name, problems) for name in names]
    return [row for row in rows if isinstance(row, dict) and {"method", "task"} <= row.keys()]
