"""What the reliability scripts share: the path to the other test modules, what a process holds, and saving."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
RESULTS = TESTS.parent / "docs" / "results"
for folder in (
    TESTS,
    TESTS / "data" / "decoding",
    TESTS / "labelling",
    TESTS / "reliability",
):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def status_mib(field: str, pid: int | str = "self") -> float:
    """A field of /proc/PID/status in MiB: VmRSS is what is held now, VmHWM the most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def open_handles(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def command() -> str:
    """The command that this program was started with."""
    return " ".join(["python", os.path.relpath(sys.argv[0], TESTS.parent), *sys.argv[1:]])


def save(name: str, figures: dict[str, Any]) -> None:
    """docs/results/reliability-NAME.json: the figures, and what they were taken on."""
    import torch

    where = {
        "command": command(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    path = RESULTS / f"reliability-{name}.json"
    path.write_text(json.dumps({**where, **figures}, indent=2) + "\n", encoding="utf-8")
    print(path, json.dumps(figures, indent=2), sep="\n")
