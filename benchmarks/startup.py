"""How a command starts, how busy it keeps the cores, and what memory it takes, on real JPEGs.

Each case is a process of its own. It says when it gets where; the clock starts before the process does. Start-up ends
where the first step of `train` begins, or where the network of `adapt` sees its first image: before that lie the
imports, the search for files, the model and the decoding of all images. The step itself, and adapt's pass over the
target, are the network's own work, and stand apart.

Images: $USFAN_IMAGES, a folder of class folders; by default Office-31's amazon beside the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import Row

HERE = Path(__file__).resolve().parent
IMAGES = Path(
    os.environ.get(
        "USFAN_IMAGES", HERE.parent.parent / "shared" / "data" / "office31" / "amazon"
    )
)
PROMISED = 10.0
"""Seconds of start-up over 3,000 images."""
NETWORKS = ("tf_efficientnet_lite0", "resnet18", "digits-cnn")
TRIES = 3
"""Other load only ever adds: the best counts."""
BUSY_IMAGES = 512
COUNTS = (1000, 4000)


def suite() -> Iterator[Row]:
    """Times: only a quiet machine gives them. The note says how much of a core the process had."""
    if not IMAGES.is_dir():
        yield no_images()
        return
    with tempfile.TemporaryDirectory() as name:
        models = {network: new_model(network, Path(name)) for network in NETWORKS}
        yield from start_of_training(Path(name))
        yield from start_up(models, Path(name))
        yield from busy(models, Path(name))


def memory_suite() -> Iterator[Row]:
    """Memory: the same on a busy machine."""
    yield from memory_of_a_run()
    if not IMAGES.is_dir():
        yield no_images()
        return
    with tempfile.TemporaryDirectory() as name:
        yield from memory_by_count(new_model("digits-cnn", Path(name)), Path(name))


def no_images() -> Row:
    return Row("real images", "none", None, note="their folder is not there; set USFAN_IMAGES")


def start_up(models: dict[str, Path], work: Path) -> Iterator[Row]:
    count = len(image_files())
    for network, model in models.items():
        stop = "step" if network == "digits-cnn" else "pass"
        best = min(
            (adapt_start(model, work, stop) for _ in range(TRIES)),
            key=lambda result: result["pass"],
        )
        group = f"start-up of adapt, {count:,} images, {network}"
        for case, begin, end in (
            ("imports, files, model", None, "model"),
            ("decoding that is left then", "model", "pass"),
        ):
            yield Row(group, case, best[end] - (best[begin] if begin else 0), "s")
        total = best["pass"]
        note = f"CPU/wall {best['cpu'] / total:.2f}"
        yield Row(
            group, "process start to the first pass", total, "s", PROMISED / total, 1.0, note
        )
        if "step" in best:
            yield Row(
                group,
                "to the end of the first step",
                best["step"],
                "s",
                PROMISED / best["step"],
                1.0,
            )


def start_of_training(work: Path) -> Iterator[Row]:
    count = len(image_files())
    for network in NETWORKS:
        pretrained = "offline" if "lite" in network else "none"
        result = []
        for number in range(TRIES):
            out = work / f"train-{network}-{number}"
            call = [
                "train",
                IMAGES,
                "--backbone",
                network,
                "--pretrained",
                pretrained,
                "--out",
                out,
                "--epochs",
                1,
            ]
            result.append(child("train", "step" if number == 0 else "begins", call))
        best = min(result, key=lambda entry: entry["begins"])
        group = f"start-up of train, {count:,} images, {network}"
        yield Row(group, "imports, files, network", best["model"], "s")
        yield Row(group, "decoding", best["begins"] - best["model"], "s")
        total = best["begins"]
        note = f"CPU/wall {best['cpu'] / total:.2f}"
        yield Row(
            group, "process start to the first step", total, "s", PROMISED / total, 1.0, note
        )
        members = result[0]["step"] - result[0]["begins"]
        yield Row(group, "the first step itself, 64 images", members, "s")


def adapt_start(model: Path, work: Path, stop: str) -> dict[str, float]:
    out = work / f"run-{time.monotonic_ns()}"
    return child("adapt", stop, ["adapt", model, IMAGES, "--out", out, "--epochs", 1])


def busy(models: dict[str, Path], work: Path) -> Iterator[Row]:
    few = list_file(work / "few.txt", BUSY_IMAGES)
    cores = len(os.sched_getaffinity(0))
    for network in ("tf_efficientnet_lite0", "digits-cnn"):
        many = few if network != "digits-cnn" else list_file(work / "many.txt", COUNTS[1])
        for command, more in (("evaluate", []), ("predict", ["--out", work / "table.csv"])):
            call = [command, models[network], many, *more]
            best = max(
                (child(command, "end", call) for _ in range(TRIES)),
                key=lambda result: result["busy"],
            )
            note = f"{best['images'] / best['seconds']:,.0f} images/s; {cores} cores"
            yield Row(
                "cores busy while images pass",
                f"{command}, {network}",
                best["busy"],
                "CPU s/s",
                note=note,
            )


def memory_by_count(model: Path, work: Path) -> Iterator[Row]:
    for command, more in (("evaluate", []), ("predict", ["--out", work / "table.csv"])):
        peaks = []
        for count in COUNTS:
            result = child(
                command, "end", [command, model, list_file(work / f"{count}.txt", count), *more]
            )
            peaks.append(result["peak"])
            yield Row(
                "peak memory, number of images", f"{command}, {count:,}", result["peak"], "MiB"
            )
        grown = (peaks[1] - peaks[0]) * 2**20 / (COUNTS[1] - COUNTS[0])
        yield Row(
            "peak memory, number of images", f"{command}, growth per image", grown, "bytes"
        )


def memory_of_a_run() -> Iterator[Row]:
    """Digits on the CPU: the whole run above what the imports take, beside the cache and the model."""
    for stage in ("train", "adapt"):
        result = child("digits", stage, [5000])
        small = child("digits", stage, [256])["peak"]
        group = f"memory above the imports, digits, {stage}"
        yield Row(group, "cache + model", result["held"], "MiB")
        yield Row(group, "peak, 5,000 images", result["peak"], "MiB")
        yield Row(group, "peak, 256 images", small, "MiB")
        grown = result["peak"] - small
        yield Row(
            group,
            "growth",
            grown,
            "MiB",
            note=f"{grown / result['held']:.2f} × (cache + model)",
        )


def image_files() -> list[Path]:
    return sorted(p for p in IMAGES.rglob("*") if p.is_file())


def list_file(path: Path, count: int) -> Path:
    files = image_files()
    classes = sorted({p.parent.name for p in files})
    lines = (
        f"{p} {classes.index(p.parent.name)}"
        for p in (files[i % len(files)] for i in range(count))
    )
    path.write_text("\n".join(lines) + "\n")
    return path


def new_model(network: str, work: Path) -> Path:
    """A model folder with random weights for the classes of the images."""
    import torch

    from usfan.models.backbones import create_backbone
    from usfan.models.classifier import Classifier
    from usfan.store.model import SourceModel
    from usfan.uncertainty.kronecker import KroneckerPosterior

    classes = tuple(sorted({p.parent.name for p in image_files()}, key=str.lower))
    made = create_backbone(network, "none")
    backbone = made.module
    features = made.features
    spec = made.spec
    parts = {"bottleneck": 256, "dropout": 0.0, "head_bias": True, "head_norm": True}
    classifier = Classifier(backbone, features, len(classes), **parts).eval()
    weight, bias = classifier.head_tensors()
    inputs = torch.randn(512, weight.shape[1])
    posterior = KroneckerPosterior.fit(inputs, inputs @ weight.T + bias, weight, bias, 1.0)
    model = SourceModel(
        classifier, posterior, classes, spec, {"backbone": network, **parts}, {}
    )
    return model.save(work / network)


def child(what: str, stop: str, arguments: list[Any]) -> dict[str, float]:
    command = [
        sys.executable,
        HERE / "startup_child.py",
        str(time.monotonic()),
        what,
        stop,
        *map(str, arguments),
    ]
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        raise RuntimeError(f"{what}: {done.stderr[-2000:]}")
    return json.loads(lines[-1][1:])
