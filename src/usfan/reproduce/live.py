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
        self.study, self.rows = study, []  # type: ignore[var-annotated]
        self.started, self.fresh = time.monotonic(), []  # type: ignore[var-annotated]
        self.total = len(study.seeds) * len(study.pairs) * len(study.methods)
        self.live = Live(console=console, get_renderable=self.table) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, row: dict[str, Any], fresh: bool) -> None:
        """A finished cell; `fresh` if it was run now, not found."""
        self.rows.append(row)
        if fresh:
            self.fresh.append((row, time.monotonic()))
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
        """The cells to come take as long as those of their method did, source models included, side by side or not."""
        missing = self.total - len(self.rows)
        if not self.fresh or not missing:
            return ""
        cost = {method: self.seconds(method) for method in self.study.methods}
        done = sum(cost[row["method"]] for row, _ in self.fresh)
        each = len(self.study.seeds) * len(self.study.pairs)
        rest = sum(cost[m] * (each - sum(row["method"] == m for row in self.rows)) for m in self.study.methods)
        last = self.fresh[-1][1]
        whole = (last - self.started) * rest / max(done, 1e-9)
        return f", about {duration(max(0.0, whole - (time.monotonic() - last)))} left"

    def seconds(self, method: str) -> float:
        """Mean of the cells of a method, or of all if it has none yet; a cell takes a moment besides."""
        own = [row["seconds"] for row in self.rows if row["method"] == method]
        return 0.05 + statistics.fmean(own or [row["seconds"] for row in self.rows])

    def figure(self, row: dict[str, Any]) -> float:
        return float(row["os" if self.study.setting == "open" else self.study.benchmark.metric])

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
