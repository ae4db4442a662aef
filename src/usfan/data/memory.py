"""Free memory, and the place that it leaves for a set of decoded images."""

from __future__ import annotations

import os
from pathlib import Path

import torch

SHARE = 0.5
"""Share of the free memory that a set of images, or of their features, may take."""


def choose_place(size: int, device: torch.device) -> torch.device | None:
    """The device if it has room for so many bytes, else the host; None if neither has."""
    if device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(device)[0]:
        return device
    return torch.device("cpu") if size <= SHARE * free_host_memory() else None


def free_host_memory() -> int:
    """Bytes that can still be taken without swapping: the machine's, or the container's if that is less."""
    free = _machine_memory()
    limited = _container_memory(Path("/sys/fs/cgroup"))
    return free if limited is None else min(free, limited)


def _machine_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    )  # what is free is not told: take half


def _container_memory(folder: Path) -> int | None:
    """The limit of this control group less what is in use; None without a limit. Cached files count as free."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return None
    return max(0, limit - used + int(facts.get("file", 0)))
