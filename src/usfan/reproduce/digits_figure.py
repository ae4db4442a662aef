"""The entropy-density figure of the paper: correct against incorrect, before and after, point estimate against ours."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from usfan.artifacts.model import AdaptedModel
from usfan.evaluation.metrics import detection_table
from usfan.files import whole_file
from usfan.posterior.predictive import entropy
from usfan.report.plots import density

RIGHT, WRONG = "#20639b", "#c8453b"


def entropies_of(model: AdaptedModel, labels: Tensor) -> dict[str, Tensor]:
    """What the figure needs of a run on N samples: entropies of both predictions, and who was right. N each.

    Both are taken at the model's temperature: the point estimate's softmax(f/τ) against the posterior's mean of it.
    """
    assert model.passes is not None
    kept = {}
    for when, outputs in (("before", model.passes.before), ("after", model.passes.after)):
        kept[f"point_{when}"] = entropy((outputs.logits / model.temperature).softmax(dim=1)).float().cpu()
        kept[f"posterior_{when}"] = entropy(outputs.posterior_probs).float().cpu()
        kept[f"right_{when}"] = outputs.probs.argmax(dim=1).cpu() == labels.cpu()
    return kept


def correct_areas(entropies: dict[str, Tensor]) -> dict[str, float | None]:
    """AUROC of correct against incorrect by the entropy of each prediction, percent: the figure in numbers. None if all
    are right, or all wrong."""
    areas = {}
    for name in ("point_before", "posterior_before", "point_after", "posterior_after"):
        wrong = ~entropies[f"right_{name.split('_')[1]}"].bool()
        areas[name] = detection_table({name: entropies[name]}, wrong)[name]["auroc"]
    return areas


def entropy_figure(plain: dict[str, Tensor], guided: dict[str, Tensor], classes: int, path: Path) -> None:
    """Dashed: the point estimate of `plain` (SHOT-IM); solid: the posterior predictive of `guided` (U-SFAN)."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=False, constrained_layout=True)
    for axis, when in zip(axes, ("before", "after"), strict=True):
        draw_curves(axis, plain[f"point_{when}"], plain[f"right_{when}"], classes, "--", "point estimate")
        draw_curves(axis, guided[f"posterior_{when}"], guided[f"right_{when}"], classes, "-", "posterior")
        axis.set_title(f"{when.capitalize()} adaptation")
        axis.set_xlabel("entropy of the prediction, both at one temperature (nats)")
    axes[0].set_ylabel("density × share of the images")
    axes[0].legend(frameon=False, fontsize=8)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format="png")
    plt.close(figure)


def draw_curves(axis: Axes, entropies: Tensor, right: Tensor, classes: int, style: str, name: str) -> None:
    top = float(np.log(classes))
    grid = np.linspace(0, top, 200)
    values, is_right = entropies.double().numpy(), right.bool().numpy()
    for mask, colour, word in ((is_right, RIGHT, "correct"), (~is_right, WRONG, "incorrect")):
        curve = density(values[mask], grid, len(values))
        axis.plot(grid, curve, style, color=colour, label=f"{word}, {name}")
    axis.set_xlim(0, top)
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
