"""The charts of the report as matplotlib figures, for notebooks and papers.

Each function takes what `usfan.adapt` returned, or the folder of a run; `data=` brings labels if the model has none.
A figure shows itself in a notebook, and `figure.savefig(FILE)` writes it. The functions neither need pyplot nor change
matplotlib's settings.
"""

from __future__ import annotations

import colorsys
import contextlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from usfan.errors import DataError
from usfan.maths.agreement import sample_rows
from usfan.maths.calibration import calibration_metrics, reliability_bins
from usfan.maths.objectives import entropy
from usfan.metrics.changes import changed_images, changed_rows, passes_of
from usfan.metrics.stored_images import ImageTable, table_of_model
from usfan.report.run import read_run
from usfan.store.model import AdaptedModel, SourceModel, as_images

if TYPE_CHECKING:
    from usfan.store.model import Images

PALETTE = (
    "#1f5fa8", "#c2410c", "#2b7d4f", "#8a3fa0", "#96700a", "#0b7a86",
    "#b3275f", "#5a6b16", "#4b4fc4", "#8a4b2c", "#5d6670", "#c0458f",
)  # fmt: skip
"""Colours that can be told apart; in the report, the variables --k0 to --k11 of its style sheet."""
BLUE = PALETTE[0]
ORANGE = PALETTE[1]
VIOLET = PALETTE[3]
GREY = PALETTE[10]
GROUP_COLOURS = {"correct": BLUE, "incorrect": ORANGE, "unknown class": VIOLET, "all": BLUE}
SERIES = {"probs": ("point estimate", ORANGE), "posterior": ("posterior", BLUE)}
WHEN = ("before", "after")
BINS = 20
MARKERS = {"all": ".", "correct": ".", "incorrect": "x", "unknown class": "^"}
Target = SourceModel | ImageTable | str | Path


