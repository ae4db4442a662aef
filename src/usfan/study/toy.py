"""The paper's toy experiment: a mild and a strong shift in the plane, one run per method and seed.

    usfan reproduce toy        → runs/toy/: metrics.json, toy.png, config.yaml, study.json, log.jsonl

The network is `toy-mlp`. Training and adaptation are those of `usfan train` and `usfan adapt` with their default
settings, except for those below. The prior precision is the weight decay, not times N: so the paper sets it for the
toy. "u-sfan (evidence)" takes the prior that the evidence prefers, "u-sfan (paper)" the settings of `--preset paper`.
docs/studies/toy.md shows the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from usfan.adaptation.methods import METHODS
from usfan.config import RuntimeConfig
from usfan.engine.runtime import Runtime, start_runtime
from usfan.files import write_json, write_text, write_yaml
from usfan.progress import Bar, bar, say
from usfan.store.model import AdaptedModel
from usfan.study.choices import PAPER
from usfan.study.results import Average
from usfan.study.runs import adapt_model, torch_threads, train_model
from usfan.study.toy_figure import DRAWN_METHODS, toy_figure
from usfan.study.toy_points import (
    FLIPPED,
    SHIFTS,
    Metrics,
    SeedModels,
    make_domains,
    point_store,
)

SEEDS = tuple(range(20))
WEIGHT_DECAY = 3e-3
SOURCE_EPOCHS = 50
TARGET_EPOCHS = 15
SOURCE_SETTINGS = {
    "backbone": "toy-mlp",
    "bottleneck": 0,
    "head_bias": False,
    "head_norm": False,
    "label_smoothing": 0.0,
    "validation_share": 0.0,
    "weight_decay": WEIGHT_DECAY,
}
TARGET_SETTINGS = {
    "setting": "closed",
    "tune": "all",
    "guard": False,
    "weight_decay": WEIGHT_DECAY,
    "prior": WEIGHT_DECAY,
}
VARIANTS = {
    "u-sfan (evidence)": {"prior": "evidence"},
    "u-sfan (paper)": {"preset": "paper"},
}
"""Further lines of the table: U-SFAN with other settings."""


def table_lines(methods: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The name of each line of the table → its method and settings."""
    lines = {method: (method, TARGET_SETTINGS) for method in methods}
    if "u-sfan" in methods:
        for name, settings in VARIANTS.items():
            lines[name] = ("u-sfan", TARGET_SETTINGS | settings)
    return lines


def run_seed(
    seed: int,
    methods: Sequence[str],
    runtime: Runtime,
    progress: Bar,
    *,
    source_epochs: int,
    epochs: int,
) -> SeedModels:
    """Train one source model and adapt it to both targets."""
    domains = make_domains(seed)
    settings = SOURCE_SETTINGS | {"epochs": source_epochs, "seed": seed}
    source = train_model(point_store(domains.source, domains.labels), runtime, settings)
    progress.advance()
    models = SeedModels(seed, domains, source)
    for name, points in domains.targets.items():
        models.adapted[name] = {}
        for line, (method, settings) in table_lines(methods).items():
            settings = settings | {"seed": seed}
            if METHODS[method].adapts:
                settings["epochs"] = epochs
            adapted = adapt_model(source, point_store(points), method, runtime, settings)
            models.adapted[name][line] = adapted
            progress.advance()
    return models


def score(models: Sequence[SeedModels]) -> Metrics:
    """Accuracy on the target over the seeds. Only here labels of the target are used."""
    metrics: Metrics = {}
    for name in SHIFTS:
        metrics[name] = {}
        for line in models[0].adapted[name]:
            runs = [each.adapted[name][line] for each in models]
            accuracies = [
                accuracy(run, each.domains.labels)
                for run, each in zip(runs, models, strict=True)
            ]
            average = Average.of(accuracies)
            metrics[name][line] = {
                "accuracy": round(average.mean, 3),
                "std": average.std and round(average.std, 3),
                "flipped": sum(value < FLIPPED for value in accuracies),
                "runs": len(accuracies),
                "seconds": round(sum(run.history["seconds"] for run in runs), 2),
                "accuracies": [round(value, 3) for value in accuracies],
            }
    return metrics


def accuracy(model: AdaptedModel, labels: Tensor) -> float:
    """Per cent."""
    assert model.passes is not None
    right = model.passes.after.logits.argmax(dim=1) == labels
    return 100 * float(right.double().mean())


def run_toy(
    seeds: Sequence[int] = SEEDS,
    *,
    out: Path,
    methods: Sequence[str] = PAPER,
    source_epochs: int = SOURCE_EPOCHS,
    epochs: int = TARGET_EPOCHS,
) -> list[SeedModels]:
    """The command: writes the study to `out` and prints its table. It runs on the CPU."""
    started = time.perf_counter()
    runtime = start_runtime(RuntimeConfig(device="cpu"))
    lengths = {"source_epochs": source_epochs, "epochs": epochs}
    total = len(seeds) * (1 + len(SHIFTS) * len(table_lines(methods)))
    log = [{"event": "started", "time": time.time()}]
    models: list[SeedModels] = []
    with bar("toy", total, "models") as progress, torch_threads(1):
        for seed in seeds:
            models.append(run_seed(seed, methods, runtime, progress, **lengths))
            log.append({"event": "scored", "time": time.time(), "seed": seed})
    metrics = score(models)
    config = {"command": "reproduce", "benchmark": "toy"}
    write_yaml(out / "config.yaml", config | {"seeds": list(seeds), "methods": list(methods)})
    lines = {name: settings for name, (_, settings) in table_lines(methods).items()}
    write_json(out / "study.json", lengths | {"source": SOURCE_SETTINGS, "lines": lines})
    write_text(out / "log.jsonl", "".join(json.dumps(line) + "\n" for line in log))
    if set(methods) >= DRAWN_METHODS:
        toy_figure(models, metrics, out / "toy.png")
    write_json(out / "metrics.json", metrics)
    Console().print(toy_table(metrics))
    say(f"{out}: figures, log and picture ({time.perf_counter() - started:.0f} s)")
    return models


def toy_table(metrics: Metrics) -> Table:
    """Mean ± standard deviation over seeds, and flipped runs, for each shift."""
    table = Table(
        title="Toy: target accuracy in %",
        caption="flipped: runs that end under 50 %; seconds: all seeds, both shifts",
    )
    table.add_column("method", no_wrap=True)
    for name in SHIFTS:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("flipped", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for line in metrics["strong"]:
        cells = [line]
        seconds = 0.0
        for name in SHIFTS:
            row = metrics[name][line]
            cells.append(Average(row["accuracy"], row["std"], row["runs"]).text())
            cells.append(f"{row['flipped']} of {row['runs']}")
            seconds += row["seconds"]
        table.add_row(*cells, f"{seconds:.1f}")
    return table
