"""A study as tables: each method over all tasks, each task, and how far the seeds agree."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from usfan.errors import shown
from usfan.files import Folder
from usfan.report.blocks import Block, Cell, Table, is_number
from usfan.report.read_samples import read_mapping
from usfan.report.tables import column_cells

MOST_CELLS = 10_000
"""Cells of a study, and columns of a table, that are looked at."""
FIGURES = {"ece": "ECE (%)", "posterior_ece": "ECE of the posterior (%)", "seconds": "seconds"}
"""Further figures of a cell, of which less is better."""

Row = dict[str, Any]


def study_rows(path: Path, problems: list[str]) -> list[Row]:
    """The rows of a study: from results.json, or from its cells while it is running."""
    with Folder(path) as folder:
        rows = read_mapping(folder, "results.json", problems).get("rows")
        if not isinstance(rows, list):
            rows = []
            if folder.kind("cells") == "a folder":
                with folder.inner("cells") as cells:
                    names = [name for name in cells.names()[:MOST_CELLS] if name.endswith(".json")]
                    rows = [read_mapping(cells, name, problems) for name in names]
    return [row for row in rows if isinstance(row, dict) and {"method", "task"} <= row.keys()]


def study_line(path: Path, rows: list[Row], problems: list[str]) -> str:
    """What was run: `36 cells: 3 methods, 6 tasks, 2 seeds; tf_efficientnet_lite0 on CPU.`"""
    with Folder(path) as folder:
        study = read_mapping(folder, "study.json", problems) if folder.holds("study.json") else {}
    counts = [
        f"{n} {word}{'' if n == 1 else 's'}"
        for word in ("method", "task", "seed")
        for n in (len({str(row.get(word)) for row in rows}),)
    ]
    source, hardware = study.get("source"), study.get("hardware")
    network = source.get("backbone") if isinstance(source, dict) else None
    place = [shown(text, 80) for text in (network, f"on {hardware}" if hardware else None) if text]
    text = f"{len(rows)} cell{'' if len(rows) == 1 else 's'}: {', '.join(counts)}"
    return f"{text}; {' '.join(place)}." if place else f"{text}."


def study_blocks(id: str, path: Path, rows: list[Row], problems: list[str]) -> list[Block]:
    with Folder(path) as folder:
        agreed = read_mapping(folder, "agreement.json", problems) if folder.holds("agreement.json") else {}
    agreed = {str(name): row for name, row in agreed.items() if isinstance(row, dict)}
    key = "hos" if all(is_number(row.get("hos")) for row in rows) else "accuracy"
    blocks: list[Block] = [method_table(id, rows, key, agreed), task_table(id, rows, key)]
    return [*blocks, agreement_table(id, agreed)] if agreed else blocks


def method_table(id: str, rows: list[Row], key: str, agreed: dict[str, Row]) -> Table:
    """One line per method: the figures of all its cells."""
    methods = in_order(rows, "method")
    by_seed = [seed_means([row for row in rows if str(row["method"]) == m], key) for m in methods]
    columns: dict[str, tuple[list[float | None], Callable[[Sequence[float]], float] | None]] = {
        f"{title(key)} (%)": ([mean(list(seeds.values())) for seeds in by_seed], max)
    }
    if any(len(seeds) > 1 for seeds in by_seed):
        spread = [statistics.stdev(s.values()) if len(s) > 1 else None for s in by_seed]
        columns["± over seeds"] = (spread, None)
    for name, heading in FIGURES.items():
        values = [mean(numbers([r for r in rows if str(r["method"]) == m], name)) for m in methods]
        if any(v is not None for v in values):
            columns[heading] = (values, min if name != "seconds" else None)
    if agreed:
        shares = [agreed.get(m, {}).get("avg") for m in methods]
        columns["seeds agree (%)"] = ([float(v) if is_number(v) else None for v in shares], None)
    cells = {name: marked(values, best) for name, (values, best) in columns.items()}
    lines = [[Cell(m, m), *(cells[name][i] for name in columns)] for i, m in enumerate(methods)]
    caption = "Mean over tasks and seeds; best in bold."
    return Table(f"{id}-methods", "Methods", caption, ["method", *columns], lines, wide=True)


def task_table(id: str, rows: list[Row], key: str) -> Table:
    """Each method on each task, mean over the seeds."""
    methods, tasks = in_order(rows, "method"), in_order(rows, "task")
    found = {(m, t): [] for m in methods for t in tasks}  # type: dict[tuple[str, str], list[Row]]
    for row in rows:
        found[str(row["method"]), str(row["task"])].append(row)
    columns = {t: marked([mean(numbers(found[m, t], key)) for m in methods], max) for t in tasks}
    seeds = len({row.get("seed") for row in rows})
    caption = f"{title(key)} in %, mean of {seeds} seed{'s' if seeds > 1 else ''}; best in bold."
    lines = [[Cell(m, m), *(columns[t][i] for t in tasks)] for i, m in enumerate(methods)]
    return Table(f"{id}-study", "Methods and tasks", caption, ["method", *tasks], lines, wide=True)


def agreement_table(id: str, agreed: dict[str, Row]) -> Table:
    """On how many images the runs with different seeds agree."""
    columns = list(dict.fromkeys(str(name) for row in agreed.values() for name in row))[:MOST_CELLS]
    cells = {name: column_cells([row.get(name) for row in agreed.values()]) for name in columns}
    lines = [[Cell(m, m), *(cells[name][i] for name in columns)] for i, m in enumerate(agreed)]
    caption = "Share of the target's images with the same prediction, in %, mean over pairs of seeds; no label is used."
    return Table(f"{id}-agreement", "Agreement between seeds", caption, ["method", *columns], lines, wide=True)


def seed_means(rows: list[Row], key: str) -> dict[Any, float]:
    """Seed → mean over its tasks; only the seeds that have as many tasks as any."""
    seeds = {str(row.get("seed")): [r for r in rows if str(r.get("seed")) == str(row.get("seed"))] for row in rows}
    values = {seed: numbers(own, key) for seed, own in seeds.items()}
    most = max(map(len, values.values()), default=0)
    return {seed: statistics.fmean(found) for seed, found in values.items() if found and len(found) == most}


def in_order(rows: list[Row], name: str) -> list[str]:
    return list(dict.fromkeys(str(row[name]) for row in rows))


def numbers(rows: list[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if is_number(row.get(key))]


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def marked(values: list[float | None], best: Callable[[Sequence[float]], float] | None) -> list[Cell]:
    """A column, with the best of it marked."""
    known = [v for v in values if v is not None]
    top = best(known) if best is not None and known else None
    return column_cells(values, ["best" if v is not None and v == top else "" for v in values])


def title(key: str) -> str:
    return "HOS" if key == "hos" else "Accuracy"
