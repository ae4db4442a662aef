"""Limits on the memory and time that a stranger's file may cost. They are checked before anything is spent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

from usfan.errors import ArtifactError, ConfigError, UsfanError, option

_times: ContextVar[float] = ContextVar("budget", default=1.0)


@contextlib.contextmanager
def budget(times: float) -> Iterator[None]:
    """Multiplies all limits inside the block; the flag --budget of every command."""
    if not 0 < times <= 1e6:
        raise ConfigError(f"budget must be a number above 0 and at most 1000000; got {times}")
    token = _times.set(_times.get() * times)
    try:
        yield
    finally:
        _times.reset(token)


def multiplier() -> float:
    """What the limits are multiplied by, for another process."""
    return _times.get()


def allowed(limit: float) -> int:
    """The limit as it stands."""
    return int(limit * _times.get())


def check_cost(
    what: str,
    needed: float,
    limit: float,
    unit: str,
    kind: type[UsfanError] = ArtifactError,
) -> None:
    """Raise unless `needed` is within the limit; say which budget would do."""
    times = _times.get()
    if needed > limit * times:
        more = math.ceil(10 * needed / limit) / 10
        raise kind(
            f"{what}: {needed:,.0f} {unit}, over the limit of {limit * times:,.0f}; {option('budget', more)} allows it"
        )
