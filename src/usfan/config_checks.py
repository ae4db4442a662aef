"""What a setting may be; `ConfigError` names the one that may not."""

from __future__ import annotations

import difflib
import reprlib

from usfan.errors import ConfigError

PRIORS = (1e-30, 1e30)
TEMPERATURES = (1e-3, 1e3)
DROPOUT_RATES = (1e-3, 0.99)
MOST_MEMBERS = 64
"""Largest ensemble."""
MOST_SOURCES = 16
"""Most models in a mixture."""
MOST_RATE = 1e30
"""Learning rates, momentum and decay: what float32 holds, with room for a product."""


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
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {reprlib.repr(value)}{hint}")


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least or value == float("inf"):
        raise ConfigError(f"{name} must be at least {least}; got {value}")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low} and {high}; got {value}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed must be a whole number from 0 to 2147483647; got {seed}")


def check_prior(prior: float | str) -> None:
    if isinstance(prior, str):
        one_of("prior", prior, ("evidence", "weight-decay"))
    elif not PRIORS[0] <= prior <= PRIORS[1]:
        raise ConfigError(
            f"the prior precision must be a positive number, from {PRIORS[0]} to {PRIORS[1]}; got {prior}"
        )
