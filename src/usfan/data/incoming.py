"""Lines of standard input as they come: somebody may wait for the answers."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from typing import TextIO

BATCH = 64
"""Lines that are enough to begin with."""
PATIENCE = 1.0
"""Seconds after which fewer are taken."""
MOST = 4096
"""Lines taken at a time."""


def incoming(file: TextIO) -> Iterator[list[str]]:
    """Lines that hold something, without their ends: all that are there once there are `BATCH`, or fewer after
    `PATIENCE`."""
    try:
        descriptor = file.fileno()
    except (OSError, AttributeError):  # a stand-in for standard input
        yield [line.rstrip("\r\n") for line in file if line.strip()]
        return
    lines: list[str] = []
    rest = b""
    deadline = 0.0
    ended = False
    while not ended:
        wait = None
        if len(lines) >= BATCH:
            wait = 0.0
        elif lines:
            wait = max(0.0, deadline - time.monotonic())
        if len(lines) >= MOST or not select.select([descriptor], [], [], wait)[0]:
            yield lines
            lines = []
            continue
        content = os.read(descriptor, 1 << 16)
        ended = not content
        *whole, rest = (rest + content).split(b"\n")
        if ended:
            whole = [rest]
        if not lines:
            deadline = time.monotonic() + PATIENCE
        lines += [os.fsdecode(line).rstrip("\r") for line in whole if line.strip()]
    if lines:
        yield lines
