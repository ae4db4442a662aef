"""The toy's picture: source, target and adapted × point estimate and uncertainty-guided, for each shift; and Figure 2b.

A region has the colour of its class, and is the stronger the more certain the model: the shade is the weight exp(−H)
at τ = 0.4 that a sample there would get. Upper row: the point estimate, adapted by SHOT-IM. Lower row: the posterior
predictive, adapted by U-SFAN. Last column, the paper's Figure 2b: the entropy (τ = 1) that the source network, and its
Laplace approximation, give to points of a class that neither has seen.

Shapes: points 1×2×N, as in `toy_model` with S = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from usfan.files import whole_file
from usfan.posterior.predictive import entropy
from usfan.reproduce.toy.adapt import FLIPPED, TEMPERATURE, StackedPosterior
from usfan.reproduce.toy.model import StackedMLP

if TYPE_CHECKING:
    from usfan.reproduce.toy.experiment import Study

COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Blue, red and green of the palette of Okabe and Ito, which the colour-blind can tell apart; markers differ too."""
MARKERS = ("o", "s", "^")
NAMES = ("blue class", "red class", "green class")
UNCERTAIN = LinearSegmentedColormap.from_list("uncertain", ("#FFFFFF", "#D9CFE8", "#8F74B5"))
EXTENT = 15.0
GRID = 220
UNSEEN_CENTRE = (-10.0, -10.0)
UNSEEN_COUNT = 60


@dataclass(frozen=True)
class View:
    """One model as the figure sees it: class probabilities over the plane."""

    network: StackedMLP
    posterior: StackedPosterior | None

    def probs(self, points: Tensor, temperature: float = TEMPERATURE) -> Tensor:
        """N×K: of the posterior predictive, or without a posterior of the point estimate."""
        features, logits = self.network.outputs(points)
        if self.posterior is None:
            return (logits / temperature).softmax(dim=1)[0].T
        return self.posterior.predictive(features, temperature)[0].T


def plane() -> Tensor:
    axis = torch.linspace(-EXTENT, EXTENT, GRID)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()])[None]


def shade(probs: Tensor) -> np.ndarray:
    """GRID×GRID×3: the colour of the class, mixed with white where the certainty is low."""
    classes = probs.shape[1]
    certainty = torch.exp(-entropy(probs))
    strength = 0.1 + 0.5 * (certainty - 1 / classes) / (1 - 1 / classes)
    colours = torch.tensor([to_rgb(colour) for colour in COLOURS])[probs.argmax(dim=1)]
    return (1 - strength[:, None] * (1 - colours)).view(GRID, GRID, 3).numpy()


def draw_points(axis: Axes, points: Tensor, labels: Tensor, *, solid: bool) -> None:
    for k, (colour, marker) in enumerate(zip(COLOURS, MARKERS, strict=True)):
        x, y = points[0][:, labels == k].numpy()
        face, edge = (colour, "white") if solid else ("none", colour)
        axis.scatter(x, y, s=13, marker=marker, facecolors=face, edgecolors=edge, linewidths=0.3 if solid else 0.7)


def draw_regions(axis: Axes, view: View) -> None:
    probs = view.probs(plane())
    edges = torch.linspace(-EXTENT, EXTENT, GRID).numpy()
    axis.imshow(shade(probs), origin="lower", extent=(-EXTENT, EXTENT, -EXTENT, EXTENT), interpolation="bilinear")
    for k in range(probs.shape[1]):
        # The lead of class k over the best other one: its zero line is the border of the region.
        others = torch.cat([probs[:, :k], probs[:, k + 1 :]], dim=1).amax(dim=1)
        lead = (probs[:, k] - others).view(GRID, GRID).numpy()
        if lead.min() < 0 < lead.max():
            axis.contour(edges, edges, lead, levels=[0.0], colors="#444444", linewidths=0.6)
    frame(axis)


def frame(axis: Axes) -> None:
    axis.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), xticks=[], yticks=[])
    axis.set_aspect("equal")
    for spine in axis.spines.values():
        spine.set_linewidth(0.6)


SHOWN = {"source-only", "shot-im", "u-sfan"}
"""The methods that the figure draws."""


def shown_seed(study: Study) -> int:
    """The first seed that SHOT-IM flips under the strong shift and U-SFAN does not; else the first of all."""
    plain, guided = (study.metrics["strong"][name]["accuracies"] for name in ("shot-im", "u-sfan"))
    for i, (one, other) in enumerate(zip(plain, guided, strict=True)):
        if one < FLIPPED <= other:
            return i
    return 0


def draw_shift(axes: np.ndarray, study: Study, shift: str, index: int) -> None:
    """2×3 panels."""
    labels = study.domains.labels[index]
    source_points = study.domains.source[index : index + 1]
    target_points = study.domains.targets[shift][index : index + 1]
    posterior = study.posteriors["u-sfan"].pick(index)
    for row, (name, post) in enumerate((("shot-im", None), ("u-sfan", posterior))):
        before = View(study.source.pick(index), post)
        after = View(study.adapted[shift][name].pick(index), post)
        for axis, view in zip(axes[row], (before, before, after), strict=True):
            draw_regions(axis, view)
        draw_points(axes[row][0], source_points, labels, solid=True)
        for axis, when in ((axes[row][1], "source-only"), (axes[row][2], name)):
            draw_points(axis, target_points, labels, solid=False)
            accuracy = study.metrics[shift][when]["accuracies"][index]
            axis.text(
                0.97, 0.03, f"{accuracy:.0f} %", transform=axis.transAxes, ha="right", va="bottom", fontsize=8,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            )  # fmt: skip
    for axis, title in zip(axes[0], ("source", "target, before", "target, adapted"), strict=True):
        axis.set_title(title, fontsize=9.5)
    axes[0][2].set_xlabel(flips(study, shift, "shot-im"), fontsize=8.5, labelpad=3)
    axes[1][2].set_xlabel(flips(study, shift, "u-sfan"), fontsize=8.5, labelpad=3)


