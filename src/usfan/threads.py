"""How many threads of the CPU an operation gets.

Threads of one operation wait for each other at its end, and they wait by turning in a loop. If another program has one
of the cores, an operation of a millisecond takes tens of them, and all its threads are busy meanwhile: on two shared
cores an adaptation on features took seven times the CPU time on two threads as on one. So work in small operations gets
one thread. Work in large ones gets all of them: those that torch had before the first block was entered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

LARGE = 1 << 27
"""Multiplications from which an operation is worth several threads: about five milliseconds of one core."""

_lock = threading.Lock()
_inside, _all = 0, 1
"""Blocks that are entered, by any thread of Python, and the threads of torch before the first of them."""


@contextlib.contextmanager
def threads_for(multiplications: float) -> Iterator[None]:
    """One thread inside for operations of so many multiplications if that is few, else all; then as many as before."""
    global _inside, _all
    with _lock:
        if _inside == 0:
            _all = torch.get_num_threads()
        before = torch.get_num_threads() if _inside else _all
        _inside += 1
    use(1 if multiplications < LARGE else _all)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            before = before if _inside else _all
        use(before)


def all_threads() -> contextlib.AbstractContextManager[None]:
    """All threads inside, also within a block that has one."""
    return threads_for(LARGE)


def use(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
