"""What a study is asked for: how many jobs, which pairs of domains; what it has done already; the commit it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from usfan.adaptation.settings import begun_with, chosen_for, chosen_settings
from usfan.config import AdaptConfig, make_config
from usfan.data.benchmarks.benchmark import Found
from usfan.errors import ArtifactError, ConfigError
from usfan.files import read_json


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


def read_mapping(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: a mapping was expected")
    return value


def finished_cell(path: Path, settings: dict[str, Any], backbone: str, classes: int) -> dict[str, Any]:
    """The row of a cell that is done, if it was run with what is chosen now for settings that are not given."""
    row, config = read_mapping(path), make_config(AdaptConfig, settings)
    now, then = (chosen_settings(chosen_for(c, backbone, classes)) for c in (config, begun_with(config, row)))
    changed = [name for name in now if now[name] != then[name]]
    if changed:
        raise ConfigError(f"{path} was run with other defaults ({', '.join(changed)}): another --out?")
    return row


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