class NotebookFigure(Figure):
    """A matplotlib figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        FigureCanvasAgg(self).print_png(buffer)
        return buffer.getvalue()


def reliability(
    target: Target,
    data: Images | None = None,
    *,
    when: Sequence[str] = WHEN,
) -> Figure:
    """Accuracy against confidence, before and after; point estimate and posterior. Needs labels."""
    images = images_of(target, data)
    if images.labels is None:
        raise DataError("a reliability diagram needs labels: give the labelled images, data=…")
    known = images.labels < len(images.classes)
    figure, panels = new_panels(images, when, height=3.8)
    for name, axes in panels.items():
        axes.plot([0, 1], [0, 1], linestyle="--", color=GREY, linewidth=1)
        for series, (label, colour) in SERIES.items():
            probs = images.tensors[f"{series}_{name}"]
            draw_reliability(axes, probs[known], images.labels[known], colour, label)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
        axes.legend(frameon=False)
    return figure


def draw_reliability(
    axes: Axes,
    probs: Tensor,
    labels: Tensor,
    colour: str,
    label: str,
) -> None:
    """One curve; a larger dot holds more images."""
    bins = reliability_bins(probs.float(), labels)
    full = bins.counts > 0
    confidence = bins.confidence[full].numpy()
    accuracy = bins.accuracy[full].numpy()
    share = (bins.counts[full].double() / bins.counts.sum()).numpy()
    many = share >= 0.005  # a bin of a few images is noise: a dot, but no corner of the line
    error = calibration_metrics(probs.float(), labels)["ece"]
    axes.plot(
        confidence[many], accuracy[many], color=colour, label=f"{label}, ECE {error:.1f} %"
    )
    axes.scatter(confidence, accuracy, s=8 + 120 * share, color=colour, clip_on=False)


def entropy_densities(
    target: Target,
    data: Images | None = None,
    *,
    when: Sequence[str] = WHEN,
) -> Figure:
    """Densities of the posterior's entropy (filled) and the point estimate's (dashed), before and after. The area of a
    group is its share of the images."""
    images = images_of(target, data)
    highest = math.log(max(len(images.classes), 2))
    figure, panels = new_panels(images, when)
    for name, axes in panels.items():
        posterior = images.tensors[f"entropy_{name}"].double().clamp(0, highest)
        point = entropy(images.tensors[f"probs_{name}"].double()).clamp(0, highest)
        for group, mask in images.groups(name).items():
            label = "posterior" if group == "all" else group
            draw_density(axes, posterior, mask, highest, GROUP_COLOURS[group], label)
            draw_density(axes, point, mask, highest, GROUP_COLOURS[group])
        axes.set(xlim=(0, highest), ylabel="density")
        axes.set_xlabel("entropy of the prediction (nats)")
        axes.locator_params(axis="x", nbins=5)
        axes.legend(frameon=False)
    return figure


def draw_density(
    axes: Axes,
    values: Tensor,
    mask: Tensor,
    highest: float,
    colour: str,
    label: str | None = None,
) -> None:
    """The histogram of the values of a group: filled if it has a label, else dashed."""
    counts, edges = np.histogram(values[mask].numpy(), bins=BINS, range=(0, highest))
    heights = counts * BINS / (highest * len(values))
    if label:
        axes.stairs(heights, edges, color=colour, alpha=0.16, fill=True)
    style = "-" if label else "--"
    axes.stairs(heights, edges, color=colour, linestyle=style, linewidth=1.2, label=label)


def feature_map(
    target: Target,
    data: Images | None = None,
    *,
    most: int = 5000,
    when: Sequence[str] = WHEN,
) -> Figure:
    """The features on two axes, before and after, coloured by predicted class; crosses are wrong by the labels."""
    images = images_of(target, data)
    colours = class_colours(len(images.classes))
    rows = sample_rows(len(images), most)
    figure, panels = new_panels(images, when, height=4.4)
    for name, axes in panels.items():
        points = images.tensors[f"features_{name}"][rows].double().numpy()
        low, high = np.quantile(points, [0.001, 0.999], axis=0)
        points = points.clip(low, high)  # the outermost thousandth lies on the edge
        predicted = images.predicted[name][rows]
        for group, mask in images.groups(name).items():
            for k in predicted[mask[rows]].unique().tolist():
                chosen = points[(mask[rows] & (predicted == k)).numpy()]
                (spots,) = axes.plot(*chosen.T, MARKERS[group], color=colours[k], alpha=0.7)
                spots.set(gid=f"class-{k}", markersize=5, markeredgewidth=1)
        axes.set_axis_off()
    return figure


def class_colours(K: int) -> list[str]:
    """One colour per class; beyond the palette, hues of one lightness that light and dark pages can show."""
    if len(PALETTE) >= K:
        return list(PALETTE[:K])
    return [to_hex(colorsys.hls_to_rgb(k * 0.381966 % 1, 0.5, 0.6)) for k in range(K)]


def curve(points: np.ndarray, kept_epoch: int | None = None) -> Figure:
    """A figure by epoch: n×2, epoch and value. The line breaks at a value that is not finite."""
    figure = NotebookFigure(layout="constrained")
    axes = figure.add_subplot()
    epochs, heights = points.T
    heights = np.where(np.abs(heights) < 1e30, heights, np.nan)
    marker = "o" if len(points) <= 60 else ""
    axes.plot(epochs, heights, marker=marker, markersize=3.5, color=BLUE)
    if kept_epoch is not None:
        axes.axvline(kept_epoch, linestyle="--", linewidth=1, color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("epoch")
    return figure


def changed_predictions(
    target: AdaptedModel,
    data: Images | None = None,
    *,
    most: int = 20,
) -> Figure:
    """The images whose prediction changed, the surest first, with both predictions; of what `usfan.adapt` returned."""
    passes = passes_of(target)
    images = passes.images if data is None else as_images(data)
    records = changed_images(target, images)[:most]
    positions = passes.positions.cpu()[changed_rows(passes)[:most]].tolist()
    columns = max(1, min(5, len(records)))
    lines = max(1, math.ceil(len(records) / columns))
    figure = NotebookFigure(figsize=(2.1 * columns, 2.5 * lines), layout="constrained")
    if not records:
        figure.text(0.5, 0.5, "no prediction changed", ha="center", va="center")
    for number, (record, position) in enumerate(zip(records, positions, strict=True), 1):
        axes = figure.add_subplot(lines, columns, number, xticks=[], yticks=[])
        if images is not None:
            with contextlib.suppress(DataError):  # the file is gone
                pixels = images.load(position)
                step = math.ceil(max(pixels.shape) / 256)
                axes.imshow(pixels[:, ::step, ::step].permute(1, 2, 0).numpy())
        title = f"{record['before']} →\n{record['after']} ({record['certainty_after']:.2f})"
        axes.set_title(title, fontsize="small", parse_math=False)
    return figure


def images_of(target: Target, data: Images | None = None) -> ImageTable:
    """The predictions of a model that `adapt` returned, or of a run folder."""
    if isinstance(target, ImageTable):
        return target
    if isinstance(target, (str, Path)):
        images = read_run(Path(target)).images
        if images is None:
            raise DataError(
                f"{target} holds no samples.safetensors: it is not the folder of an adaptation"
            )
        return images
    if not isinstance(target, AdaptedModel) or target.passes is None:
        raise DataError(
            "there are no predictions on a target: give what usfan.adapt returned, or a run folder"
        )
    return table_of_model(target, None if data is None else as_images(data))


def new_panels(
    images: ImageTable,
    when: Sequence[str],
    *,
    height: float = 3.2,
) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one panel for each of `when` that the table has."""
    names = [name for name in when if name in images.predicted]
    figure = NotebookFigure(figsize=(5 * len(names), height), layout="constrained")
    panels: dict[str, Axes] = {}
    for i, name in enumerate(names, 1):
        panels[name] = figure.add_subplot(1, len(names), i)
        if len(when) > 1:
            panels[name].set_title(f"{name} adaptation")
    return figure, panels
