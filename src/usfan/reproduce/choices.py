"""What a study is asked for: domains, methods, seeds and pairs; what it has done already; the commit it runs."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usfan.adaptation.methods import METHODS, find_method
from usfan.adaptation.settings import refuse
from usfan.config import AdaptConfig, TrainConfig, convert, make_config
from usfan.config_checks import check_seed
from usfan.data.benchmarks.benchmark import Found
from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.benchmarks.layout_check import check
from usfan.data.benchmarks.own import own_domains
from usfan.errors import ArtifactError, ConfigError
from usfan.files import read_json
from usfan.models.backbones import offline_weights

PAPER = ("source-only", "shot-im", "shot-im-entropy", "shot", "u-sfan", "u-sfan+")
"""The methods that the paper compares: what a study runs if it is not told."""


OWN_SEEDS = (0, 1, 2)
"""Defaults of a study of own domains."""


def find_domains(name: str | None, root: Any, *, allow_counts: bool, allow_classes: bool) -> Found:
    """The copy of a named benchmark below `root`, after a check, or the user's own domains there."""
    if name is None:
        return own_domains(root)
    entry = benchmark(name)
    if root is None:
        raise ConfigError(f"{entry.title}: pass --data ROOT; the data set is published at {entry.homepage}")
    return check(entry, Path(root), allow_counts=allow_counts, allow_classes=allow_classes)


def take_source(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of stage 1: the network, and any other with `source_` before its name."""
    source: dict[str, Any] = {k: settings.pop(k) for k in ("backbone", "pretrained") if k in settings}
    for item in dataclasses.fields(TrainConfig):
        if settings.get(f"source_{item.name}") is not None and item.name != "seed":
            source[item.name] = convert(item, settings.pop(f"source_{item.name}"))
    make_config(TrainConfig, source)
    return source


def check_settings(methods: Sequence[str], settings: dict[str, Any]) -> None:
    """Every setting is one of an adaptation, or of at least one of the methods."""
    fields = {f.name for f in dataclasses.fields(AdaptConfig)}
    for name in sorted(settings.keys() - fields):
        if not any(name in METHODS[m].settings() for m in methods):
            refuse(name, METHODS[methods[0]], fields)
    make_config(AdaptConfig, {k: v for k, v in settings.items() if k in fields})


def own_methods(source: dict[str, Any]) -> tuple[str, ...]:
    """What a study of own domains compares if it is not told: the paper's methods, and u-sfan++ if it can run."""
    weights = source.get("pretrained", TrainConfig.pretrained)
    offline = offline_weights(source.get("backbone", TrainConfig.backbone)) is not None
    pretrained = offline if weights in ("auto", "offline") else weights != "none"
    return (*PAPER, "u-sfan++") if pretrained else PAPER


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


def take_methods(settings: dict[str, Any], usual: Sequence[str] = PAPER) -> tuple[str, ...]:
    methods = settings.pop("methods", usual)
    each_once("method", methods)
    return tuple(find_method(str(name)).name for name in methods)


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
    """The commit of this checkout, if it is one."""
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
