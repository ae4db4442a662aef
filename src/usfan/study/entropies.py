"""Entropies of right and wrong predictions: the figure of the paper, and its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from usfan.files import whole_file
from usfan.maths.objectives import entropy
from usfan.metrics.metrics import detection_table
from usfan.report.figures import density
from usfan.store.model import AdaptedModel

ENTROPY_METHODS = ("shot-im", "u-sfan")
"""The figure shows the point estimate of the first and the posterior of the second."""
RIGHT = "#20639b"
WRONG = "#c8453b"


def entropies_of(model: AdaptedModel, labels: Tensor) -> dict[str, Tensor]:
    """Entropies of both predictions on N images before and after adaptation, and who was right. N each.

    Both are taken at the model's temperature: the point estimate's softmax(f/τ) against the posterior's mean of it.
    """
    assert model.passes is not None
    tensors = {}
    passes = {"before": model.passes.before, "after": model.passes.after}
    for when, outputs in passes.items():
        point = (outputs.logits / model.temperature).softmax(dim=1)
        predicted = outputs.probs.argmax(dim=1)
        tensors[f"point_{when}"] = entropy(point).float().cpu()
        tensors[f"posterior_{when}"] = entropy(outputs.posterior_probs).float().cpu()
        tensors[f"right_{when}"] = predicted.cpu() == labels.cpu()
    return tensors


def correct_areas(entropies: dict[str, Tensor]) -> dict[str, float | None]:
    """AUROC of correct against incorrect by the entropy of each prediction, percent: the figure in numbers. None if all
    are right, or all wrong."""
    areas = {}
    for when in ("before", "after"):
        wrong = ~entropies[f"right_{when}"].bool()
        for name in (f"point_{when}", f"posterior_{when}"):
            table = detection_table({name: entropies[name]}, wrong)
            areas[name] = table[name]["auroc"]
    return areas


def entropy_figure(
    plain: dict[str, Tensor],
    guided: dict[str, Tensor],
    classes: int,
    path: Path,
) -> None:
    """Dashed: the point estimate of `plain` (SHOT-IM); solid: the posterior predictive of `guided` (U-SFAN)."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    grid = np.linspace(0, np.log(classes), 200)
    for axis, when in zip(axes, ("before", "after"), strict=True):
        point = plain[f"point_{when}"]
        posterior = guided[f"posterior_{when}"]
        draw_densities(axis, grid, point, plain[f"right_{when}"], "--", "point estimate")
        draw_densities(axis, grid, posterior, guided[f"right_{when}"], "-", "posterior")
        axis.set_title(f"{when.capitalize()} adaptation")
        axis.set_xlabel("entropy of the prediction, both at one temperature (nats)")
    axes[0].set_ylabel("density × share of the images")
    axes[0].legend(frameon=False, fontsize=8)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format="png")


def draw_densities(
    axis: Axes,
    grid: np.ndarray,
    entropies: Tensor,
    right: Tensor,
    style: str,
    name: str,
) -> None:
    values = entropies.double().numpy()
    correct = right.bool().numpy()
    groups = {"correct": (correct, RIGHT), "incorrect": (~correct, WRONG)}
    for group, (mask, colour) in groups.items():
        curve = density(values[mask], grid, len(values))
        axis.plot(grid, curve, style, color=colour, label=f"{group}, {name}")
    axis.set_xlim(0, grid[-1])
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
