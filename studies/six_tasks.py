"""Time of the six tasks of Office-31 from decoded images: features, three source models, six adaptations (U-SFAN++).

    python -m studies.six_tasks OUT.json --packed FOLDER [--device cuda] [--epochs 40]

EfficientNet-Lite0 frozen, in one process. The images are packed by `studies.pack`. The clock starts after the images
are decoded and the device has been used once.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from studies.class_sets import BACKBONE, DOMAINS, WEIGHTS
from studies.corpus import Data

from usfan.adaptation.adapt import adapt
from usfan.compute.features import BackboneAlone, FeatureStore, features_of
from usfan.compute.runtime import start_runtime
from usfan.config import RuntimeConfig
from usfan.evaluation.evaluate import score_outputs
from usfan.models.backbones import create_backbone
from usfan.training.source import train_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    runtime = start_runtime(RuntimeConfig(device=given.device))
    data = Data(given.packed, given.out.parent / "pixels", given.jobs)
    pixels = {domain: data.store(f"office31/{domain}") for domain in DOMAINS}
    torch.zeros(8, device=runtime.device).sum().item()
    started = time.perf_counter()
    backbone = create_backbone(BACKBONE, WEIGHTS)
    network = BackboneAlone(backbone.module.to(runtime.device))
    stores = {}
    for domain, store in pixels.items():
        features = features_of(network, store, backbone.spec, runtime).pixels
        stores[domain] = FeatureStore(features, store.kept, store.labels, store.classes)
    times, scores = {"features": time.perf_counter() - started}, []
    for source in DOMAINS:
        model = train_source(
            stores[source], backbone=BACKBONE, pretrained=WEIGHTS, epochs=given.epochs, seed=2020, runtime=runtime
        )
        for target in DOMAINS:
            if target != source:
                settings = {"method": "u-sfan++", "guard": False, "tune": "new", "witness": stores[target].pixels}
                adapted = adapt(model, stores[target], seed=2020, runtime=runtime, **settings)
                assert adapted.passes is not None
                scores.append(score_outputs(adapted.passes.after, stores[target].labels, adapted)["accuracy"])  # type: ignore[arg-type]
    times["all"] = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    used = resource.getrusage(resource.RUSAGE_SELF)
    row = {k: round(v, 1) for k, v in times.items()} | {
        "accuracy": round(sum(scores) / 6, 2),
        "peak_gib": round(peak, 2),
    }
    more = {"device": runtime.device.type, "threads": torch.get_num_threads()}
    row |= {**more, "cpu_seconds": round(used.ru_utime + used.ru_stime, 1)}
    given.out.write_text(json.dumps(row) + "\n")
    print(row)


if __name__ == "__main__":
    main()
