"""How much of the gap on MNIST→USPS comes from the margin: a LeNet trained on MNIST classifies USPS test images,
stretched to the full size or with a margin.

    python studies/usps_frame.py --data FOLDER_OF_THE_NPZ_FILES      # CPU, a minute

MNIST's digits lie in the middle 20 of 28 pixels; USPS's fill their 16. Labels are used only to measure accuracy.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

from usfan.config import RuntimeConfig  # noqa: E402
from usfan.data.store import Store  # noqa: E402
from usfan.engine.passes import forward_store  # noqa: E402
from usfan.engine.runtime import start_runtime  # noqa: E402
from usfan.training.source import train_source  # noqa: E402

SIDES = (28, 24, 20, 18)
IMAGES = 20_000
EPOCHS = 4
CLASSES = tuple("0123456789")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    runtime = start_runtime(RuntimeConfig())
    mnist, usps = (np.load(options.data / f"{name}.npz") for name in ("mnist", "usps"))
    pixels = torch.from_numpy(mnist["x_train"][:IMAGES])
    labels = torch.from_numpy(mnist["y_train"][:IMAGES]).long()
    settings = {
        "backbone": "lenet",
        "epochs": EPOCHS,
        "dropout": 0.5,
        "backbone_lr_scale": 1.0,
        "augment": "none",
    }
    model = train_source(
        Store(pixels[:, None], torch.arange(len(pixels)), labels, CLASSES),
        runtime=runtime,
        **settings,
    )
    digits = torch.from_numpy(usps["x_test"])[:, None].float()
    truth = torch.from_numpy(usps["y_test"]).long()
    for side in SIDES:
        small = F.interpolate(digits, size=side, mode="bilinear", align_corners=False)
        framed = F.pad(small, ((28 - side) // 2,) * 4).round().clamp(0, 255).byte()
        _, logits = forward_store(
            model.classifier, Store(framed, torch.arange(len(framed))), model.spec, runtime
        )
        print(
            f"{side} of 28 pixels: {100 * float((logits.argmax(dim=1) == truth).double().mean()):.1f} %"
        )


if __name__ == "__main__":
    main()
