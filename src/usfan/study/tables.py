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

Numbers = dict[str, float]
"""Column → number."""


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
    def tasks(self) -> tuple[str, ...]:
        """The columns that are tasks, or averages over the targets of a source."""
        return tuple(column for column in self.columns if "→" in column)

    @property
    def source(self) -> str:
        """Where the numbers come from and what they were made with, for a caption."""
        place = "its text" if self.number == "text" else f"Table {self.number}"
        return f"{place} ({self.backbone})" if self.backbone else place


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, in the order of the paper."""
    text = (
        resources.files("usfan.study").joinpath("paper_tables.json").read_text(encoding="utf-8")
    )
    return tuple(_table(entry) for entry in json.loads(text)["tables"])


def _table(entry: dict[str, Any]) -> PaperTable:
    columns = tuple(entry["columns"])
    rows = []
    for row in entry["rows"]:
        values = dict(zip(columns, row["values"], strict=True))
        rows.append(PaperRow(row["printed"], row["method"], values))
    return PaperTable(**{**entry, "columns": columns, "rows": tuple(rows)})


def tables_of(benchmark: str | None, setting: str = "closed") -> tuple[PaperTable, ...]:
    """The tables about one benchmark; the one with per-task numbers comes first. Empty if the paper has none."""
    tables = []
    if benchmark is not None:
        for table in paper_tables():
            if (table.benchmark, table.setting) == (benchmark, setting):
                tables.append(table)
    return tuple(sorted(tables, key=lambda table: not table.tasks))


def paper_rows(benchmark: str | None, setting: str = "closed") -> dict[str, Numbers]:
    """`{method as printed: {task: number, …, "avg": printed average}}`; empty if the paper has no such table.

    Methods that stand only in a table of averages (Table 1) or of classes (Table A3) have `avg` alone.
    On a benchmark with one task, that task and the average are the same number.
    """
    tables = tables_of(benchmark, setting)
    rows: dict[str, Numbers] = {}
    for table in tables:
        tasks = tables[0].tasks
        for row in table.rows:
            numbers = dict(row.values)
            if len(tasks) == 1:
                (task,) = tasks
                numbers["avg"] = numbers.get("avg", numbers.get(task))
                numbers[task] = numbers["avg"]
            printed = {}
            for column in (*tasks, "avg"):
                number = numbers.get(column)
                if number is not None:
                    printed[column] = number
            rows.setdefault(row.printed, printed)
    return rows


def paper_row(benchmark: str | None, method: str, setting: str = "closed") -> Numbers | None:
    """The paper's numbers for one of our methods, or None.

    `source-only` is the row Source-Only (Table 1) if there is one. The rows ResNet-50 and ResNet-101 stand in for it
    elsewhere: they were taken from earlier papers, so they are not the source models of the same recipe.
    """
    printed = []
    for table in tables_of(benchmark, setting):
        printed += [row.printed for row in table.rows if row.method == method]
    if not printed:
        return None
    name = "Source-Only" if "Source-Only" in printed else printed[0]
    return paper_rows(benchmark, setting)[name]
