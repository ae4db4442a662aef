"""Checks of values of settings; `ConfigError` names the setting that is wrong."""

from __future__ import annotations

import difflib
import math
import os
import pkgutil
import reprlib
import sys
from typing import Any

from usfan.errors import ConfigError, option

PRIORS = (1e-30, 1e30)
TEMPERATURES = (1e-3, 1e3)
DAMPING = ("exact", "factored")
CURVATURE = ("sum", "mean")
DROPOUT_RATES = (1e-3, 0.99)
MOST_MEMBERS = 64
"""Largest ensemble."""
MOST_SOURCES = 16
"""Most models in a mixture."""
MOST_SEED = 2**31 - 1
MOST_RATE = 1e30
"""Learning rates, momentum and decay: what float32 holds, with room for a product."""


def import_name(setting: str, name: str, form: str) -> Any:
    """The object MODULE:NAME. Called only with what the user typed: importing runs its code."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        if ":" not in name:
            raise ValueError(f"write {form}")
        return pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option(setting, name)}: {error}") from None


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value)[:80], allowed, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{name} must be one of {', '.join(allowed)}; got {reprlib.repr(value)}{hint}"
        )


def between(name: str, value: float, low: float, high: float = math.inf) -> None:
    if low <= value <= high and value != math.inf:
        return
    bounds = f"be at least {low}" if high == math.inf else f"lie between {low} and {high}"
    raise ConfigError(f"{name} must {bounds}; got {value}")


at_least = between


def check_seed(seed: int) -> None:
    between("seed", seed, 0, MOST_SEED)