def flips(study: Study, shift: str, name: str) -> str:
    row = study.metrics[shift][name]
    return f"{name}: {row['flipped']} of {row['runs']} runs flip"


def draw_unseen(axes: np.ndarray, scale: Axes, study: Study, index: int) -> None:
    """Figure 2b: the entropy over the plane of the network and of its Laplace approximation."""
    generator = torch.Generator().manual_seed(study.seeds[index])
    unseen = torch.tensor(UNSEEN_CENTRE)[:, None] + torch.randn(2, UNSEEN_COUNT, generator=generator)
    labels, points = study.domains.labels[index], study.domains.source[index : index + 1]
    source, posterior = study.source.pick(index), study.posteriors["u-sfan"].pick(index)
    for axis, post in zip(axes, (None, posterior), strict=True):
        view = View(source, post)
        values = entropy(view.probs(plane(), 1.0)) / math.log(len(COLOURS))
        image = axis.imshow(
            values.view(GRID, GRID).numpy(), origin="lower", extent=(-EXTENT, EXTENT, -EXTENT, EXTENT),
            vmin=0, vmax=1, cmap=UNCERTAIN, interpolation="bilinear",
        )  # fmt: skip
        draw_points(axis, points, labels, solid=True)
        axis.scatter(*unseen.numpy(), s=7, color="black", linewidths=0)
        there = float(entropy(view.probs(unseen[None], 1.0)).mean()) / math.log(len(COLOURS))
        axis.set_xlabel(f"on the unseen class: {there:.2f}", fontsize=8.5, labelpad=3)
        frame(axis)
    axes[0].set_title("source", fontsize=9.5)
    bar = axes[0].figure.colorbar(image, cax=scale)
    bar.set_label("predictive entropy / log K", fontsize=8.5)
    bar.ax.tick_params(labelsize=7.5)


def toy_figure(study: Study, path: Path) -> None:
    """Writes the PNG."""
    index = shown_seed(study)
    figure = Figure(figsize=(15.6, 5.0))
    gap = 0.12
    columns = figure.add_gridspec(
        2, 10, width_ratios=(1, 1, 1, gap, 1, 1, 1, 2.2 * gap, 1, 0.05),
        left=0.035, right=0.965, top=0.885, bottom=0.135, wspace=0.04, hspace=0.13,
    )  # fmt: skip
    axes = np.array([[figure.add_subplot(columns[row, column]) for column in (0, 1, 2, 4, 5, 6, 8)] for row in (0, 1)])
    draw_shift(axes[:, 0:3], study, "mild", index)
    draw_shift(axes[:, 3:6], study, "strong", index)
    draw_unseen(axes[:, 6], figure.add_subplot(columns[:, 9]), study, index)
    for axis, label in zip(
        axes[:, 0], ("point estimate\n(conventional)", "uncertainty-guided\n(posterior)"), strict=True
    ):
        axis.set_ylabel(label, fontsize=9.5)
    for axis, label in zip(axes[:, 6], ("ReLU network", "its Laplace approximation"), strict=True):
        axis.set_ylabel(label, fontsize=9.5)
    for column, title in ((1, "(a) Mild shift"), (4, "(b) Strong shift"), (6, "(c) An unseen class")):
        box = axes[0, column].get_position()
        figure.text((box.x0 + box.x1) / 2, 0.985, title, ha="center", va="top", fontsize=11.5, weight="bold")
    figure.legend(
        handles=legend_entries(), loc="lower left", bbox_to_anchor=(0.03, 0), ncols=5, fontsize=9, frameon=False
    )
    figure.text(0.965, 0.028, footnote(study, index), ha="right", fontsize=8.5, color="#333333")
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=160, format="png")


def footnote(study: Study, index: int) -> str:
    rule = "the first in which shot-im flips and u-sfan does not"
    plain, guided = (study.metrics["strong"][name]["accuracies"][index] for name in ("shot-im", "u-sfan"))
    chosen = f", {rule}" if plain < FLIPPED <= guided else ""
    return f"Shade of a region: certainty exp(−H). Per cent: accuracy. Shown: seed {study.seeds[index]}{chosen}."


def legend_entries() -> list[Line2D]:
    def entry(label: str, marker: str, face: str, edge: str) -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, markerfacecolor=face, markeredgecolor=edge, markersize=5, label=label
        )

    classes = [entry(name, m, c, c) for name, m, c in zip(NAMES, MARKERS, COLOURS, strict=True)]
    return [*classes, entry("target (hollow)", "o", "none", "black"), entry("unseen class", ".", "black", "black")]
