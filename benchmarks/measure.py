"""Time and memory of a call, and the row of a table that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table."""

    group: str
    """What is compared: rows of one group belong together."""
    case: str
    """Which program, at which size."""
    value: float | None
    """The figure, or None where the case does not run."""
    unit: str = "ms"
    ratio: float | None = None
    """How many times as much as ours."""
    wanted: float | None = None
    """The ratio that is promised, where one is."""
    note: str = ""


def best_time(call: Callable[[], Any], *, seconds: float = 1.0, repeats: int = 50) -> float:
    """The shortest of several runs after a warm-up, in milliseconds: other load on the machine only ever adds."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def one_time(call: Callable[[], Any]) -> float:
    """One run without a warm-up, in milliseconds."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def peak_memory(call: Callable[[], Any]) -> float:
    """The most memory that tensors made during the call took at once, in MiB, from the log of the allocator."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    log = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(log, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak / 2**20
