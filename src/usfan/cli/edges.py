"""What commands do around the work: open the data and the devices, and report the outcome."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from usfan.config import RuntimeConfig, make_config
from usfan.errors import ConfigError, shown
from usfan.progress import console, say

NAMED = 50
"""Unreadable images that are named on the terminal; all of them are in log.jsonl."""


def take(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """The fields of a config among the settings."""
    return {f.name: settings[f.name] for f in dataclasses.fields(kind) if f.name in settings}


def open_data(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The images, and what config.yaml says of them."""
    from usfan.data.sources import ImageData

    options = {"root": settings.get("root"), "strict": settings.get("strict", False)}
    if "unlabelled" in settings:
        options["unlabelled"] = settings["unlabelled"]
    return ImageData(settings["data"], **options), {"data": settings["data"], **options}


def open_runtime(settings: dict[str, Any], *, several: bool = False) -> tuple[Any, dict[str, Any]]:
    """The devices, and what config.yaml says of them. `several`: the command can run in several processes."""
    from usfan.compute.runtime import process_counts, start_runtime

    config = make_config(RuntimeConfig, take(settings, RuntimeConfig))
    if not several and process_counts(config) != (1, 1):
        raise ConfigError("this command runs in one process: leave --devices and --nodes out")
    runtime = start_runtime(config)
    console.quiet = runtime.rank > 0
    return runtime, dataclasses.asdict(config)


def load_module(named: str | None) -> Any:
    """The network that MODULE:FUNCTION makes. Called only with what the user typed: importing runs its code."""
    if named is None:
        return None
    place, _, function = named.partition(":")
    if not place or not function:
        raise ConfigError(f"--module {named}: write MODULE:FUNCTION, such as my_networks:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        make = getattr(importlib.import_module(place), function)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--module {named}: there is no module {error.name}") from None
    except AttributeError:
        raise ConfigError(f"--module {named}: {place} has no {function}") from None
    network = make()
    from torch import nn

    if not isinstance(network, nn.Module):
        raise ConfigError(f"--module {named}: it must give a torch.nn.Module; got a {type(network).__name__}")
    return network


def must_be_a_file(path: Path, flag: str) -> None:
    """Check before the work that the file can be written."""
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
    """The unreadable files by their paths below the data, because a log may be shared."""
    from usfan.data.images import below, common_folder

    folder = common_folder(data.paths) if data.paths else ""
    return {below(path, folder) if folder else path: reason for path, reason in data.unreadable.items()}


def describe_worth(labels: dict[str, Any]) -> str:
    """What the given labels are worth, in one line."""
    images = "image" if labels["count"] == 1 else "images"
    parts = [f"{labels['count']} {images} of {labels['classes']} classes"]
    if "left_out" in labels and "without" in labels:
        shares = f"{labels['left_out']:.0f} % with the others, {labels['without']:.0f} % without any"
        parts.append(f"left out in turn, they are right for {shares}")
    if "among" in labels:
        parts.append(describe_test(labels["among"], labels["seen"]))
    rest = labels.get("rest", {})
    if "without" in rest and "with" in rest:
        shares = f"{rest['with']:.1f} % with these labels, {rest['without']:.1f} % without"
        parts.append(f"the other {rest['images']:,} images are right for {shares}")
    return "; ".join(parts)


def describe_test(among: int | None, seen: int) -> str:
    """How many of the images of an evaluation the model learned from."""
    if among is None:
        return "cannot tell whether images here are among them, because the run recorded none of their paths"
    if among == seen:
        return f"all {seen:,} images here are among them, so these figures are no test"
    if among == 0:
        return f"none of the {seen:,} images here is among them"
    return f"{among:,} of the {seen:,} images here are among them, and not in these figures"


def say_changes(out: str, data: str, model: Any, module: str | None = None) -> None:
    """After `adapt`: where the model is, what the guard kept, how many predictions changed, and what to do next."""
    from usfan.evaluation.changes import describe_changes

    where, history = shlex.quote(out), model.history
    kept = "the model, adapted by" if history["kept_epoch"] else "the source model, after a try with"
    guess, counts = history["estimated_accuracy"]["after"], history["estimated_accuracy"]["counts"]
    own = "" if module is None else f" --module {shlex.quote(module)}"
    found = history.get("classes")
    for line in (
        f"{out}: {kept} {model.method}",
        f"guard: {history['guard']['reason'].removeprefix('guard ')}",
        f"estimated accuracy, without labels: {guess['value']:.0f} % ({guess['low']:.0f} to {guess['high']:.0f}), "
        + counts,
        *([f"classes of the target: {found['setting']} set; {found['reason']}"] if found else []),
        f"changes: {describe_changes(model)}",
        f"next: usfan predict {where} {shlex.quote(data)} --out predictions.csv{own}",
        f"      usfan report {where}",
    ):
        say(line)
