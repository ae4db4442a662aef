"""What a study is asked for: how many jobs, which pairs of domains; and the commit it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from usfan.data.benchmark import Found
from usfan.errors import ConfigError


def take_jobs(settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    rest = dict(settings)
    jobs = rest.pop("jobs", 1)
    if type(jobs) is not int or jobs < 1:
        raise ConfigError(f"jobs must be a whole number from 1; got {jobs!r}")
    return jobs, rest


def chosen_pairs(found: Found, names: list[str] | None) -> tuple[tuple[str, str], ...]:
    if names is None:
        return found.pairs
    from usfan.reproduce.command import each_once

    each_once("task", names)
    by_name = {f"{s}-{t}": (s, t) for s, t in found.pairs}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no task {name!r}; the tasks are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def commit() -> str | None:
    """The commit of this checkout, where it is one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
