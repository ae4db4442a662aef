"""The toy's picture: the target and the regions of the classes, for each shift, before and after.

A region has the colour of its class, and is the stronger the more certain the model: the shade is the weight exp(−H)
at τ = 0.4 that a point there would get. Two columns show the point estimate, adapted by SHOT-IM, and two the posterior
predictive, adapted by U-SFAN.

Shapes: points N×2, probabilities N×K.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.files import whole_file
from usfan.maths.objectives import certainty_weights
from usfan.store.model import SourceModel
from usfan.study.toy_points import CLASSES, FLIPPED, SHIFTS, ToyRuns, accuracy, point_store

DRAWN_METHODS = {"source-only", "shot-im", "u-sfan"}
COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Blue, red and green of the palette of Okabe and Ito, which the colour-blind can tell apart; markers differ too."""
MARKERS = ("o", "s", "^")
EXTENT = 15.0
GRID = 220
TEMPERATURE = 0.4


def toy_figure(runs: Sequence[ToyRuns], path: Path) -> None:
    """Writes the PNG: of the first seed at which SHOT-IM flips classes and U-SFAN does not, else of the first."""
    drawn = next((toy for toy in runs if shows_a_difference(toy)), runs[0])
    figure = Figure(figsize=(13, 6.8), layout="constrained")
    options = {"aspect": "equal", "xticks": [], "yticks": []}
    axes = figure.subplots(len(SHIFTS), 4, subplot_kw=options)
    for row, task in zip(axes, SHIFTS, strict=True):
        row[0].set_ylabel(f"{task} shift")
        columns = [
            ("source-only", False),
            ("shot-im", False),
            ("source-only", True),
            ("u-sfan", True),
        ]
        for axis, (method, guided) in zip(row, columns, strict=True):
            model = drawn.adapted[method, task]
            draw_regions(axis, model, guided=guided)
            draw_points(axis, drawn.targets[task], drawn.labels)
            prediction = "posterior" if guided else "point estimate"
            axis.set_title(f"{method}, {prediction}: {accuracy(model, drawn.labels):.0f} %")
    figure.supxlabel(f"Shade of a region: certainty exp(−H). Seed {drawn.seed}.", fontsize=9)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=160, format="png")


def shows_a_difference(toy: ToyRuns) -> bool:
    plain = accuracy(toy.adapted["shot-im", "strong"], toy.labels)
    guided = accuracy(toy.adapted["u-sfan", "strong"], toy.labels)
    return plain < FLIPPED <= guided


def draw_regions(
    axis: Axes,
    model: SourceModel,
    *,
    guided: bool,
) -> None:
    """The region of each class, the stronger the more certain."""
    line = torch.linspace(-EXTENT, EXTENT, GRID)
    rows, columns = torch.meshgrid(line, line, indexing="ij")
    store = point_store(torch.stack([columns, rows], dim=2).view(-1, 2))
    runtime = Runtime(torch.device("cpu"))
    features, logits = forward_store(model.classifier, store, model.spec, runtime)
    probs = (logits / TEMPERATURE).softmax(dim=1)
    if guided:
        probs = model.posterior.predictive(features, TEMPERATURE)
    least = 1 / len(CLASSES)
    certainty = (certainty_weights(probs) - least) / (1 - least)
    palette = torch.tensor([to_rgb(colour) for colour in COLOURS])
    strength = 0.1 + 0.5 * certainty[:, None]
    shades = 1 - strength * (1 - palette[probs.argmax(dim=1)])
    extent = (-EXTENT, EXTENT, -EXTENT, EXTENT)
    axis.imshow(shades.view(GRID, GRID, 3).numpy(), origin="lower", extent=extent)


def draw_points(axis: Axes, points: Tensor, labels: Tensor) -> None:
    for label, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=True)):
        x, y = points[labels == label].T.numpy()
        axis.scatter(
            x, y, s=13, marker=marker, color=colour, edgecolors="white", linewidths=0.3
        )
    axis.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT))
