"""A folder that holds runs (of the demo, of a morning's work) or a study: the runs below it, and their tables."""

from __future__ import annotations

from pathlib import Path

from usfan.files import Folder
from usfan.metrics.stored_images import PREDICTIONS_FILE, read_mapping
from usfan.report.blocks import Block, Note, Section, Table
from usfan.report.formatting import mapping
from usfan.report.tables import figures_table, metrics_tables

DEEPEST = 3
"""Folders below the one that was named."""
MOST_RUNS = 24
"""Runs that one page shows."""
MOST_NAMES = 10_000
"""Names in a folder that are looked at."""


def holds_any(path: Path, *names: str) -> bool:
    return any((path / name).is_file() for name in names)


def runs_below(path: Path, depth: int = DEEPEST) -> list[Path]:
    """The runs in a folder, by name. A model alone, which is what runs start from, is none."""
    if depth == 0:
        return []
    runs: list[Path] = []
    for inner in inner_folders(path):
        if holds_any(inner, "config.yaml", "log.jsonl", PREDICTIONS_FILE):
            runs.append(inner)
        else:
            runs += runs_below(inner, depth - 1)
    return runs


def inner_folders(path: Path) -> list[Path]:
    """The folders inside. The folder may be a stranger's, so links in it are not followed."""
    with Folder(path) as folder:
        names = [
            name for name in folder.names()[:MOST_NAMES] if folder.kind(name) == "a folder"
        ]
    return [path / name for name in names if not name.startswith((".", "checkpoint"))]


def expand(paths: list[Path]) -> tuple[list[Path], list[Section]]:
    """The runs to show, and sections about the folders that hold several, or a study. A folder that is a run itself, or
    none of these, stays: `read_run` says what it expects."""
    runs: list[Path] = []
    sections: list[Section] = []
    for path in paths:
        is_model = holds_any(path, PREDICTIONS_FILE, "config.json")
        inner = runs_below(path) if path.is_dir() and not is_model else []
        if inner or holds_any(path, "table.json"):
            sections.append(folder_section(f"all{len(sections) or ''}", path, inner))
            runs += inner[:MOST_RUNS]
        else:
            runs.append(path)
    return runs, sections


def folder_section(
    id: str,
    path: Path,
    runs: list[Path],
) -> Section:
    """The tables that lie in the folder itself."""
    problems: list[str] = []
    blocks: list[Block] = []
    with Folder(path) as folder:
        table = read_mapping(folder, "table.json", problems)
        if table:
            blocks.append(study_table(id, table))
        else:
            blocks += metrics_tables(id, read_mapping(folder, "metrics.json", problems))
    blocks += [Note(problem) for problem in problems]
    intro = f"Runs in this folder: {len(runs)}." if runs else ""
    if len(runs) > MOST_RUNS:
        intro = f"{intro} The first {MOST_RUNS} are shown."
    return Section(id, f"All of {path.resolve().name}", blocks, intro, 2)


def study_table(id: str, table: dict[str, object]) -> Table:
    """The means of a study: a row for each method, a column for each task."""
    columns = table.get("columns")
    rows: dict[str, object] = {}
    for method, averages in mapping(table.get("results")).items():
        row = {}
        for column, average in mapping(averages).items():
            if isinstance(columns, list) and column in columns:
                row[column] = mapping(average).get("mean")
        rows[method] = row
    return figures_table(f"{id}-study", f"{table.get('title')}: {table.get('metric')}", rows)
