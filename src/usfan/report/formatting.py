"""Numbers as text, and values of unknown type from files."""

from __future__ import annotations

import math
from typing import TypeGuard

from usfan.progress import duration


def number(value: object) -> str:
    """A figure for reading: 31.2, 0.0123, 1.2e-05, 12,345."""
    if value is None:
        return "–"
    if not is_number(value):
        return str(value)
    if value < 0:
        return f"−{number(-value)}"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def percent(value: object, digits: int = 1) -> str:
    """A percentage that is already between 0 and 100; its sign stays on the same line."""
    return f"{value:.{digits}f}\u00a0%" if is_number(value) else "–"


def seconds(value: object) -> str:
    if not is_number(value):
        return "–"
    return f"{value:.1f} s" if round(value) < 60 else duration(value)


def is_number(value: object) -> TypeGuard[float]:
    """A finite figure; None, text, flags and whole numbers too long for a float are not."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def mapping(value: object) -> dict[str, object]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def plain_name(key: str) -> str:
    """A key of a file as words: `kept_epoch` → kept epoch."""
    return key.replace("_", " ")
