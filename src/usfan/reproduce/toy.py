"""The paper's toy experiment: mild and strong shift, every method, all seeds at once.

    usfan reproduce toy        → runs/toy/: metrics.json, toy.png, config.yaml, log.jsonl

EXPECT
A run counts as flipped when its accuracy ends under 50 %: classes have changed places.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from usfan.adaptation.methods import METHODS
from usfan.errors import ConfigError
from usfan.progress import bar
from usfan.reproduce import toy_model as toy
from usfan.reproduce.toy_adapt import FLIPPED, VARIANTS, StackedPosterior, adapt_stack
from usfan.reproduce.toy_model import SHIFTS, Domains, StackedMLP, make_domains, train_stack
from usfan.run import write_json, write_text

SEEDS = tuple(range(20))


@dataclass(frozen=True)
class Study:
    """What a run leaves in memory, for the figure and the tests."""

    seeds: tuple[int, ...]
    domains: Domains
    source: StackedMLP
    adapted: dict[str, dict[str, StackedMLP]]
    """Shift → name → networks."""
    posteriors: dict[str, StackedPosterior]
    """Name → posteriors of the source networks."""
    metrics: dict[str, Any]
    log: list[dict[str, Any]]
    """The lines of log.jsonl."""


def study_toy(
    seeds: Iterable[int],
    *,
    source_steps: int = toy.SOURCE_STEPS,
    target_steps: int = toy.TARGET_STEPS,
    learning_rate: float = toy.LEARNING_RATE,
    variants: Iterable[str] = tuple(VARIANTS),
    advance: Callable[[int], None] = lambda count: None,
) -> Study:
    """Train, fit, adapt and score. Labels of the target serve for the score alone."""
    seeds = tuple(seeds)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"each seed may be given once; got {', '.join(map(str, seeds))}")
    domains, source = make_domains(seeds), StackedMLP(seeds)
    log = [{"event": "started", "time": time.time()}]
    train_stack(source, domains.source, domains.labels, source_steps, advance)
    accuracy = statistics.fmean(source.accuracy(domains.source, domains.labels))
    log.append({"event": "trained", "time": time.time(), "source_accuracy": accuracy})
    posteriors = {
        name: StackedPosterior.fit(source, domains.source, VARIANTS[name].prior, VARIANTS[name].samples)
        for name in variants
    }
    settings: dict[str, Any] = {"steps": target_steps, "learning_rate": learning_rate, "advance": advance}
    adapted: dict[str, dict[str, StackedMLP]] = {shift: {} for shift in SHIFTS}
    metrics: dict[str, Any] = {shift: {} for shift in SHIFTS}
    for shift, points in domains.targets.items():
        for name, posterior in posteriors.items():
            started = time.perf_counter()
            network = adapt_stack(source, posterior, points, VARIANTS[name], **settings)
            seconds = time.perf_counter() - started
            adapted[shift][name] = network
            metrics[shift][name] = score(network.accuracy(points, domains.labels), seconds)
            log.append({"event": "scored", "time": time.time(), "shift": shift, "method": name, **metrics[shift][name]})
    return Study(seeds, domains, source, adapted, posteriors, metrics, log)


def score(accuracies: list[float], seconds: float) -> dict[str, Any]:
    return {
        "accuracy": round(statistics.fmean(accuracies), 3),
        "std": round(statistics.stdev(accuracies), 3) if len(accuracies) > 1 else None,
        "flipped": sum(value < FLIPPED for value in accuracies),
        "runs": len(accuracies),
        "seconds": round(seconds, 2),
        "accuracies": [round(value, 3) for value in accuracies],
    }


def run_toy(
    seeds: Iterable[int] = SEEDS,
    *,
    out: Path,
    source_steps: int = toy.SOURCE_STEPS,
    target_steps: int = toy.TARGET_STEPS,
    learning_rate: float = toy.LEARNING_RATE,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The study, written to `out`; gives what metrics.json holds. `progress` is told of every step done."""
    from usfan.reproduce.toy_figure import toy_figure

    seeds = tuple(seeds)
    settings: dict[str, Any] = {
        "source_steps": source_steps,
        "target_steps": target_steps,
        "learning_rate": learning_rate,
    }
    moving = sum(METHODS[variant.method].adapts for variant in VARIANTS.values())
    with bar("toy", source_steps + len(SHIFTS) * moving * target_steps, "steps") as shown:
        study = study_toy(seeds, advance=progress or shown.advance, **settings)
    config = {
        "command": "reproduce toy",
        "seeds": list(seeds),
        **settings,
        "momentum": toy.MOMENTUM,
        "weight_decay": toy.WEIGHT_DECAY,
        "methods": {name: asdict(variant) for name, variant in VARIANTS.items()},
    }
    write_text(out / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    write_text(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in study.log))
    toy_figure(study, out / "toy.png")
    write_json(out / "metrics.json", study.metrics)
    return study.metrics


def reproduce_toy(out: Path, seeds: Iterable[int] | None = None) -> dict[str, Any]:
    """The command: the study, and its table on the terminal."""
    started = time.perf_counter()
    metrics = run_toy(SEEDS if seeds is None else seeds, out=out)
    Console().print(table(metrics))
    Console(stderr=True).print(f"{out}: metrics.json, toy.png ({time.perf_counter() - started:.0f} s)", markup=False)
    return metrics


def table(metrics: dict[str, Any]) -> Table:
    """Mean ± standard deviation over seeds, and flipped runs, for each shift."""
    shown = Table(
        title="Toy: target accuracy in %", caption="flipped: runs that end under 50 %; seconds: all seeds together"
    )
    shown.add_column("method")
    for shift in SHIFTS:
        for column in (shift, "flipped", "seconds"):
            shown.add_column(column, justify="right")
    for name in VARIANTS:
        cells = []
        for shift in SHIFTS:
            row = metrics[shift][name]
            spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
            cells += [f"{row['accuracy']:.1f}{spread}", f"{row['flipped']} of {row['runs']}", f"{row['seconds']:.1f}"]
        shown.add_row(name, *cells)
    return shown
