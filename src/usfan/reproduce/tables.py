"""The paper's tables as data: every method row, with the number and label of the table it stands in.

The numbers lie in `paper_tables.json`. A column is a task (`A→C`), a class (Table A3), or `avg`, the printed average.
`C→*` is the average over all targets of source C: Table 4b prints nothing finer.
Printed averages are kept as they are, also if they do not follow from their own row.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class PaperRow:
    """One line of a table."""

    printed: str
    """The method's name as the paper prints it."""
    method: str | None
    """Our name of the same method, or None."""
    values: Mapping[str, float | None]
    """Column → number; None if the paper prints a dash."""


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    number: str
    """As printed: `1` … `4b`, `A1` … `A3`; `text` for numbers that stand in the running text."""
    label: str
    """The label in the paper's LaTeX source."""
    benchmark: str | None
    """Name in the catalogue; None for the summary of data sets."""
    setting: str
    """`closed`, `open` or `summary`."""
    backbone: str | None
    metric: str | None
    """The key of the same figure in our `metrics.json`."""
    caption: str
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    note: str = ""

    @property
    def source(self) -> str:
        """Where the numbers come from and what they were made with, for a caption."""
        place = "its text" if self.number == "text" else f"Table {self.number}"
        return f"{place} ({self.backbone})" if self.backbone else place


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, in the order of the paper."""
    text = resources.files("usfan.reproduce").joinpath("paper_tables.json").read_text(encoding="utf-8")
    return tuple(_table(entry) for entry in json.loads(text)["tables"])


def _table(entry: dict[str, Any]) -> PaperTable:
    columns = tuple(entry["columns"])
    rows = tuple(
        PaperRow(row["printed"], row["method"], dict(zip(columns, row["values"], strict=True))) for row in entry["rows"]
    )
    return PaperTable(**{**entry, "columns": columns, "rows": rows})


def tables_of(benchmark: str, setting: str = "closed") -> tuple[PaperTable, ...]:
    """The tables about one benchmark; the one with per-task numbers comes first. Empty if the paper has none."""
    found = [table for table in paper_tables() if (table.benchmark, table.setting) == (benchmark, setting)]
    return tuple(sorted(found, key=lambda table: not any("→" in column for column in table.columns)))


def paper_rows(benchmark: str, setting: str = "closed") -> dict[str, dict[str, float]]:
    """`{method as printed: {task: number, …, "avg": printed average}}`; empty if the paper has no such table.

    Methods that stand only in a table of averages (Table 1) or of classes (Table A3) have `avg` alone.
    On a benchmark with one task, that task and the average are the same number.
    """
    tables = tables_of(benchmark, setting)
    tasks = [column for column in tables[0].columns if "→" in column] if tables else []
    rows: dict[str, dict[str, float]] = {}
    for table in tables:
        for row in table.rows:
            numbers = dict(row.values)
            if len(tasks) == 1:
                numbers["avg"] = numbers[tasks[0]] = numbers.get("avg", numbers.get(tasks[0]))
            kept = {column: value for column in (*tasks, "avg") if (value := numbers.get(column)) is not None}
            rows.setdefault(row.printed, kept)
    return rows


def paper_row(benchmark: str, method: str, setting: str = "closed") -> dict[str, float] | None:
    """The paper's numbers for one of our methods, or None.

    `source-only` is the row Source-Only (Table 1) if there is one. The rows ResNet-50 and ResNet-101 stand in for it
    elsewhere: they were taken from earlier papers, so they are not the source models of the same recipe.
    """
    rows = paper_rows(benchmark, setting)
    printed = [row.printed for table in tables_of(benchmark, setting) for row in table.rows if row.method == method]
    if "Source-Only" in printed:
        return rows["Source-Only"]
    return rows[printed[0]] if printed else None
