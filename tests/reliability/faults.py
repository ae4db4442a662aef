"""A command in a process of its own with something wrong around it: no room, no rights, a clock that jumps."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import measuring  # noqa: F401 (the path to the other test modules)

from small_runs import forkserver
from usfan.cli.main import main

YEAR = 365 * 24 * 3600.0


@dataclass(frozen=True)
class Outcome:
    code: int | None
    text: str

    @property
    def clear(self) -> bool:
        """One line of the command's own on stderr, and exit code 1."""
        lines = [line for line in self.text.splitlines() if line.startswith("usfan ")]
        return self.code == 1 and len(lines) == 1 and "Traceback" not in self.text


def keep_to_rights() -> None:
    """Root passes over the rights of files; without these two capabilities it does not."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for bit in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        data[0] &= ~(1 << bit)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def jumping_clock(seed: int) -> None:
    """The time of day leaps by years, back and forth, at every look."""
    rng = random.Random(seed)
    real = time.time
    time.time = lambda: max(0.0, real() + rng.uniform(-20, 20) * YEAR)


def child(
    arguments: list[str], pipe, limit: int | None, rights: bool, clock: int | None
) -> None:
    import resource

    os.dup2(pipe.fileno(), 2)
    sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115 (as long as the process)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if rights:
        keep_to_rights()
    if clock is not None:
        jumping_clock(clock)
    raise SystemExit(main(arguments))


def start(
    *arguments: object, limit: int | None = None, rights: bool = False, clock: int | None = None
):
    """The process, and the end of its stderr to read from."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = forkserver().Process(
        target=child, args=([str(a) for a in arguments], writer, limit, rights, clock)
    )
    process.start()
    writer.close()
    return process, reader


def finish(process, reader, seconds: float = 120) -> Outcome:
    with open(reader.fileno(), "rb", closefd=False) as file:
        text = file.read().decode(errors="replace")
    process.join(seconds)
    reader.close()
    return Outcome(process.exitcode, text)


def attempt(*arguments: object, **faults) -> Outcome:
    return finish(*start(*arguments, **faults))


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes in memory. Needs root."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, *options: str) -> None:
    subprocess.run(["mount", "-o", ",".join(("remount", *options)), place], check=True)
