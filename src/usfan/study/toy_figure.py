"""The toy's picture: source, target and adapted × point estimate and uncertainty-guided, for each shift; and Figure 2b.

A region has the colour of its class, and is the stronger the more certain the model: the shade is the weight exp(−H)
at τ = 0.4 that a point there would get. Upper row: the point estimate, adapted by SHOT-IM. Lower row: the posterior
predictive, adapted by U-SFAN. Last column, the paper's Figure 2b: the entropy (τ = 1) that the source network, and its
Laplace approximation, give to points of a class that neither has seen.

Shapes: points N×2, probabilities N×K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.files import whole_file
from usfan.maths.objectives import certainty_weights, entropy
from usfan.store.model import SourceModel
from usfan.study.toy_points import CLASSES, FLIPPED, Metrics, SeedModels, point_store
from usfan.uncertainty.kronecker import KroneckerPosterior

DRAWN_METHODS = {"source-only", "shot-im", "u-sfan"}
COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Blue, red and green of the palette of Okabe and Ito, which the colour-blind can tell apart; markers differ too."""
MARKERS = ("o", "s", "^")
UNCERTAIN = LinearSegmentedColormap.from_list("uncertain", ("#FFFFFF", "#D9CFE8", "#8F74B5"))
EXTENT = 15.0
GRID = 220
TEMPERATURE = 0.4
UNSEEN_CENTRE = (-10.0, -10.0)
UNSEEN_COUNT = 60


