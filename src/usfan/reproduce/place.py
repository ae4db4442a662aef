"""Where the cells of a study run: in this process, on a Ray started here, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from usfan.errors import ConfigError

LOCAL = "local"


@dataclass(frozen=True)
class Place:
    """Where the cells of a study run."""

    ray: str | None = None
    """Address of a Ray cluster; `local` starts one here; None runs the cells one after another in this process."""
    share: float = 0.5
    """GPU share that a cell asks Ray for."""
    threads: int | None = None
    """CPU threads of a cell, and the cores it asks Ray for: by default torch's choice, or 1 on Ray."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1; got {self.share}")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads must be a whole number from 1; got {self.threads}")

    @property
    def cores(self) -> int:
        return self.threads or 1


def take_place(settings: dict[str, Any]) -> Place:
    """Take its fields out of the settings."""
    return Place(**{name: settings.pop(name) for name in ("ray", "share", "threads") if settings.get(name) is not None})


@contextlib.contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads of torch inside; None leaves them alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
