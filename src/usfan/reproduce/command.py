"""`usfan reproduce`: which program makes which of the paper's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usfan.adaptation.methods import METHODS, find_method
from usfan.compute.runtime import Runtime
from usfan.config_checks import check_seed
from usfan.errors import ConfigError
from usfan.runs.folder import folder_lock


def reproduce(name: str, settings: dict[str, Any], runtime: Runtime) -> None:
    """The command. Toy and the demo's digits have their own programs."""
    out = Path(settings.pop("out", f"runs/{name}"))
    if name == "toy":
        from usfan.reproduce.toy.experiment import reproduce_toy

        seeds, methods = take_seeds(settings, None), take_methods(settings)
        nothing_else("toy", settings)
        with folder_lock(out):
            reproduce_toy(out, seeds=seeds, methods=methods)
    elif name == "digits" and "data" not in settings:
        from usfan.reproduce.digits import run_demo, run_seeds

        seeds, methods = take_seeds(settings, [0]), take_methods(settings)
        nothing_else("digits without --data", settings)
        with folder_lock(out):
            if len(seeds) == 1:
                run_demo(out, runtime=runtime, seed=seeds[0], methods=methods)
            else:
                run_seeds(out, runtime=runtime, seeds=seeds, methods=methods)
    else:
        from usfan.reproduce.suite import Suite

        study = Suite.open(name, settings, out, runtime)
        with folder_lock(out):
            study.run()


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
    methods = settings.pop("methods", tuple(METHODS))
    each_once("method", methods)
    return tuple(find_method(str(name)).name for name in methods)


def each_once(what: str, values: Sequence[Any]) -> None:
    if not values:
        raise ConfigError(f"no {what} is given: at least one is needed")
    if len(set(values)) < len(values):
        raise ConfigError(f"each {what} may be given once; got {', '.join(map(str, values))}")


def nothing_else(name: str, settings: dict[str, Any]) -> None:
    if settings:
        given = ", ".join(sorted(settings))
        raise ConfigError(f"reproduce {name} takes --methods, --seeds and --out only; got {given}")
