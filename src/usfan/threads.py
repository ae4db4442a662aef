"""How many threads of the CPU an operation gets.

The threads of an operation wait for each other at its end, and they spin while they wait. If another program uses one
of the cores, a small operation takes much longer on several threads than on one, and all its threads are busy
meanwhile. So small operations get one thread. Large ones get all of them: those that torch had before the first block
was entered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

LARGE = 1 << 27
"""Multiplications from which an operation is worth several threads: about five milliseconds of one core."""

_lock = threading.Lock()
_inside: set[object] = set()
_all = 1
"""Blocks that are entered, by any thread of Python, and the threads of torch before the first of them."""


@contextlib.contextmanager
def threads_for(multiplications: float) -> Iterator[None]:
    """One thread inside for operations of so many multiplications if that is few, else all; then as many as before."""
    global _all
    block = object()
    before = 0
    try:
        with _lock:
            if not _inside:
                _all = torch.get_num_threads()
            _inside.add(block)
            before = torch.get_num_threads()
        use(1 if multiplications < LARGE else _all)
        yield
    finally:
        with _lock:
            _inside.discard(block)  # an interrupt may come before it is added
            after = before if _inside else _all
        if before:
            use(after)


def use(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
