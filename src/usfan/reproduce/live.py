"""A study while it runs: a line per method, a column per task, the mean over the seeds so far, and the time left."""

from __future__ import annotations

import statistics
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from usfan.progress import console, duration

if TYPE_CHECKING:
    from usfan.reproduce.suite import Suite

WIDEST = 8
"""Tasks that have a column each; more of them share one for each source."""


class LiveTable(AbstractContextManager["LiveTable"]):
    """On a terminal a table that fills up; elsewhere a line per cell."""

    def __init__(self, study: Suite) -> None:
        self.study = study
        self.rows: list[dict[str, Any]] = []
        self.last = time.monotonic()
        self.fresh: list[tuple[dict[str, Any], float, bool]] = []
        """Cells that were run now, seconds since the one before, and whether each was the first of its source model."""
        self.total = len(study.seeds) * len(study.pairs) * len(study.methods)
        self.live = Live(console=console, get_renderable=self.table) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self.live is not None:
            self.live.start(refresh=True)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, row: dict[str, Any], fresh: bool) -> None:
        """A finished cell; `fresh` if it was run now, not found."""
        if fresh:
            first = group(row) not in map(group, self.rows)
            self.fresh.append((row, time.monotonic() - self.last, first))
        self.last = time.monotonic()
        self.rows.append(row)
        if self.study.on_cell is not None:
            self.study.on_cell(row)
        if self.live is not None:
            self.live.refresh()
        elif fresh:
            what = f"{row['method']} {row['task']} seed {row['seed']}: {self.figure(row):.1f} ({row['seconds']:.0f} s)"
            console.print(f"[{self.progress()}] {what}{self.left()}", markup=False, highlight=False, soft_wrap=True)

    def progress(self) -> str:
        return f"{len(self.rows)}/{self.total}"

    def left(self) -> str:
        """From the times between cells so far. Those of a source model's first cell are counted apart: training, and
        decoding if the images are new, come before it."""
        seen = {group(row) for row in self.rows}
        done = {(*group(row), row["task"], row["method"]) for row in self.rows}
        rest = [cell for cell in self.study.cells() if (*cell[:2], f"{cell[1]}→{cell[2]}", cell[3]) not in done]
        if not self.fresh or not rest:
            return ""
        firsts = [took for _, took, first in self.fresh if first]
        others = [(row["method"], took) for row, took, first in self.fresh if not first]
        usual = statistics.fmean([took for _, took in others] or [row["seconds"] for row in self.rows])
        costs = {m: statistics.fmean([t for name, t in others if name == m] or [usual]) for m in self.study.methods}
        new = {cell[:2] for cell in rest} - seen
        start = statistics.fmean(firsts[1:] or firsts or [usual])
        whole = sum(costs[cell[3]] for cell in rest) + len(new) * max(0.0, start - usual)
        return f", about {duration(max(0.0, whole - (time.monotonic() - self.last)))} left"

    def figure(self, row: dict[str, Any]) -> float:
        return float(row[self.study.metric])

    def table(self) -> Table:
        tasks = [f"{source}→{target}" for source, target in self.study.pairs]
        wide = len(tasks) <= WIDEST
        columns = tasks if wide else list(dict.fromkeys(f"{task.split('→')[0]}→*" for task in tasks))
        table = Table(title=f"{self.study.benchmark.title}: {len(self.rows)} of {self.total} cells{self.left()}")
        table.add_column("method")
        for column in columns:
            table.add_column(column, justify="right")
        for method in self.study.methods:
            table.add_row(method, *(self.mean(method, column) for column in columns))
        return table

    def mean(self, method: str, column: str) -> str:
        """Over the seeds so far and, if the column is of a source, over its targets; with the number of cells."""
        start = column.removesuffix("*")
        found = [
            self.figure(r)
            for r in self.rows
            if r["method"] == method and (r["task"].startswith(start) if start != column else r["task"] == column)
        ]
        return f"{statistics.fmean(found):.1f} ({len(found)})" if found else "·"


def group(row: dict[str, Any]) -> tuple[int, str]:
    """Seed and source: the source model of a cell."""
    return row["seed"], row["task"].split("→")[0]
