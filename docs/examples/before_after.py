"""Draw what an adaptation changed: pictures of a run with their predictions before and after.

    python docs/examples/before_after.py runs/studio runs/street photos/street docs/images/before-after.png

SOURCE and ADAPTED are model folders; DATA is labelled, so that right and wrong can be coloured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import usfan

RIGHT, WRONG = "#1b7837", "#c0392b"


def draw(source: Path, adapted: Path, data: Path, out: Path, per_class: int = 2) -> None:
    images = usfan.ImageData(data)
    names = images.classes
    before, after = (
        usfan.SourceModel.load(model).predict(images) for model in (source, adapted)
    )
    right = [100 * float((p.label == images.labels).float().mean()) for p in (before, after)]
    shown = [
        int(i)
        for k in range(len(names))
        for i in (images.labels == k).nonzero().flatten()[:per_class]
    ]
    figure, axes = plt.subplots(2, len(shown) // 2, figsize=(10, 4.4), constrained_layout=True)
    for axis, i in zip(axes.T.flatten(), shown, strict=True):
        axis.imshow(images.load(i).permute(1, 2, 0).numpy())
        axis.set_axis_off()
        truth = int(images.labels[i])
        for height, name, prediction in ((1.17, "before", before), (1.03, "after", after)):
            label = int(prediction.label[i])
            colour = RIGHT if label == truth else WRONG
            axis.text(
                0.5,
                height,
                f"{name}: {names[label]}",
                transform=axis.transAxes,
                ha="center",
                fontsize=9,
                color=colour,
            )
    figures = f"{right[0]:.1f} % right before, {right[1]:.1f} % after adaptation"
    figure.suptitle(
        f"{len(images)} unlabelled pictures of a new domain: {figures}", fontsize=11, y=1.05
    )
    figure.savefig(out, dpi=90, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("source", "adapted", "data", "out"):
        parser.add_argument(name, type=Path)
    draw(**vars(parser.parse_args()))
