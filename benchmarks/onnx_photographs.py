"""Does an exported graph, run by onnxruntime alone on raw photographs, agree with `predict`?

    python benchmarks/onnx_photographs.py ROOT --count 500 --out FILE.json

A last layer for the 31 classes of Office-31 is fitted to the features of an ImageNet network (usfan[offline]); the
graph is exported; a second process that loads neither usfan nor torch predicts the photographs by the file alone. The
figures: how many labels agree, and the largest differences of the probabilities and of the certainty.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ALONE = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image, ImageOps
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
rows = []
for path in json.load(sys.stdin):
    pixels = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    found = session.run(["label", "probs", "posterior_probs", "certainty"], {"images": pixels[None]})
    rows.append([x[0] for x in found])
assert not {"usfan", "torch"} & set(sys.modules), "the file was to be used alone"
label, probs, posterior, certainty = map(np.stack, zip(*rows))
np.savez(sys.argv[2], label=label, probs=probs, posterior=posterior, certainty=certainty)
"""


def predicted_alone(graph: Path, paths: list[str]) -> dict[str, np.ndarray]:
    """What onnxruntime gives in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.npz"
        command = [sys.executable, "-c", ALONE, str(graph), str(out)]
        subprocess.run(command, input=json.dumps(paths), text=True, check=True)
        with np.load(out) as rows:
            return dict(rows)


def fitted_model(data, backbone: str = "tf_efficientnet_lite0", steps: int = 300):
    """A network of ImageNet with a new last layer, fitted to these images, and its posterior."""
    from usfan.engine.passes import engine_store, forward_store
    from usfan.engine.runtime import start_runtime
    from usfan.models.backbones import create_backbone
    from usfan.models.classifier import Classifier
    from usfan.store.model import SourceModel
    from usfan.training.source import fit_posterior
    from usfan.uncertainty.base import FitSettings

    torch.manual_seed(0)
    options = {"bottleneck": 0, "dropout": 0.0, "head_bias": True, "head_norm": False}
    network = create_backbone(backbone, "auto")
    spec = network.spec
    classifier = Classifier(
        network.module, network.features, len(data.classes), **options
    ).eval()
    runtime = start_runtime()
    store = engine_store(data, spec, runtime)
    seen, _ = forward_store(classifier, store, spec, runtime)
    optimiser = torch.optim.Adam(classifier.head.parameters(), lr=1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(classifier.head(seen), store.labels).backward()
        optimiser.step()
    classifier.requires_grad_(True)
    settings = FitSettings(prior=10.0)
    posterior, _ = fit_posterior(classifier.eval(), store, spec, runtime, settings)
    return SourceModel(
        classifier, posterior, data.classes, spec, {"backbone": backbone, **options}
    )


def main() -> None:
    import usfan
    from usfan.store.onnx import export_onnx

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("root", type=Path, help="folder of Office-31 (amazon, dslr, webcam)")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    domains = [usfan.ImageData(arguments.root / name) for name in ("amazon", "dslr", "webcam")]
    paths = [path for data in domains for path in data.paths]
    labels = [data.classes[k] for data in domains for k in data.labels.tolist()]
    chosen = np.random.default_rng(0).permutation(len(paths))[: arguments.count]
    data = usfan.ImageData([paths[i] for i in chosen], labels=[labels[i] for i in chosen])
    half = data.subset(torch.arange(0, len(data), 2))
    model = fitted_model(half)
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        at_export = export_onnx(model, graph)
        started = time.perf_counter()
        result = predicted_alone(graph, data.paths)
        seconds = time.perf_counter() - started
    expected = model.predict(data)
    accuracy = float(
        (expected.label == data.match_classes(model.classes).labels).double().mean()
    )
    figures = {
        "photographs": len(data),
        "labels_that_agree": int((torch.from_numpy(result["label"]) == expected.label).sum()),
        "largest_difference_of_probs": float(
            np.abs(result["probs"] - expected.probs.numpy()).max()
        ),
        "largest_difference_of_certainty": float(
            np.abs(result["certainty"] - expected.weight.numpy()).max()
        ),
        "largest_difference_at_export": at_export,
        "mean_certainty": float(expected.weight.mean()),
        "accuracy": round(100 * accuracy, 2),
        "onnxruntime_seconds": round(seconds, 1),
    }
    print(json.dumps(figures, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