def probs(
    model: SourceModel,
    posterior: KroneckerPosterior | None,
    points: Tensor,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Of the posterior predictive, or without a posterior of the point estimate."""
    runtime = Runtime(torch.device("cpu"))
    store = point_store(points)
    features, logits = forward_store(model.classifier, store, model.spec, runtime)
    if posterior is None:
        return (logits / temperature).softmax(dim=1)
    return posterior.predictive(features, temperature)


def grid_points() -> Tensor:
    axis = torch.linspace(-EXTENT, EXTENT, GRID)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    points = torch.stack([columns, rows], dim=2)
    return points.view(-1, 2)


def drawn_seed(metrics: Metrics) -> tuple[int, str]:
    """Number of the first run that SHOT-IM flips under the strong shift and U-SFAN does not, else 0; and why."""
    plain = metrics["strong"]["shot-im"]["accuracies"]
    guided = metrics["strong"]["u-sfan"]["accuracies"]
    for number, (one, other) in enumerate(zip(plain, guided, strict=True)):
        if one < FLIPPED <= other:
            return number, ", the first in which shot-im flips and u-sfan does not"
    return 0, ""


def toy_figure(models: Sequence[SeedModels], metrics: Metrics, path: Path) -> None:
    """Writes the PNG."""
    number, reason = drawn_seed(metrics)
    drawn = models[number]
    figure = Figure(figsize=(15.6, 5.4), layout="constrained")
    options = {"aspect": "equal", "xticks": [], "yticks": []}
    axes = figure.subplots(2, 7, subplot_kw=options)
    draw_shift(axes[:, 0:3], drawn, metrics, "mild", number)
    draw_shift(axes[:, 3:6], drawn, metrics, "strong", number)
    draw_unseen(axes[:, 6], drawn)
    axes[0, 0].set_ylabel("point estimate\n(conventional)")
    axes[1, 0].set_ylabel("uncertainty-guided\n(posterior)")
    axes[0, 6].set_ylabel("ReLU network")
    axes[1, 6].set_ylabel("its Laplace approximation")
    axes[0, 1].set_title("(a) Mild shift\ntarget, before")
    axes[0, 4].set_title("(b) Strong shift\ntarget, before")
    axes[0, 6].set_title("(c) An unseen class\nsource")
    note = "Shade of a region: certainty exp(−H). Target points are hollow. Per cent: accuracy."
    figure.supxlabel(
        f"{note} Shown: seed {drawn.seed}{reason}.", x=0.99, ha="right", fontsize=9
    )
    handles, labels = axes[0, 6].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=160, format="png")


def draw_shift(
    axes: np.ndarray,
    models: SeedModels,
    metrics: Metrics,
    shift: str,
    number: int,
) -> None:
    """2×3 panels."""
    labels = models.domains.labels
    target = models.domains.targets[shift]
    adapted = models.adapted[shift]
    posteriors = {"shot-im": None, "u-sfan": adapted["u-sfan"].posterior}
    for row, (method, posterior) in zip(axes, posteriors.items(), strict=True):
        draw_regions(row[0], models.source, posterior)
        draw_regions(row[1], models.source, posterior)
        draw_regions(row[2], adapted[method], posterior)
        draw_points(row[0], models.domains.source, labels, solid=True)
        draw_points(row[1], target, labels, solid=False)
        draw_points(row[2], target, labels, solid=False)
        unadapted = metrics[shift]["source-only"]["accuracies"][number]
        figures = metrics[shift][method]
        flips = f"{figures['flipped']} of {figures['runs']} runs flip"
        row[1].set_xlabel(f"{unadapted:.0f} %")
        accuracy = figures["accuracies"][number]
        row[2].set_xlabel(f"{accuracy:.0f} %; {method}: {flips}", fontsize=8)
    axes[0, 0].set_title("source")
    axes[0, 2].set_title("target, adapted")


def draw_regions(axis: Axes, model: SourceModel, posterior: KroneckerPosterior | None) -> None:
    """The region of each class, the stronger the more certain, and its border."""
    values = probs(model, posterior, grid_points())
    least = 1 / len(CLASSES)
    certainty = (certainty_weights(values) - least) / (1 - least)
    strength = 0.1 + 0.5 * certainty[:, None]
    palette = torch.tensor([to_rgb(colour) for colour in COLOURS])
    colours = palette[values.argmax(dim=1)]
    shades = 1 - strength * (1 - colours)
    draw_picture(axis, shades.view(GRID, GRID, 3))
    edges = np.linspace(-EXTENT, EXTENT, GRID)
    for label in range(len(CLASSES)):
        others = values.clone()
        others[:, label] = 0
        lead = (values[:, label] - others.amax(dim=1)).view(GRID, GRID).numpy()
        if lead.min() < 0 < lead.max():
            axis.contour(edges, edges, lead, levels=[0.0], colors="#444444", linewidths=0.6)


def draw_picture(axis: Axes, values: Tensor) -> AxesImage:
    """Colours, or numbers from 0 to 1, over the plane."""
    return axis.imshow(
        values.numpy(),
        origin="lower",
        extent=(-EXTENT, EXTENT, -EXTENT, EXTENT),
        interpolation="bilinear",
        vmin=0,
        vmax=1,
        cmap=UNCERTAIN,
    )


def draw_points(
    axis: Axes,
    points: Tensor,
    labels: Tensor,
    *,
    solid: bool,
) -> None:
    for label, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=True)):
        x, y = points[labels == label].T.numpy()
        axis.scatter(
            x,
            y,
            s=13,
            marker=marker,
            facecolors=colour if solid else "none",
            edgecolors="white" if solid else colour,
            linewidths=0.3 if solid else 0.7,
            label=CLASSES[label],
        )
    axis.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT))


def draw_unseen(axes: np.ndarray, models: SeedModels) -> None:
    """Figure 2b: the entropy over the plane of the network and of its Laplace approximation."""
    generator = torch.Generator().manual_seed(models.seed)
    noise = torch.randn(UNSEEN_COUNT, 2, generator=generator)
    unseen = torch.tensor(UNSEEN_CENTRE) + noise
    posterior = models.adapted["mild"]["u-sfan"].posterior
    most = math.log(len(CLASSES))
    for axis, one in zip(axes, (None, posterior), strict=True):
        values = entropy(probs(models.source, one, grid_points(), 1.0)) / most
        image = draw_picture(axis, values.view(GRID, GRID))
        draw_points(axis, models.domains.source, models.domains.labels, solid=True)
        x, y = unseen.T.numpy()
        axis.scatter(x, y, s=7, color="black", label="unseen class")
        there = entropy(probs(models.source, one, unseen, 1.0)) / most
        axis.set_xlabel(f"on the unseen class: {float(there.mean()):.2f}")
    label = "predictive entropy / log K"
    axes[0].figure.colorbar(image, ax=axes, label=label, fraction=0.05)
