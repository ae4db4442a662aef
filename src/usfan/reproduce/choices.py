"""What a study is asked for: how many jobs, which pairs of domains; what it has done already; the commit it runs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usfan.adaptation.methods import find_method
from usfan.config_checks import check_seed
from usfan.data.benchmarks.benchmark import Found
from usfan.errors import ArtifactError, ConfigError
from usfan.files import read_json

PAPER = ("source-only", "shot-im", "shot-im-entropy", "shot", "u-sfan", "u-sfan+")


def take_jobs(settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    rest = dict(settings)
    jobs = rest.pop("jobs", 1)
    if type(jobs) is not int or jobs < 1:
        raise ConfigError(f"jobs must be a whole number from 1; got {jobs!r}")
    return jobs, rest


def chosen_pairs(found: Found, names: list[str] | None) -> tuple[tuple[str, str], ...]:
    if names is None:
        return found.pairs
    each_once("task", names)
    by_name = {f"{s}-{t}": (s, t) for s, t in found.pairs}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no task {name!r}; the tasks are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def take_seeds(settings: dict[str, Any], default: Any) -> Any:
    """`seeds`, or the one `seed`."""
    one = settings.pop("seed", None)
    seeds = settings.pop("seeds", default if one is None else [one])
    if seeds is not None and (
        not isinstance(seeds, (list, tuple)) or not seeds or not all(type(s) is int for s in seeds)
    ):
        raise ConfigError(f"seeds must be a list of whole numbers; got {seeds!r}")
    for seed in seeds or ():
        check_seed(seed)
    if seeds is not None:
        each_once("seed", seeds)
    return seeds


def take_methods(settings: dict[str, Any]) -> tuple[str, ...]:
    methods = settings.pop("methods", usual_methods())
    each_once("method", methods)
    return tuple(find_method(str(name)).name for name in methods)


def usual_methods() -> tuple[str, ...]:
    """What a study runs if it is not told: the methods that the paper compares."""
    return PAPER


def each_once(what: str, values: Sequence[Any]) -> None:
    if not values:
        raise ConfigError(f"no {what} is given: at least one is needed")
    if len(set(values)) < len(values):
        raise ConfigError(f"each {what} may be given once; got {', '.join(map(str, values))}")


def read_mapping(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: a mapping was expected")
    return value


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
