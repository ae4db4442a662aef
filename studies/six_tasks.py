"""Time of the six tasks of Office-31 from decoded images: features, three source models, six adaptations (U-SFAN++).

    python -m studies.six_tasks OUT.json --packed FOLDER [--device cuda] [--epochs 40]

EfficientNet-Lite0 frozen, in one process. The images are packed by `studies.pack`. The clock starts after the images
are decoded and the device has been used once. On a CPU that others use too, CPU seconds say more than seconds.
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

from usfan.adaptation.witness import testimony, whole
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.runtime import start_runtime
from usfan.metrics.evaluate import score_outputs
from usfan.models.backbones import create_backbone
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

PART = 1024
"""Images whose pixels are mapped into memory at a time: pages that were read count until they are unmapped."""


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    runtime = start_runtime(RuntimeConfig(device=options.device))
    data = Data(options.packed, options.out.parent / "pixels", options.jobs)
    for domain in DOMAINS:
        data.pixels(f"office31/{domain}")
    torch.zeros(8, device=runtime.device).sum().item()
    started = time.perf_counter()
    before = cpu_seconds()
    backbone = create_backbone(BACKBONE, WEIGHTS)
    network = BackboneAlone(backbone.module.to(runtime.device))
    stores = {}
    seen = {}
    for domain in DOMAINS:
        labels, classes = data.labels(f"office31/{domain}")
        rows = torch.arange(len(labels))
        crops = []
        wholes = []
        for part in rows.split(PART):
            store = Store(data.pixels(f"office31/{domain}")[part[0] : part[-1] + 1], part)
            crops.append(features_of(network, store, backbone.spec, runtime).values)
            wholes.append(
                features_of(
                    network, store, whole(backbone.spec, backbone.module), runtime
                ).values
            )
        stores[domain] = Store(torch.cat(crops), rows, labels, classes)
        seen[domain] = testimony(torch.cat(wholes), backbone.classifier)
    del store
    times = {"features": time.perf_counter() - started, "features_cpu": cpu_seconds() - before}
    scores = []
    used = {"source_models_cpu": 0.0, "adaptations_cpu": 0.0}
    for source in DOMAINS:
        begun = cpu_seconds()
        model = train_source(
            stores[source],
            backbone=BACKBONE,
            pretrained=WEIGHTS,
            epochs=options.epochs,
            seed=2020,
            runtime=runtime,
        )
        used["source_models_cpu"] += cpu_seconds() - begun
        begun = cpu_seconds()
        for target in DOMAINS:
            if target != source:
                settings = {
                    "method": "u-sfan++",
                    "guard": False,
                    "tune": "new",
                    "witness": seen[target],
                }
                adapted = adapt(model, stores[target], seed=2020, runtime=runtime, **settings)
                assert adapted.passes is not None
                scores.append(
                    score_outputs(adapted.passes.after, stores[target].labels, adapted)[
                        "accuracy"
                    ]
                )  # type: ignore[arg-type]
        used["adaptations_cpu"] += cpu_seconds() - begun
    times |= used | {"all": time.perf_counter() - started, "all_cpu": cpu_seconds() - before}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row = {k: round(v, 1) for k, v in times.items()} | {
        "accuracy": round(sum(scores) / 6, 2),
        "peak_gib": round(peak, 2),
    }
    row |= {"device": runtime.device.type, "threads": torch.get_num_threads()}
    options.out.write_text(json.dumps(row) + "\n")
    print(row)


if __name__ == "__main__":
    main()
