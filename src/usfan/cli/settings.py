"""What the commands do with their settings before the work: each takes its own, and what is left over is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from usfan.config import AdaptConfig, RuntimeConfig, TrainConfig, make_config, unknown_setting
from usfan.config_checks import check_seed
from usfan.errors import ConfigError, shown
from usfan.progress import console

NAMED = 50
"""Unreadable images that are named on the terminal; all of them are in log.jsonl."""


def take(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """Take the fields of a config out of the settings."""
    return {f.name: settings.pop(f.name) for f in dataclasses.fields(kind) if f.name in settings}


def nothing_left(settings: dict[str, Any]) -> None:
    """Refuse what no one took."""
    if settings:
        known = {f.name for kind in (TrainConfig, AdaptConfig, RuntimeConfig) for f in dataclasses.fields(kind)}
        raise unknown_setting(min(settings), known, "see --help")


def without_runtime(settings: dict[str, Any]) -> dict[str, Any]:
    """What is left besides the flags that every command takes."""
    make_config(RuntimeConfig, take(settings, RuntimeConfig))
    drop_seed(settings)
    return settings


def drop_seed(settings: dict[str, Any]) -> None:
    """Of a command that draws nothing."""
    seed = settings.pop("seed", 0)
    if not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number; got {seed!r}")
    check_seed(seed)


def open_data(settings: dict[str, Any], source: str) -> Any:
    from usfan.data.sources import ImageData

    return ImageData(source, root=settings.pop("root", None), strict=bool(settings.pop("strict", False)))


def open_runtime(settings: dict[str, Any], *, several: bool = False) -> Any:
    """`several`: the command can run in several processes. Its mistakes are found before they start, once."""
    from usfan.compute.runtime import process_counts, start_runtime

    config = make_config(RuntimeConfig, take(settings, RuntimeConfig))
    if several:
        nothing_left(settings)
    elif process_counts(config) != (1, 1):
        raise ConfigError("this command runs in one process: leave --devices and --nodes out")
    runtime = start_runtime(config)
    console.quiet = runtime.rank > 0
    return runtime


def must_be_a_file(path: Path, flag: str) -> None:
    """Before the work: the file can be written where it is to lie."""
    from usfan.files import must_be_writable

    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no ordinary file"
        raise ConfigError(f"{path} is {what}: {flag} names the file to write")
    must_be_writable(path.parent, flag)


def say_skipped(data: Any, run: Any = None, *, private: bool = False) -> None:
    """Name the images that could not be read, and count them; the log of a run that is not private holds them all."""
    from usfan.data.stream import report_skipped

    logged = run is not None and not private
    for line in report_skipped(data.unreadable, len(data), most=NAMED if logged else None):
        console.print(shown(line), style="yellow", markup=False, highlight=False, soft_wrap=True)
    if data.unreadable and logged:
        run.log("skipped", count=len(data.unreadable), files=below_the_data(data))


def below_the_data(data: Any) -> dict[str, str]:
    """The unreadable files by their paths below the data: a log goes to others, with the run."""
    from usfan.data.images import below, common_folder

    folder = common_folder(data.paths) if data.paths else ""
    return {below(path, folder) if folder else path: reason for path, reason in data.unreadable.items()}
