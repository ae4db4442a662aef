"""The charts of the report as matplotlib figures, for notebooks and papers.

Each function takes what `usfan.adapt` returned, or the folder of a run; `data=` brings labels if the model has none.
A figure shows itself in a notebook, and `figure.savefig(FILE)` writes it. pyplot is not needed, and not touched.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from usfan.artifacts.model import AdaptedModel, SourceModel
from usfan.data.decoding.decode import decode_file
from usfan.errors import DataError
from usfan.evaluation.changes import changed_images
from usfan.evaluation.samples import sample_tensors, target_labels
from usfan.report.plots import density
from usfan.report.read_run import read_run
from usfan.report.read_samples import Samples
from usfan.scoring.calibration import calibration_metrics, entropies, reliability_bins

COLOURS = {"correct": "#2a7f62", "incorrect": "#c4453c", "unknown class": "#8a63b5", "all": "#44668c"}
SERIES = {"probs": ("point estimate", "#8a6d3b"), "posterior": ("posterior", "#44668c")}
WHEN = ("before", "after")


class ShownFigure(Figure):
    """A matplotlib figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        FigureCanvasAgg(self).print_png(buffer)
        return buffer.getvalue()


def reliability(target: Any, data: Any = None) -> Figure:
    """Accuracy against confidence, before and after; point estimate and posterior. Needs labels."""
    samples = samples_of(target, data)
    if samples.labels is None:
        raise DataError("a reliability diagram needs labels: give the labelled images, data=…")
    known = samples.labels < len(samples.classes)
    figure, panels = new_figure([when for when in WHEN if samples.get(f"probs_{when}") is not None])
    for when, axes in panels.items():
        axes.plot([0, 1], [0, 1], linestyle="--", color="0.6", linewidth=1)
        for series, (name, colour) in SERIES.items():
            probs = samples.get(f"{series}_{when}")
            if probs is None:
                continue
            bins = reliability_bins(probs[known].float(), samples.labels[known])
            full = bins.counts > 0
            share = bins.counts[full].double() / bins.counts.sum()
            error = calibration_metrics(probs[known].float(), samples.labels[known])["ece"]
            label = f"{name}, ECE {error:.1f} %"
            axes.plot(bins.confidence[full], bins.accuracy[full], color=colour, linewidth=1.5, label=label)
            axes.scatter(bins.confidence[full], bins.accuracy[full], s=(8 + 120 * share).numpy(), color=colour)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", aspect="equal")
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    return figure


def entropy_densities(target: Any, data: Any = None) -> Figure:
    """Densities of the posterior's entropy (filled) and the point estimate's (dashed), before and after."""
    samples = samples_of(target, data)
    top = math.log(max(len(samples.classes), 2))
    grid = np.linspace(0, top, 200)
    figure, panels = new_figure([when for when in WHEN if samples.get(f"entropy_{when}") is not None])
    for when, axes in panels.items():
        own, probs = samples.get(f"entropy_{when}"), samples.get(f"probs_{when}")
        assert own is not None
        for name, mask in samples.groups(when).items():
            values = density(own[mask].double().numpy(), grid, len(own))
            shown = {"all": "posterior"}.get(name, name)
            axes.fill_between(grid, values, color=COLOURS[name], alpha=0.35, linewidth=0)
            axes.plot(grid, values, color=COLOURS[name], label=shown)
            if probs is not None:
                point = density(entropies(probs[mask]).numpy(), grid, len(own))
                axes.plot(grid, point, color=COLOURS[name], linestyle="--", linewidth=1)
        axes.set(xlim=(0, top), ylim=(0, None), xlabel="entropy of the prediction (nats)", ylabel="density")
        axes.legend(frameon=False, fontsize="small")
    return figure


