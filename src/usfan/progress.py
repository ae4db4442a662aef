"""Progress of a command: how far it is, the time left, the figures, the images it skipped.

Something that takes longer than two seconds is shown: as a bar on a terminal, as a line that renews itself in a
notebook, and else (a log, a pipe, a batch job) as lines on standard error, one per epoch and one every few seconds.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from usfan.errors import ConfigError
from usfan.errors import printable as escaped

PATIENCE = 2.0
"""Seconds before anything is shown."""
INTERVAL = 5.0
"""Seconds between two lines in a log; in a long run they come less often…"""
SHARE = 0.05
"""…as this share of the time that has passed."""
EPOCH_INTERVAL = 1.0
"""Seconds between two lines of epochs."""
NOTEBOOK_INTERVAL = 0.3
"""Seconds between two updates in a notebook."""
console = Console(stderr=True)

StepProgress = Callable[[int, int, dict[str, float]], None]
"""Called with (steps done, steps in all, figures): see `usfan.engine.loop.Progress`."""


@dataclass(frozen=True)
class State:
    """How far something is."""

    label: str
    unit: str
    done: int
    total: int | None
    rate: float
    """Units per second."""
    note: str
    is_epoch: bool
    """Whether an epoch has just ended."""

    def __str__(self) -> str:
        parts = [f"{self.label}: {self.done:,} {self.unit}"]
        if self.total:
            parts = [f"{self.label}: {self.done:,} of {self.total:,} {self.unit}"]
        if self.note:
            parts.append(self.note)
        if self.rate > 0:
            rate = f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.1f}"
            parts.append(f"{rate} {self.unit}/s")
            if self.total and self.done < self.total:
                parts.append(f"{duration((self.total - self.done) / self.rate)} left")
        return ", ".join(parts)


class Bar:
    """Shows how far something is, if it takes long enough."""

    def __init__(self, label: str, total: int | None, unit: str = "images") -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.started = time.monotonic()
        self.done = 0
        self.first: tuple[float, int] | None = None
        self.display: Display | None = None

    def advance(self, count: int = 1) -> None:
        self.set(self.done + count)

    def set(
        self, done: int, total: int | None = None, note: str = "", *, epoch: bool = False
    ) -> None:
        """`note` is shown beside the count; `epoch` says that an epoch has just ended."""
        self.done = done
        self.total = total or self.total
        now = time.monotonic()
        self.first = self.first or (now, done)  # the rate leaves out what came before the work
        if now - self.started <= PATIENCE or console.quiet:
            return
        if self.display is None:
            self.display = _display(self.label, self.total)
        first_time, first_done = self.first
        rate = (done - first_done) / max(now - first_time, 1e-9)
        self.display.show(State(self.label, self.unit, done, self.total, rate, note, epoch))

    def close(self) -> None:
        if self.display is not None:
            self.display.close()


class Display(Protocol):
    def show(self, state: State) -> None: ...
    def close(self) -> None: ...


def _display(label: str, total: int | None) -> Display:
    if console.is_terminal and not console.is_jupyter:
        return _Terminal(label, total)
    return _Notebook(label) if in_notebook() else _Lines()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _Terminal:
    """A bar."""

    def __init__(self, label: str, total: int | None) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self.progress.start()
        self.task = self.progress.add_task(label, total=total, rate="")

    def show(self, state: State) -> None:
        rate = f"{state.rate:.0f} {state.unit}/s {state.note}"
        self.progress.update(self.task, completed=state.done, total=state.total, rate=rate)

    def close(self) -> None:
        self.progress.stop()


class _Lines:
    """A line now and then."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.last = 0.0

    def show(self, state: State) -> None:
        now = time.monotonic()
        wait = max(INTERVAL, SHARE * (now - self.started))
        if state.is_epoch:
            wait = EPOCH_INTERVAL
        if now - self.last >= wait:
            self.last = now
            say(str(state))

    def close(self) -> None:
        pass


class _Notebook:
    """One line in the cell's output, which renews itself. It needs IPython only, no widgets."""

    def __init__(self, label: str) -> None:
        from IPython.display import display

        self.last = 0.0
        self.handle = display({"text/plain": label}, raw=True, display_id=True)

    def show(self, state: State) -> None:
        now = time.monotonic()
        if now - self.last < NOTEBOOK_INTERVAL and not state.is_epoch:
            return
        self.last = now
        line = str(state)
        page = html.escape(line)
        if state.total:
            bar = f'<progress value="{state.done}" max="{state.total}" style="width:16em"></progress>'
            page = f"{bar} {page}"
        self.handle.update({"text/plain": line, "text/html": f"<div>{page}</div>"}, raw=True)

    def close(self) -> None:
        pass


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def bar(label: str, total: int | None = None, unit: str = "images") -> Iterator[Bar]:
    display = Bar(label, total, unit)
    try:
        yield display
    finally:
        display.close()


def step_progress(display: Bar) -> StepProgress:
    """For the loops, which count steps: shows images, and what an epoch gave."""

    def show(done: int, total: int, figures: dict[str, float]) -> None:
        ended = "epoch" in figures
        note = epoch_note(figures) if ended else f"lr {figures.get('lr', 0):.1e}"
        display.set(int(figures["images"]), int(figures["images_in_all"]), note, epoch=ended)

    return show


def epoch_note(figures: dict[str, float]) -> str:
    """`epoch 3 of 50, loss 0.412, validation accuracy 91.2 %`."""
    of = f" of {figures['epochs']}" if "epochs" in figures else ""
    parts = [f"epoch {figures['epoch']}{of}"]
    if "loss" in figures:
        parts.append(f"loss {figures['loss']:.3g}")
    if figures.get("validation_accuracy") is not None:
        parts.append(f"validation accuracy {figures['validation_accuracy']:.1f} %")
    return ", ".join(parts)


@contextlib.contextmanager
def for_api(progress: Any, label: str) -> Iterator[StepProgress | None]:
    """Handles `progress=` of the Python API.

    None and True show how far it is, in the way of the place (terminal, notebook, log); False is silent, decoding too;
    a function is called with (steps done, steps in all, figures) instead.
    """
    if progress is False:
        before = console.quiet
        console.quiet = True
        try:
            yield None
        finally:
            console.quiet = before
    elif progress is None or progress is True:
        with bar(label) as display:
            yield step_progress(display)
    elif callable(progress):
        yield progress
    else:
        raise ConfigError(
            f"progress must be True, False or a function of (done, total, figures); got {type(progress).__name__}"
        )


def say(line: str) -> None:
    """A line for the user on standard error, with names escaped, unless progress is off."""
    console.print(escaped(line), markup=False, highlight=False, soft_wrap=True)


def print_metrics(metrics: dict[str, Any], title: str) -> None:
    from rich.table import Table
    from rich.text import Text

    say(title)
    table = Table()
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            table.add_row(Text(escaped(name.replace("_", " "), 80)), figure(value))
    console.print(table)


def figure(value: float) -> str:
    """Whole numbers as they are, others with two decimals, or four digits below 1."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}"
