"""`usfan study`, and `usfan reproduce`: the program behind each of the paper's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError, option
from usfan.store.run_folder import folder_lock
from usfan.study.choices import Settings, take_methods, take_seeds


def reproduce(
    name: str,
    settings: Settings,
    runtime: Runtime,
    computing: dict[str, Any] | None = None,
) -> None:
    """The command. The toy and the demo's digits bring their data; the other benchmarks lie in `data`."""
    out = Path(settings.pop("out", f"runs/{name}"))
    if name != "toy" and (name != "digits" or "data" in settings):
        run_suite(name, settings, out, runtime, computing)
        return
    from usfan.study.digits import run_seeds
    from usfan.study.toy import SEEDS, run_toy

    seeds = take_seeds(settings, SEEDS if name == "toy" else [0])
    methods = take_methods(settings)
    if settings:
        raise ConfigError(
            f"reproduce {name} without {option('data')} takes methods, seeds and out only; got "
            f"{', '.join(sorted(settings))}"
        )
    with folder_lock(out, "reproduce"):
        if name == "toy":
            run_toy(seeds, out=out, methods=methods)
        else:
            run_seeds(out, runtime=runtime, seeds=seeds, methods=methods)


def study(
    settings: Settings, runtime: Runtime, computing: dict[str, Any] | None = None
) -> None:
    """The command: as `reproduce`, with the domain folders in `data` as the benchmark."""
    out = Path(settings.pop("out", "runs/study"))
    run_suite(None, settings, out, runtime, computing)


def run_suite(
    name: str | None,
    settings: Settings,
    out: Path,
    runtime: Runtime,
    computing: dict[str, Any] | None,
) -> None:
    from usfan.study.cluster import cells_on_ray
    from usfan.study.suite import Suite

    suite = Suite.open(name, settings, out, runtime, computing)
    with folder_lock(out, "study" if name is None else "reproduce"):
        suite.run(cells_on_ray if suite.computing.ray else None)
