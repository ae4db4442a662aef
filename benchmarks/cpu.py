"""Images per second on a CPU, of a pass over the images and of adaptation's steps; with glibc's memory left alone, and
with the channels first in every network.

Each case is a process of its own: how it takes memory is set once. Any variable MALLOC_… in the environment leaves
glibc as it is (`usfan.engine.runtime.keep_freed_memory`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from measure import Row

NETWORKS = {"tf_efficientnet_lite0": 128, "resnet18": 128, "digits-cnn": 8192, "lenet": 8192}
"""And how many images each gets."""
TRIES = 1


def suite() -> Iterator[Row]:
    for network in NETWORKS:
        result = {
            "ours": best(network, {}),
            "channels first": best(network, {}, "channels first"),
            "glibc left alone": best(network, {"MALLOC_ARENA_MAX": "64"}),
        }
        for what in ("pass", "steps"):
            for case, figures in result.items():
                yield Row(
                    network,
                    f"{what}, {case}",
                    figures[what],
                    "images/s",
                    result["ours"][what] / figures[what],
                )
        for case, figures in result.items():
            yield Row(network, f"peak memory, {case}", figures["peak"], "MiB")


def best(network: str, more: dict[str, str], *options: str) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | more
    tries: list[dict[str, float]] = []
    for _ in range(TRIES):
        call = [sys.executable, __file__, network, *options]
        done = subprocess.run(call, capture_output=True, text=True, env=environment, check=True)
        tries.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: max(result[name] for result in tries) for name in tries[0]}


def measure(network: str, layout: str = "") -> dict[str, Any]:
    import resource

    import torch

    from stage_2 import opened, refresh
    from usfan.data.store import Store
    from usfan.engine import passes as engine
    from usfan.engine.runtime import start_runtime
    from usfan.models.backbones import create_backbone
    from usfan.models.classifier import Classifier
    from usfan.store.model import SourceModel
    from usfan.uncertainty.kronecker import KroneckerPosterior

    if layout == "channels first":
        engine.faster_laid_out = lambda *arguments: False
    runtime = start_runtime()
    count = NETWORKS[network]
    made = create_backbone(network, "none")
    backbone = made.module
    features = made.features
    spec = made.spec
    classifier = Classifier(backbone, features, 10).eval()
    weight, bias = classifier.head_tensors()
    inputs = torch.randn(100, weight.shape[1])
    posterior = KroneckerPosterior.fit(inputs, inputs @ weight.T + bias, weight, bias, 1.0)
    model = SourceModel(
        classifier, posterior, tuple("0123456789"), spec, {"backbone": network}, {}
    )
    pixels = torch.randint(
        0, 256, (count, spec.channels, spec.resize, spec.resize), dtype=torch.uint8
    )
    store = Store(pixels, torch.arange(count))
    result: dict[str, float] = {}
    with opened(model, store, runtime) as run:
        outputs = refresh(run, 0)
        for name, call in (
            ("pass", run.outputs),
            ("steps", lambda: run.train_epoch(0, outputs)),
        ):
            began = time.perf_counter()
            call()
            result[name] = count / (time.perf_counter() - began)
    return {**result, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
