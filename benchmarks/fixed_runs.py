"""Fixed runs whose weights must not change: one line per run, `name sha256`.

    PYTHONPATH=src .venv/bin/python benchmarks/fixed_runs.py > before.txt
    (change the code)
    PYTHONPATH=src .venv/bin/python benchmarks/fixed_runs.py > after.txt; diff before.txt after.txt

Stage 1, the six methods of the paper in four settings, then the methods of the field and the automatic choices.
Only public names are used, so that the script runs on older commits too. One thread, CPU.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from sklearn.datasets import load_digits

import usfan

PAPER = ("source-only", "shot-im", "shot", "shot-im-entropy", "u-sfan", "u-sfan+")
FIELD = ("lsc", "nrc", "aad", "upa", "cowa", "shot++", "tent", "bn-adapt")
SETTINGS = {
    "closed": {"setting": "closed"},
    "open": {"setting": "open"},
    "partial": {"setting": "partial"},
    "paper": {"setting": "closed", "preset": "paper"},
}


def digest(model: usfan.SourceModel) -> str:
    """Hash of the weights and of the predictions' entropies."""
    total = hashlib.sha256()
    for name, value in sorted(model.classifier.state_dict().items()):
        total.update(name.encode())
        total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()[:16]


def images(inverted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    pixels = torch.tensor(digits.images / 16 * 255).to(torch.uint8)
    pixels = pixels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    rows = torch.arange(600) if not inverted else torch.arange(700, 1300)
    pixels = pixels[rows]
    if inverted:
        pixels = pixels.roll(2, dims=2) // 2 + 60
    return pixels.unsqueeze(1), torch.tensor(digits.target)[rows]


def main() -> None:
    torch.set_num_threads(1)
    pixels, labels = images(inverted=False)
    options = {"device": "cpu", "progress": False}
    data = usfan.ImageData(pixels, labels=labels)
    source = usfan.train_source(data, backbone="digits-cnn", epochs=4, seed=0, **options)
    print("stage-1", digest(source), flush=True)
    target = usfan.ImageData(images(inverted=True)[0])
    for method in PAPER:
        for name, setting in SETTINGS.items():
            model = usfan.adapt(
                source, target, method, epochs=3, seed=0, guard=False, **setting, **options
            )
            print(f"{method} {name}", digest(model), flush=True)
    for method in FIELD:
        model = usfan.adapt(
            source, target, method, epochs=3, seed=0, guard=False, setting="closed", **options
        )
        print(f"{method} closed", digest(model), flush=True)
    model = usfan.adapt(source, target, epochs=3, seed=0, **options)
    print("auto guard", digest(model), model.history["guard"]["kept"], flush=True)
    pretrained_runs(options)


def pretrained_runs(options: dict[str, object]) -> None:
    """A frozen pretrained backbone, its witness and the ladder."""
    pixels, labels = images(inverted=False)
    data = usfan.ImageData(pixels[:300], labels=labels[:300])
    backbone = {"backbone": "tf_efficientnet_lite0", "pretrained": "offline"}
    source = usfan.train_source(data, epochs=2, seed=0, **backbone, **options)
    print("stage-1 frozen", digest(source), flush=True)
    target = usfan.ImageData(images(inverted=True)[0][:300])
    for method in ("u-sfan++", "u-sfan", "aad"):
        for guard in (False, True):
            model = usfan.adapt(
                source, target, method, epochs=2, seed=0, guard=guard, tune="new", **options
            )
            figures = (model.history["classes"]["setting"], model.history["guard"]["kept"])
            print(f"{method} frozen, guard {guard}", digest(model), *figures, flush=True)


if __name__ == "__main__":
    sys.exit(main())
