"""Progress of a command: how far it is, the time left, the figures, the images it skipped.

Something that takes longer than two seconds is shown: as a bar on a terminal, as a line that renews itself in a
notebook, and else (a log, a pipe, a batch job) as lines on standard error, one per epoch and one every few seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from usfan.errors import ConfigError
from usfan.errors import shown as escaped

PATIENCE = 2.0
"""Seconds before anything is shown."""
INTERVAL = 5.0
"""Seconds between two lines in a log; in a long run they come less often…"""
SHARE = 0.05
"""…as this share of the time that has passed."""
EPOCH_INTERVAL = 1.0
"""Seconds between two lines of epochs."""
console = Console(stderr=True)

StepProgress = Callable[[int, int, dict[str, float]], None]
"""Called with (steps done, steps in all, figures): see `usfan.compute.loop.Progress`."""


class Bar:
    """Shows how far something is, once it is worth it."""

    def __init__(self, label: str, total: int | None, unit: str = "images") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.started, self.done = time.monotonic(), 0
        self.first: tuple[float, int] | None = None
        self.display: _Terminal | _Notebook | _Lines | None = None

    def advance(self, count: int = 1) -> None:
        self.set(self.done + count)

    def set(self, done: int, total: int | None = None, note: str = "", *, epoch: bool = False) -> None:
        """`note` is shown beside the count; `epoch` says that an epoch has just ended."""
        self.done, self.total = done, total or self.total
        now = time.monotonic()
        self.first = self.first or (now, done)  # the rate leaves out what came before the work
        if now - self.started <= PATIENCE or console.quiet:
            return
        if self.display is None:
            self.display = _display(self.label, self.total)
        since, before = self.first
        rate = (done - before) / max(now - since, 1e-9)
        self.display.show(done, self.total, rate, self.unit, note, epoch)

    def close(self) -> None:
        if self.display is not None:
            self.display.close()


def _display(label: str, total: int | None) -> _Terminal | _Notebook | _Lines:
    if console.is_terminal and not console.is_jupyter:
        return _Terminal(label, total)
    return _Notebook(label) if in_notebook() else _Lines(label)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class _Terminal:
    def __init__(self, label: str, total: int | None) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self.progress.start()
        self.task = self.progress.add_task(label, total=total, rate="")

    def show(self, done: int, total: int | None, rate: float, unit: str, note: str, epoch: bool) -> None:
        self.progress.update(self.task, completed=done, total=total, rate=f"{rate:.0f} {unit}/s {note}")

    def close(self) -> None:
        self.progress.stop()


class _Lines:
    """A line now and then."""

    def __init__(self, label: str) -> None:
        self.label, self.started, self.last = label, time.monotonic(), 0.0

    def show(self, done: int, total: int | None, rate: float, unit: str, note: str, epoch: bool) -> None:
        now = time.monotonic()
        wait = EPOCH_INTERVAL if epoch else max(INTERVAL, SHARE * (now - self.started))
        if now - self.last >= wait:
            self.last = now
            self.write(sentence(self.label, done, total, rate, unit, note))

    def write(self, line: str) -> None:
        say(line)

    def close(self) -> None:
        pass


class _Notebook:
    """One line in the cell's output, which renews itself. It needs IPython only, no widgets."""

    def __init__(self, label: str) -> None:
        from IPython.display import display

        self.label, self.last = label, 0.0
        self.handle = display({"text/plain": label}, raw=True, display_id=True)

    def show(self, done: int, total: int | None, rate: float, unit: str, note: str, epoch: bool) -> None:
        now = time.monotonic()
        if now - self.last >= 0.3 or epoch:
            self.last = now
            self.update(sentence(self.label, done, total, rate, unit, note), done, total)

    def update(self, line: str, done: int, total: int | None) -> None:
        import html

        bar = f'<progress value="{done}" max="{total}" style="width:16em"></progress> ' if total else ""
        self.handle.update({"text/plain": line, "text/html": f"<div>{bar}{html.escape(line)}</div>"}, raw=True)

    def close(self) -> None:
        pass


def sentence(label: str, done: int, total: int | None, rate: float, unit: str, note: str) -> str:
    """How far it is, in words."""
    parts = [f"{label}: {done:,} of {total:,} {unit}" if total else f"{label}: {done:,} {unit}"]
    parts += [note] if note else []
    if rate > 0:
        parts.append(f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.1f} {unit}/s")
        if total and done < total:
            parts.append(f"{duration((total - done) / rate)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def bar(label: str, total: int | None = None, unit: str = "images") -> Iterator[Bar]:
    shown = Bar(label, total, unit)
    try:
        yield shown
    finally:
        shown.close()


def step_progress(shown: Bar) -> StepProgress:
    """For the loops, which count steps: shows images, and what an epoch gave."""

    def show(done: int, total: int, figures: dict[str, float]) -> None:
        ended = "epoch" in figures
        note = epoch_note(figures) if ended else f"lr {figures.get('lr', 0):.1e}"
        shown.set(int(figures["images"]), int(figures["images_in_all"]), note, epoch=ended)

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
        before, console.quiet = console.quiet, True
        try:
            yield None
        finally:
            console.quiet = before
    elif progress is None or progress is True:
        with bar(label) as shown:
            yield step_progress(shown)
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
