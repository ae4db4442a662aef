"""The choices of a study: domains, methods, seeds, pairs, and where its cells run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from usfan.adaptation.methods import METHODS, Method, find_method
from usfan.adaptation.plan import refuse_setting
from usfan.config import AdaptConfig, TrainConfig, convert, make_config
from usfan.config_checks import at_least, check_seed, import_name
from usfan.data.benchmarks.benchmark import Copy
from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.benchmarks.layouts import check
from usfan.data.benchmarks.user_domains import own_domains
from usfan.errors import ConfigError, option
from usfan.models.small_backbones import SMALL_BACKBONES

PAPER = ("source-only", "shot-im", "shot-im-entropy", "shot", "u-sfan", "u-sfan+")
"""The methods that the paper compares: those of a study by default."""
USER_SEEDS = (0, 1, 2)
"""Seeds of a study of the user's domains by default."""

Settings = dict[str, Any]
"""Settings by name. Each `take_…` removes those that it reads."""
Pair = tuple[str, str]
"""Source and target."""


@dataclass(frozen=True)
class Computing:
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
        at_least("threads", self.cores, 1)

    @property
    def cores(self) -> int:
        return 1 if self.threads is None else self.threads


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads of torch inside; None leaves them alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_computing(settings: Settings) -> Computing:
    values = {}
    for name in ("ray", "share", "threads"):
        value = settings.pop(name, None)
        if value is not None:
            values[name] = value
    return Computing(**values)


def take_domains(name: str | None, settings: Settings) -> Copy:
    """The copy of a named benchmark in the folder `data`, after a check, or the user's domains there."""
    root = settings.pop("data", None)
    counts = bool(settings.pop("allow_counts", False))
    if name is None:
        return own_domains(root)
    entry = benchmark(name)
    if root is None:
        raise ConfigError(
            f"{entry.title}: pass {option('data', 'ROOT')}; the data set is published at {entry.homepage}"
        )
    classes = bool(settings.get("allow_classes", False))
    return check(entry, Path(root), allow_counts=counts, allow_classes=classes)


def take_source(settings: Settings) -> Settings:
    """The settings of stage 1: the network, and any other with `source_` before its name."""
    source = {}
    for item in dataclasses.fields(TrainConfig):
        flag = item.name if item.name in ("backbone", "pretrained") else f"source_{item.name}"
        if settings.get(flag) is not None and item.name != "seed":
            source[item.name] = convert(item, settings.pop(flag))
    if settings.get("preset"):
        source.setdefault("preset", settings["preset"])
    make_config(TrainConfig, source)
    return source


def check_settings(methods: Sequence[str], settings: Settings) -> None:
    """Every setting belongs to adaptation, or to at least one of the methods."""
    fields = {item.name for item in dataclasses.fields(AdaptConfig)}
    for name in sorted(settings.keys() - fields):
        if not any(name in METHODS[method].settings() for method in methods):
            refuse_setting(name, METHODS[methods[0]])
    make_config(AdaptConfig, {name: settings[name] for name in settings.keys() & fields})


def user_methods(source: Settings) -> tuple[str, ...]:
    """The methods for the user's domains by default: the paper's, and u-sfan++ if its witness is available."""
    is_random = source["backbone"] in SMALL_BACKBONES or source.get("pretrained") == "none"
    return PAPER if is_random else (*PAPER, "u-sfan++")


def take_pairs(settings: Settings, domains: Copy) -> tuple[Pair, ...]:
    names = settings.pop("pairs", None)
    if names is None:
        return domains.pairs
    check_each_once("task", names)
    by_name = {f"{source}-{target}": (source, target) for source, target in domains.pairs}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"no task {name!r}; the tasks are {', '.join(by_name)}")
    return tuple(by_name[name] for name in names)


def take_seeds(settings: Settings, default: Sequence[int]) -> tuple[int, ...]:
    """`seeds`, or the one `seed`."""
    seed = settings.pop("seed", None)
    seeds = settings.pop("seeds", default if seed is None else [seed])
    if not isinstance(seeds, (list, tuple)) or set(map(type, seeds)) != {int}:
        raise ConfigError(f"seeds must be a list of whole numbers; got {seeds!r}")
    check_each_once("seed", seeds)
    for each in seeds:
        check_seed(each)
    return tuple(seeds)


def take_methods(settings: Settings, default: Sequence[str] = PAPER) -> tuple[str, ...]:
    methods = settings.pop("methods", default)
    name = settings.pop("method", None)
    if name is not None:
        methods = [*methods, add_method(name).name]
    check_each_once("method", methods)
    return tuple(find_method(str(name)).name for name in methods)


def add_method(name: str) -> Method:
    """The user's own row of `METHODS`, MODULE:NAME."""
    method = import_name("method", name, "MODULE:NAME, such as my_module:METHOD")
    if not isinstance(method, Method):
        raise ConfigError(
            f"{option('method', name)}: it must be a usfan.Method; got a {type(method).__name__}"
        )
    return method if METHODS.get(method.name) == method else METHODS.add(method)


def check_each_once(kind: str, values: Sequence[object]) -> None:
    if not values:
        raise ConfigError(f"no {kind} is given: at least one is needed")
    if len(set(values)) < len(values):
        raise ConfigError(f"each {kind} may be given once; got {', '.join(map(str, values))}")
