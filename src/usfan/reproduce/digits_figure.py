"""The entropy-density figure of the paper: correct against incorrect, before and after, point estimate against ours."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from usfan.models.model import AdaptedModel, Outputs
from usfan.posterior.predictive import entropy

RIGHT, WRONG = "#20639b", "#c8453b"


def density(values: np.ndarray, grid: np.ndarray, width: float) -> np.ndarray:
    """A Gaussian kernel density, mirrored at both ends of the grid so that no mass leaks out; scaled by the count."""
    if len(values) == 0:
        return np.zeros_like(grid)
    low, high = grid[0], grid[-1]
    mirrored = np.concatenate([values, 2 * low - values, 2 * high - values])
    counts, edges = np.histogram(mirrored, bins=600, range=(low - 5 * width, high + 5 * width))
    centres = (edges[1:] + edges[:-1]) / 2
    kernel = np.exp(-0.5 * ((grid[:, None] - centres[None]) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return kernel @ counts


def entropy_figure(plain: AdaptedModel, guided: AdaptedModel, labels: Tensor | None, path: Path) -> None:
    """Dashed: the point estimate (SHOT-IM after adaptation); solid: the posterior predictive (U-SFAN)."""
    assert plain.passes is not None and guided.passes is not None and labels is not None
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=False, constrained_layout=True)
    pairs = ((plain.passes.before, guided.passes.before), (plain.passes.after, guided.passes.after))
    for axis, title, (point, posterior) in zip(axes, ("Before adaptation", "After adaptation"), pairs, strict=True):
        draw_panel(axis, point, posterior, labels, len(guided.classes))
        axis.set_title(title)
        axis.set_xlabel("entropy of the prediction (nats)")
    axes[0].set_ylabel("density × samples")
    axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_panel(axis: plt.Axes, point: Outputs, posterior: Outputs, labels: Tensor, classes: int) -> None:
    top = float(np.log(classes))
    grid = np.linspace(0, top, 200)
    curves = ((point, point.probs, "--", "point estimate"), (posterior, posterior.posterior_probs, "-", "posterior"))
    for outputs, probs, style, name in curves:
        values = entropy(probs).cpu().double().numpy()
        right = (outputs.probs.argmax(dim=1).cpu() == labels.cpu()).numpy()
        for mask, colour, word in ((right, RIGHT, "correct"), (~right, WRONG, "incorrect")):
            axis.plot(grid, density(values[mask], grid, top / 40), style, color=colour, label=f"{word}, {name}")
    axis.set_xlim(0, top)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
