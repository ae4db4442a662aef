"""`usfan study`, and `usfan reproduce`: which program makes which of the paper's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from usfan.compute.runtime import Runtime
from usfan.errors import ConfigError
from usfan.reproduce.choices import take_methods, take_seeds
from usfan.runs.folder import folder_lock


def reproduce(name: str, settings: dict[str, Any], runtime: Runtime, computing: dict[str, Any] | None = None) -> None:
    """The command. Toy and the demo's digits have their own programs."""
    out = Path(settings.pop("out", f"runs/{name}"))
    if name == "toy":
        from usfan.reproduce.toy.experiment import SEEDS, run_toy

        seeds, methods = take_seeds(settings, SEEDS), take_methods(settings)
        nothing_else("toy", settings)
        with folder_lock(out):
            run_toy(seeds, out=out, methods=methods)
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
        run_suite(name, settings, out, runtime, computing)


def study(settings: dict[str, Any], runtime: Runtime, computing: dict[str, Any] | None = None) -> None:
    """The command: as `reproduce`, with the domain folders in `data` as the benchmark."""
    run_suite(None, settings, Path(settings.pop("out", "runs/study")), runtime, computing)


def run_suite(
    name: str | None, settings: dict[str, Any], out: Path, runtime: Runtime, computing: dict[str, Any] | None
) -> None:
    from usfan.reproduce.cluster import run_on_ray
    from usfan.reproduce.suite import Suite

    suite = Suite.open(name, settings, out, runtime, computing)
    with folder_lock(out):
        suite.run(run_on_ray if suite.place.ray else None)


def nothing_else(name: str, settings: dict[str, Any]) -> None:
    if settings:
        given = ", ".join(sorted(settings))
        raise ConfigError(f"reproduce {name} takes --methods, --seeds and --out only; got {given}")
