"""Progress of a command: how far it is, the time left, the figures, the images it skipped.

Something that takes longer than two seconds is shown: as a bar on a terminal, as a line that renews itself in a
notebook, and else (a log, a pipe, a batch job) as lines on standard error, one per epoch and one every 20 seconds.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from usfan.errors import ConfigError
from usfan.errors import printable as escaped

PATIENCE = 2.0
"""Seconds before anything is shown."""
console = Console(stderr=True)
network_at_work: ContextVar[str] = ContextVar("network_at_work", default="features")
"""Name of the network that is looking at the images, for the display of its pass."""

StepProgress = Callable[[int, int, dict[str, float]], None]
"""Called with (images seen, images in all, figures): see `usfan.engine.loop.Progress`."""

CountImages = bool | Callable[[int], None] | None
"""True (the default), False, or a function that is called with the number of images just seen."""


class Bar:
    """Shows how far something is, if it takes long enough."""

    def __init__(self, label: str, total: int | None, unit: str = "images") -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.started = time.monotonic()
        self.done = 0
        self.first: tuple[float, int] | None = None
        self.last = 0.0
        self.display: Lines | None = None

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
            self.display = _display()
        if now - self.last >= (self.display.epoch_wait if epoch else self.display.wait):
            self.last = now
            self.display.show(self.line(now, note), done, self.total)

    def line(self, now: float, note: str) -> str:
        count = f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"
        parts = [f"{self.label}: {count} {self.unit}"]
        if note:
            parts.append(note)
        first_time, first_done = self.first or (now, self.done)
        rate = (self.done - first_done) / max(now - first_time, 1e-9)
        if rate > 0:
            parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s")
            if self.total and self.done < self.total:
                parts.append(f"{duration((self.total - self.done) / rate)} left")
        return ", ".join(parts)

    def close(self) -> None:
        if self.display is not None:
            self.display.close()


class Lines:
    """A line now and then."""

    wait = 20.0
    """Seconds between two lines."""
    epoch_wait = 1.0
    """Seconds between two lines of epochs."""

    def show(self, line: str, done: int, total: int | None) -> None:
        say(line)

    def close(self) -> None:
        """A line needs no end."""


class Terminal(Lines):
    """A bar."""

    wait = 0.1
    epoch_wait = 0.0

    def __init__(self) -> None:
        columns = (BarColumn(), TextColumn("{task.description}", markup=False))
        self.progress = Progress(*columns, console=console, transient=True)
        self.progress.start()
        self.task = self.progress.add_task("")

    def show(self, line: str, done: int, total: int | None) -> None:
        self.progress.update(self.task, description=line, completed=done, total=total)

    def close(self) -> None:
        self.progress.stop()


class Notebook(Lines):
    """One line in the cell's output, which renews itself. It needs IPython only, no widgets."""

    wait = 0.3
    epoch_wait = 0.0

    def __init__(self) -> None:
        from IPython.display import display

        self.handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, line: str, done: int, total: int | None) -> None:
        page = html.escape(line)
        if total:
            page = (
                f'<progress value="{done}" max="{total}" style="width:16em"></progress> {page}'
            )
        self.handle.update({"text/plain": line, "text/html": f"<div>{page}</div>"}, raw=True)


def _display() -> Lines:
    if console.is_terminal and not console.is_jupyter:
        return Terminal()
    return Notebook() if in_notebook() else Lines()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def network_name(network: str) -> Iterator[None]:
    """Passes inside are those of this network."""
    token = network_at_work.set(network)
    try:
        yield
    finally:
        network_at_work.reset(token)


@contextlib.contextmanager
def bar(label: str, total: int | None = None, unit: str = "images") -> Iterator[Bar]:
    with contextlib.closing(Bar(label, total, unit)) as display:
        yield display


def step_progress(display: Bar) -> StepProgress:
    """For the loops: shows images, and what an epoch gave."""

    def show(done: int, total: int, figures: dict[str, float]) -> None:
        ended = "epoch" in figures
        note = epoch_note(figures) if ended else f"lr {figures.get('lr', 0):.1e}"
        display.set(done, total, note, epoch=ended)

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
    a function is called with (images seen, images in all, figures) instead.
    """
    if callable(progress):
        yield progress
    elif progress is None or progress is True:
        with bar(label) as display:
            yield step_progress(display)
    elif progress is False:
        before = console.quiet
        console.quiet = True
        try:
            yield None
        finally:
            console.quiet = before
    else:
        raise ConfigError(
            f"progress must be True, False or a function of (done, total, figures); got {type(progress).__name__}"
        )


@contextlib.contextmanager
def image_progress(
    progress: CountImages, label: str, total: int
) -> Iterator[Callable[[int], None]]:
    """A function that is called with the number of images just seen."""
    if callable(progress):
        yield progress
        return
    with for_api(progress, label), bar(label, total) as display:
        yield display.advance


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
