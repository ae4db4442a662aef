"""How time and memory grow with the number of target images: U-SFAN++ on synthetic features, 1,280
dimensions, 100 classes.

    python -m studies.growth OUT.json [--sizes 2000 20000 200000] [--device cuda]

One line per size: seconds for the neighbours, the first clustering, an epoch and the whole adaptation (15 epochs), and
the peak memory of the process (on a GPU, of the device). Computing features is not included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.runtime import start_runtime
from usfan.maths.cluster_mixture import centred_features, fit_mixture, fit_witness_space
from usfan.maths.neighbours import nearest_neighbours
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

CLASSES = 100
WIDTH = 1280


def made(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Clusters with positive, sparse features, as pooled ones are; `shift` moves all of them."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    group = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=group)
    moved = shift * torch.randn(WIDTH, generator=group)
    features = torch.empty(count, WIDTH)
    for rows in torch.arange(count).split(8192):
        noise = torch.randn(len(rows), WIDTH, generator=group)
        features[rows] = (centres[labels[rows]] + 2 * noise + moved).relu()
    return features, labels


def timed(device: torch.device, work: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    value = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return round(time.perf_counter() - started, 2), value


def peak(device: torch.device) -> float:
    """GiB."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 20000, 200000])
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    runtime = start_runtime(RuntimeConfig(device=options.device))
    names = tuple(f"class {number}" for number in range(CLASSES))
    features, labels = made(4000, 0.0, 1)
    weights = os.environ.get("WEIGHTS", "offline")
    source = train_source(
        Store(features, torch.arange(len(labels)), labels, names),
        backbone="tf_efficientnet_lite0", pretrained=weights, epochs=5, runtime=runtime,
    )  # fmt: skip
    rows = []
    for size in options.sizes:
        features, labels = made(size, 0.3, 2)
        store = Store(features, torch.arange(size), None, None)
        witness = features.to(runtime.device)
        if runtime.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        near = timed(
            runtime.device, lambda w=witness: nearest_neighbours(centred_features(w)[0], 3)
        )[0]
        points = fit_witness_space(witness)
        said = torch.randn(size, CLASSES, device=runtime.device).log_softmax(1)
        fit = timed(
            runtime.device, lambda p=points, w=witness, s=said: fit_mixture(p.project(w), s)
        )[0]
        del points, said
        settings = {
            "method": "u-sfan++",
            "tune": "new",
            "guard": False,
            "witness": witness,
            "setting": "closed",
        }
        whole, model = timed(
            runtime.device, lambda s=settings, d=store: adapt(source, d, runtime=runtime, **s)
        )
        predicted = model.passes.after.logits.argmax(dim=1).cpu()
        row = {
            "images": size,
            "device": runtime.device.type,
            "threads": torch.get_num_threads(),
            "neighbours": near,
        }
        row |= {
            "clustering": fit,
            "adaptation": whole,
            "per_epoch": round((whole - near - fit) / 15, 2),
        }
        row |= {
            "peak_gib": peak(runtime.device),
            "right": round(100 * float((predicted == labels).float().mean()), 1),
        }
        rows.append(row)
        print(row, flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
