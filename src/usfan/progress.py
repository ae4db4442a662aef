"""What a command shows on the terminal: a bar with images/s and time left, the figures, the images it left out.

A bar appears once something takes longer than two seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from usfan.errors import shown

PATIENCE = 2.0
console = Console(stderr=True)


class Bar:
    """A bar that appears only when it is worth it."""

    def __init__(self, label: str, total: int | None, unit: str = "images") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.started, self.done = time.monotonic(), 0
        self.first: tuple[float, int] | None = None
        self.display: Progress | None = None

    def advance(self, count: int = 1) -> None:
        self.set(self.done + count)

    def set(self, done: int, total: int | None = None, note: str = "") -> None:
        self.done, self.total = done, total or self.total
        now = time.monotonic()
        self.first = self.first or (now, done)  # the rate leaves out what came before the work
        if self.display is None and now - self.started > PATIENCE and console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self.display = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self.display.start()
            self.task = self.display.add_task(self.label, total=self.total, rate="")
        if self.display is not None:
            since, before = self.first
            rate = f"{(done - before) / max(now - since, 1e-9):.0f} {self.unit}/s {note}"
            self.display.update(self.task, completed=done, total=self.total, rate=rate)

    def close(self) -> None:
        if self.display is not None:
            self.display.stop()


@contextlib.contextmanager
def bar(label: str, total: int | None = None, unit: str = "images") -> Iterator[Bar]:
    shown = Bar(label, total, unit)
    try:
        yield shown
    finally:
        shown.close()


def step_progress(shown: Bar, batch_size: int) -> Callable[[int, int, dict[str, float]], None]:
    """For the loops, which count steps: shows images."""
    return lambda done, total, figures: shown.set(
        done * batch_size, total * batch_size, f"lr {figures.get('lr', 0):.1e}"
    )


def say(line: str) -> None:
    """One line, in which a stranger's names may be."""
    console.print(shown(line), markup=False)


def print_metrics(metrics: dict[str, Any], title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(shown(title), style="table.title"))  # a path with brackets in it is no mark-up
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if isinstance(value, (int, float)):
            table.add_row(Text(shown(name, 80)), f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}")
    console.print(table)
