"""How a command ends: exit codes, one line for errors, and signals.

0 done, 1 a fault, 2 a user's mistake, 3 and 4 answers of `check --fail-under`, 130 interrupted (SIGINT, Ctrl-C), 141
nobody reads the output any more, 143 terminated (SIGTERM).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from usfan.errors import UsfanError, out_of_memory, printable

GRACE = 5.0
"""Seconds from a signal to the end of the process, whatever it does. Files are whole or absent at any moment."""


class Stopped(KeyboardInterrupt):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Stopped` once. An exception can get lost (in a destructor, or while a library waits),
    so the process ends `GRACE` seconds after the first signal, and at once with the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if signals:
            os._exit(128 + number)
        signals.append(number)
        timer = threading.Timer(GRACE, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, old in before.items():
        if old is not signal.SIG_IGN:  # as nohup and shells in the background set it
            signal.signal(number, handle)
    try:
        yield
    except BaseException as error:
        if signals and not isinstance(error, Stopped):  # a library turned it into another error
            raise Stopped(signals[0]) from None
        raise
    finally:
        if not signals:  # else the timer runs on: the interpreter itself may wait for a thread
            for number, old in before.items():
                signal.signal(number, old)


def keep_standard_handles() -> None:
    """Standard input, output and error are open, if only to /dev/null; otherwise the next opened file takes their
    place."""
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.dup(2), "w")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.dup(1), "w")


class PlainFormatter(logging.Formatter):
    """A stranger's names may be in a warning."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def plain_warnings() -> None:
    """Warnings of libraries and the package, escaped."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())


def exit_code(program: str, error: BaseException, advice: str = "") -> int | None:
    """Print the error in one line, and return the exit code; None for a fault of the program, which shows its
    traceback. `advice` is the end of the line for a run that was interrupted."""
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        say(f"{program}: {'terminated' if number == signal.SIGTERM else 'interrupted'}{advice}")
        return 128 + number
    if isinstance(
        error, BrokenPipeError
    ):  # as in `usfan … | head -1`: the reader has seen enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # for what is still in the buffer
        return 128 + signal.SIGPIPE
    if isinstance(error, UsfanError):
        say(f"{program}: {' '.join(str(error).split())}")
        return 2
    if isinstance(error, OSError) or out_of_memory(error):
        say(f"{program}: {fault_line(error)}")
        return 1
    return None


def say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, or full
        print(printable(line), file=sys.stderr, flush=True)


def fault_line(error: BaseException) -> str:
    """Of the machine: files and memory."""
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.strerror}: {os.fsdecode(error.filename)}"
            if error.filename
            else error.strerror
        )
    text = " ".join(str(error).split()) or type(error).__name__
    return f"out of memory: {printable(text, 300)}" if out_of_memory(error) else text