def feature_map(target: Any, data: Any = None, *, most: int = 5000) -> Figure:
    """The features on two axes, before and after, coloured by predicted class; crosses are wrong by the labels."""
    samples = samples_of(target, data)
    figure, panels = new_figure([when for when in WHEN if samples.get(f"features_{when}") is not None])
    rows = torch.linspace(0, len(samples) - 1, min(most, len(samples))).long()
    hue = (np.arange(len(samples.classes)) * 0.381966) % 1.0
    for when, axes in panels.items():
        places = samples.get(f"features_{when}")
        assert places is not None
        colours = palette(hue[samples.predicted[when][rows].numpy()])
        wrong = samples.groups(when).get("incorrect", torch.zeros(len(samples), dtype=torch.bool))[rows].numpy()
        where = places[rows].double().numpy()
        axes.scatter(*where[~wrong].T, s=9, c=colours[~wrong], linewidths=0)
        if wrong.any():
            axes.scatter(*where[wrong].T, s=16, c=colours[wrong], marker="x", linewidths=0.9)
        axes.set(xticks=[], yticks=[])
    return figure


def changed_predictions(target: Any, data: Any = None, *, most: int = 20) -> Figure:
    """The images whose prediction changed, the surest first, with both predictions; of what `usfan.adapt` returned."""
    if not isinstance(target, AdaptedModel):
        raise DataError("changed_predictions needs the model that usfan.adapt returned; a run folder has changes.csv")
    if data is not None:
        from usfan.artifacts.model import as_images

        data = as_images(data)
    images = data if data is not None else (target.passes.images if target.passes is not None else None)
    records = changed_images(target, data)[:most]
    columns = max(1, min(5, len(records)))
    lines = max(1, math.ceil(len(records) / columns))
    figure = ShownFigure(figsize=(2.1 * columns, 2.5 * lines), layout="constrained")
    if not records:
        figure.text(0.5, 0.5, "no prediction changed", ha="center", va="center")
        return figure
    for number, record in enumerate(records):
        axes = figure.add_subplot(lines, columns, number + 1)
        axes.set(xticks=[], yticks=[])
        picture = picture_of(images, str(record["path"]))
        if picture is None:
            axes.text(0.5, 0.5, Path(str(record["path"])).name, ha="center", va="center", fontsize="xx-small")
        else:
            axes.imshow(picture, cmap="gray")
        title = f"{record['before']} →\n{record['after']} ({record['certainty_after']:.2f})"
        axes.set_title(title.replace("$", r"\$"), fontsize="small")
    return figure


def picture_of(images: Any, where: str) -> Any:
    """The image of a record, if it is available."""
    if images is None:
        return None
    if images.paths is not None:
        try:
            picture = decode_file(where)
        except DataError:
            return None
        picture.thumbnail((256, 256))
        return np.asarray(picture)
    position = next((i for i in range(len(images)) if images.where(i) == where), None)
    return None if position is None else images.load(position).permute(1, 2, 0).numpy()


def samples_of(target: Any, data: Any = None) -> Samples:
    """The samples of a model that `adapt` returned, or of a run folder."""
    if isinstance(target, Samples):
        return target
    if isinstance(target, (str, Path)):
        found = read_run(Path(target)).samples
        if found is None:
            raise DataError(f"{target} holds no samples.safetensors: it is not the folder of an adaptation")
        return found
    if not isinstance(target, SourceModel):
        raise DataError(f"expected what usfan.adapt returned, or the folder of a run, not a {type(target).__name__}")
    passes = getattr(target, "passes", None)
    if passes is None:
        raise DataError("this model has no predictions on the target: give what usfan.adapt returned, or a run folder")
    labels = None
    if data is not None:
        from usfan.artifacts.model import as_images

        labels = target_labels(target, as_images(data), open_set=True)  # type: ignore[arg-type]
    tensors = {name: tensor.detach().cpu() for name, tensor in sample_tensors(target, labels).items()}  # type: ignore[arg-type]
    return Samples(tensors, tuple(target.classes), None)


def new_figure(panels: list[str]) -> tuple[Figure, dict[str, Any]]:
    """A row of panels, before and after."""
    if not panels:
        raise DataError("there is nothing to draw: the run kept no predictions")
    figure = ShownFigure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    found = {when: figure.add_subplot(1, len(panels), i) for i, when in enumerate(panels, 1)}
    for when, axes in found.items():
        axes.set_title(f"{when} adaptation")
    return figure, found


def palette(hue: np.ndarray) -> np.ndarray:
    """N×3 colours of hues in [0, 1)."""
    from matplotlib.colors import hsv_to_rgb

    return hsv_to_rgb(np.stack([hue, np.full_like(hue, 0.65), np.full_like(hue, 0.75)], axis=-1))
