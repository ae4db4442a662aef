"""A study as a table: one line per method, with its figure on each task and its means."""

from __future__ import annotations

import statistics
from pathlib import Path

from usfan.files import Folder
from usfan.report.blocks import Table, table_of
from usfan.report.compare import marked_cells
from usfan.report.formatting import count, is_number
from usfan.report.image_table import read_mapping
from usfan.report.run import Figures

MOST_CELLS = 10_000
"""Cells of a study that are read."""
COLUMNS = {
    "ece": ("ECE (%)", "low"),
    "posterior_ece": ("posterior ECE (%)", "low"),
    "seconds": ("seconds", ""),
}
"""Further figures of a cell: heading, and whether low values are good."""


def study_rows(path: Path, problems: list[str]) -> list[Figures]:
    """The rows of a study: from results.json, or from its cells while it is running."""
    rows: list[object] = []
    with Folder(path) as folder:
        results = read_mapping(folder, "results.json", problems).get("rows")
        if isinstance(results, list):
            rows = results
        elif folder.kind("cells") == "a folder":
            with folder.inner("cells") as cells:
                names = [name for name in cells.names() if name.endswith(".json")]
                for name in names[:MOST_CELLS]:
                    rows.append(read_mapping(cells, name, problems))
    return [row for row in rows if isinstance(row, dict) and {"method", "task"} <= row.keys()]


def study_table(id: str, rows: list[Figures]) -> Table:
    """Each method on each task, and its means."""
    key = "hos" if all(is_number(row.get("hos")) for row in rows) else "accuracy"
    methods = distinct(rows, "method")
    columns = {}
    for task in distinct(rows, "task"):
        cells = [row for row in rows if str(row["task"]) == task]
        columns[task] = marked_cells(means(cells, methods, key), "high")
    columns["mean"] = marked_cells(means(rows, methods, key), "high")
    for name, (heading, good) in COLUMNS.items():
        values = means(rows, methods, name)
        if any(value is not None for value in values):
            columns[heading] = marked_cells(values, good)
    seeds = count(len(distinct(rows, "seed")), "seed")
    caption = f"{'HOS' if key == 'hos' else 'Accuracy'} in %, mean of {seeds}; best in bold."
    return table_of(
        f"{id}-study",
        "Methods and tasks",
        caption,
        "method",
        methods,
        columns,
    )


def distinct(rows: list[Figures], name: str) -> list[str]:
    """The values of a field, in their order."""
    return list(dict.fromkeys(str(row.get(name)) for row in rows))


def means(
    rows: list[Figures],
    methods: list[str],
    key: str,
) -> list[float | None]:
    """The mean figure of each method."""
    column: list[float | None] = []
    for method in methods:
        cells = [row.get(key) for row in rows if str(row["method"]) == method]
        values = [float(value) for value in cells if is_number(value)]
        column.append(statistics.fmean(values) if values else None)
    return column
