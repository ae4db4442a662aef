"""The paper's toy experiment: mild and strong shift, every method, all seeds at once.

    usfan reproduce toy        → runs/toy/: metrics.json, toy.png, config.yaml, study.json, log.jsonl

To expect, in about a minute on two cores (seeds 0 to 19; accuracy in %, and flipped runs, those that end under 50 %):

                        mild          strong        flipped
    source-only         93.3 ± 1.6    65.1 ±  8.7         0
    shot-im             96.6 ± 0.9    68.0 ± 38.5         7
    shot-im-entropy     96.4 ± 1.1    77.1 ± 31.5         4
    shot                96.5 ± 1.0    88.6 ± 25.3         2
    u-sfan              96.3 ± 1.0    85.5 ± 29.3         3
    u-sfan+             96.3 ± 1.1    89.6 ± 23.5         2
    u-sfan (evidence)   96.3 ± 1.1    76.8 ± 32.8         4
    u-sfan (paper)      96.4 ± 0.9    62.1 ± 33.8         7

Most runs of the strong shift end near 0 or near 100, so twenty seeds leave about ± 8 on a mean.
`toy_adapt` says how the lines differ.
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from usfan.adaptation.methods import METHODS, find_method
from usfan.errors import ConfigError
from usfan.files import write_json, write_text, write_yaml
from usfan.progress import bar, say
from usfan.reproduce.toy import model as toy
from usfan.reproduce.toy.adapt import FLIPPED, VARIANTS, StackedPosterior, adapt_stack
from usfan.reproduce.toy.model import SHIFTS, Domains, StackedMLP, make_domains, train_stack

SEEDS = tuple(range(20))
MOST_THREADS = 4
Advance = Callable[[int], None]
Task = TypeVar("Task")
Result = TypeVar("Result")


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
    advance: Advance = lambda steps: None,
) -> Study:
    """Train, fit, adapt and score. Labels of the target are used for the score only."""
    seeds, variants, advance = tuple(seeds), tuple(variants), one_at_a_time(advance)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"each seed may be given once; got {', '.join(map(str, seeds))}")
    log: list[dict[str, Any]] = [{"event": "started", "time": time.time()}]
    domains = make_domains(seeds)
    source = train_sources(seeds, source_steps, advance)
    accuracy = statistics.fmean(source.accuracy(domains.source, domains.labels))
    log.append({"event": "trained", "time": time.time(), "source_accuracy": accuracy})
    posteriors = {
        name: StackedPosterior.fit(source, domains.source, VARIANTS[name].prior, VARIANTS[name].samples)
        for name in variants
    }
    settings: dict[str, Any] = {"steps": target_steps, "learning_rate": learning_rate, "advance": advance}

    def adapt(task: tuple[str, str]) -> tuple[StackedMLP, dict[str, Any]]:
        shift, name = task
        started, points = time.perf_counter(), domains.targets[shift]
        network = adapt_stack(source, posteriors[name], points, VARIANTS[name], **settings)
        seconds = time.perf_counter() - started
        row = score(network.accuracy(points, domains.labels), seconds)
        log.append({"event": "scored", "time": time.time(), "shift": shift, "method": name, **row})
        return network, row

    tasks = [(shift, name) for shift in SHIFTS for name in variants]
    done = dict(zip(tasks, in_threads(adapt, tasks), strict=True))
    adapted = {shift: {name: done[shift, name][0] for name in variants} for shift in SHIFTS}
    metrics = {shift: {name: done[shift, name][1] for name in variants} for shift in SHIFTS}
    return Study(seeds, domains, source, adapted, posteriors, metrics, log)


def train_sources(seeds: tuple[int, ...], steps: int, advance: Advance) -> StackedMLP:
    """Stage 1, the seeds shared out among the threads."""
    count = min(len(seeds), threads())
    bounds = [len(seeds) * i // count for i in range(count + 1)]

    def train(part: tuple[int, ...]) -> StackedMLP:
        own, network = make_domains(part), StackedMLP(part)
        train_stack(network, own.source, own.labels, steps, advance)
        return network

    return StackedMLP.joined(in_threads(train, [seeds[a:b] for a, b in itertools.pairwise(bounds)]))


def threads() -> int:
    return min(torch.get_num_threads(), MOST_THREADS)


def in_threads(function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[Result]:
    """Each task in a thread that keeps to one core: tensors this small are not worth splitting among cores."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, tasks))
    finally:
        torch.set_num_threads(before)


def one_at_a_time(advance: Advance) -> Advance:
    """A progress bar does not expect calls from several threads."""
    lock = threading.Lock()

    def locked(steps: int) -> None:
        with lock:
            advance(steps)

    return locked


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
    methods: Iterable[str] = tuple(METHODS),
    source_steps: int = toy.SOURCE_STEPS,
    target_steps: int = toy.TARGET_STEPS,
    learning_rate: float = toy.LEARNING_RATE,
    progress: Advance | None = None,
) -> dict[str, Any]:
    """The command: the study, written to `out`, and its table on the terminal. Gives what metrics.json holds;
    `progress` receives the steps of each seed."""
    from usfan.reproduce.toy.figure import SHOWN, toy_figure

    started = time.perf_counter()
    seeds, methods = tuple(seeds), [find_method(name).name for name in methods]
    variants = {name: variant for name, variant in VARIANTS.items() if variant.method in methods}
    settings: dict[str, Any] = {
        "source_steps": source_steps,
        "target_steps": target_steps,
        "learning_rate": learning_rate,
    }
    moving = sum(METHODS[variant.method].adapts for variant in variants.values())
    with bar("toy", len(seeds) * (source_steps + len(SHIFTS) * moving * target_steps), "steps") as shown:
        study = study_toy(seeds, variants=variants, advance=progress or shown.advance, **settings)
    config = {"command": "reproduce", "benchmark": "toy", "seeds": list(seeds), "methods": methods}
    write_yaml(out / "config.yaml", config)
    fixed = {**settings, "momentum": toy.MOMENTUM, "weight_decay": toy.WEIGHT_DECAY}
    write_json(out / "study.json", {**fixed, "variants": {name: asdict(v) for name, v in variants.items()}})
    write_text(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in study.log))
    if variants.keys() >= SHOWN:
        toy_figure(study, out / "toy.png")
    write_json(out / "metrics.json", study.metrics)
    Console().print(table(study.metrics))
    say(f"{out}: figures, log and picture ({time.perf_counter() - started:.0f} s)")
    return study.metrics


def table(metrics: dict[str, Any]) -> Table:
    """Mean ± standard deviation over seeds, and flipped runs, for each shift."""
    shown = Table(
        title="Toy: target accuracy in %",
        caption="flipped: runs that end under 50 %; seconds: all seeds, both shifts",
    )
    for column in ("method", *(name for shift in SHIFTS for name in (shift, "flipped")), "seconds"):
        shown.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name in metrics["strong"]:
        rows = [metrics[shift][name] for shift in SHIFTS]
        cells = []
        for row in rows:
            spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
            cells += [f"{row['accuracy']:.1f}{spread}", f"{row['flipped']} of {row['runs']}"]
        shown.add_row(name, *cells, f"{sum(row['seconds'] for row in rows):.1f}")
    return shown
