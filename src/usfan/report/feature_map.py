"""The 2-D map of the features, before and after, coloured by predicted class: how the clusters moved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from usfan.report.blocks import Figure, Picker, number, percent
from usfan.report.plots import WHEN
from usfan.report.read_samples import Samples
from usfan.report.svg import Axes, f1
from usfan.scoring.structure import evenly_spaced

SIZE = (360, 320)
PALETTE = 12
"""Colours that can be told apart; more classes get a hue each."""
BUTTONS = 40
"""Most classes that get a button; the most predicted ones do."""
MARKS = {
    "all": "M{x} {y}h0",
    "correct": "M{x} {y}h0",
    "incorrect": "M{x} {y}m-2.5-2.5l5 5m0-5l-5 5",
    "unknown class": "M{x} {y}m0-3l3 5h-6z",
}
GROUP_LABEL = {"correct": "dot: correct", "incorrect": "cross: incorrect", "unknown class": "triangle: unknown class"}


def map_blocks(prefix: str, samples: Samples, points: int) -> list[Figure | Picker]:
    """Both maps, of the same `points` images; first the buttons that bring out a class."""
    places = {when: t for when in WHEN if (t := samples.get(f"features_{when}")) is not None}
    places = {when: t for when, t in places.items() if when in samples.predicted}
    if not places or points < 1:
        return []
    chosen = evenly_spaced(len(samples), points)
    drawn = {when: t[chosen].double().numpy() for when, t in places.items()}
    blocks: list[Figure | Picker] = [picker(samples)]
    for when, where in drawn.items():
        blocks.append(draw_map(f"{prefix}-map-{when}", samples, when, where, chosen))
    return blocks


def ranges(where: np.ndarray) -> list[tuple[float, float]]:
    """Room for all but the outermost thousandth; those lie on the edge."""
    low, high = np.quantile(where, [0.001, 0.999], axis=0)
    room = (high - low) * 0.04 + 1e-9
    return list(zip((low - room).tolist(), (high + room).tolist(), strict=True))


def draw_map(id: str, samples: Samples, when: str, where: np.ndarray, chosen: Tensor) -> Figure:
    limits = ranges(where)
    axes = Axes(limits[0], limits[1], SIZE, left=12)
    width, height = SIZE
    axes.add('<rect class="panel" x="2" y="2" width="{}" height="{}" rx="6"/>', width - 4, height - 4)
    x = (4 + (np.clip(where[:, 0], *limits[0]) - axes.x[0]) / (axes.x[1] - axes.x[0]) * (width - 8)).tolist()
    y = (4 + (axes.y[1] - np.clip(where[:, 1], *limits[1])) / (axes.y[1] - axes.y[0]) * (height - 8)).tolist()
    predicted = samples.predicted[when][chosen]
    groups = {name: mask[chosen] for name, mask in samples.groups(when).items()}
    for k in torch.unique(predicted).tolist():
        for group, mask in groups.items():
            rows = (mask & (predicted == k)).nonzero().flatten().tolist()
            if rows:
                path = "".join(MARKS[group].format(x=f1(x[i]), y=f1(y[i])) for i in rows)
                css, style = colour(k, len(samples.classes))
                axes.add(
                    '<path class="spots {} {}" style="{}" data-class="{}" d="{}"><title>{}</title></path>',
                    css, "dots" if MARKS[group].endswith("h0") else "signs", style, k, path, samples.classes[k],
                )  # fmt: skip
    caption = describe(samples, when, len(chosen))
    marks = " ".join(f"{GROUP_LABEL[g].capitalize()}." for g in groups if g in GROUP_LABEL)
    alt = f"Scatter plot of the features on two axes, {WHEN[when]}. {caption}"
    return Figure(id, f"Features {WHEN[when]}", SIZE, axes.body(), f"{caption} {marks}".strip(), alt)


def describe(samples: Samples, when: str, shown: int) -> str:
    counts = torch.bincount(samples.predicted[when], minlength=len(samples.classes))
    largest = int(counts.argmax())
    text = f"{number(len(samples))} images"
    if shown < len(samples):
        text += f", {number(shown)} of them drawn"
    used = int((counts > 0).sum())
    share = percent(100 * int(counts[largest]) / len(samples))
    return f"{text}; {used} of {len(counts)} classes are predicted, {samples.classes[largest]} most often ({share})."


def colour(k: int, K: int) -> tuple[str, str]:
    """CSS class and style of class k."""
    return (f"k{k}", "") if K <= PALETTE else ("hue", f"--hue:{round(k * 137.508 % 360)}")


def picker(samples: Samples) -> Picker:
    counts = torch.bincount(next(reversed(samples.predicted.values())), minlength=len(samples.classes))
    shown = sorted(counts.argsort(descending=True, stable=True)[:BUTTONS].tolist())
    K = len(samples.classes)
    return Picker([(k, *colour(k, K), samples.classes[k]) for k in shown])
