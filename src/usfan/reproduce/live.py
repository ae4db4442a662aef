"""The table of a study while it runs: one line per method, one column per task, the mean over the seeds so far."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from usfan.progress import console

if TYPE_CHECKING:
    from usfan.reproduce.suite import Suite


class LiveTable(AbstractContextManager["LiveTable"]):
    """On a terminal a table that fills up; elsewhere a line per cell."""

    def __init__(self, study: Suite) -> None:
        self.study, self.rows = study, []  # type: ignore[var-annotated]
        self.total = len(study.seeds) * len(study.pairs) * len(study.methods)
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, row: dict[str, Any], fresh: bool) -> None:
        """A finished cell; `fresh` where it was run now, not found."""
        self.rows.append(row)
        if self.study.on_cell is not None:
            self.study.on_cell(row)
        if self.live is not None:
            self.live.update(self.table(), refresh=True)
        elif fresh:
            what = f"{row['method']} {row['task']} seed {row['seed']}: {self.figure(row):.1f} ({row['seconds']:.0f} s)"
            console.print(f"[{len(self.rows)}/{self.total}] {what}", markup=False)

    def figure(self, row: dict[str, Any]) -> float:
        return float(row["os" if self.study.setting == "open" else self.study.benchmark.metric])

    def table(self) -> Table:
        tasks = [f"{source}→{target}" for source, target in self.study.pairs]
        table = Table(title=f"{self.study.benchmark.title}: {len(self.rows)} of {self.total} cells")
        table.add_column("method")
        for task in tasks:
            table.add_column(task, justify="right")
        for method in self.study.methods:
            table.add_row(method, *(self.mean(method, task) for task in tasks))
        return table

    def mean(self, method: str, task: str) -> str:
        found = [self.figure(r) for r in self.rows if (r["method"], r["task"]) == (method, task)]
        return f"{sum(found) / len(found):.1f} ({len(found)})" if found else "·"
