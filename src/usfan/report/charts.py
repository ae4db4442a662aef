"""The figures of a run as charts of the page, each with a caption that tells its numbers."""

from __future__ import annotations

import math
import re

import matplotlib.figure
import numpy as np
from torch import Tensor

from usfan.maths.validators import DIRECTION
from usfan.report import figures
from usfan.report.blocks import Block, Chart, Picker
from usfan.report.formatting import is_number, mapping, number, plain_name
from usfan.report.glossary import VALIDATOR_MEANINGS
from usfan.report.image_table import ImageTable
from usfan.report.inline_svg import THEME, inline_svg
from usfan.report.run import Figures

LOSSES = {
    "loss": "whole loss",
    "loss_entropy": "entropy",
    "loss_diversity": "diversity",
    "loss_pseudo": "pseudo-labels",
}
NOT_DRAWN = {"epoch", "time", "seconds", *LOSSES}
TITLES = {
    "lr": "learning rate",
    "weight_mean": "mean weight",
    "validation_accuracy": "accuracy on held-out source images (%)",
    "entropy": "mean entropy (nats)",
    "information_maximization": "information maximisation (nats)",
    "coverage": "share of the classes that are predicted",
    "largest_class": "share of the largest class",
    "drift": "share of changed predictions",
    "certain": "share of certain predictions",
}
MOST_CURVES = 40
"""Charts of a log: a stranger's log may name thousands of figures, and each takes time."""
BETTER = {1: "Higher is better.", -1: "Lower is better.", 0: ""}
CALIBRATED = "A calibrated model lies on the dashed line; larger dots hold more images."
MARKER_WORDS = {
    "correct": "Dot: correct.",
    "incorrect": "Cross: incorrect.",
    "unknown class": "Triangle: unknown class.",
}


def chart(
    id: str,
    title: str,
    figure: matplotlib.figure.Figure,
    caption: str,
) -> Chart:
    svg = inline_svg(figure, id, f"{title}. {caption}")
    return Chart(id, title, svg, caption)


def training_charts(
    prefix: str,
    epochs: list[Figures],
    kept_epoch: int | None,
) -> list[Chart]:
    """Losses in one chart, then learning rate and whatever else was logged, each in its own."""
    losses = {}
    courses = []
    for key, name in LOSSES.items():
        points = series(epochs, key)
        if varies(points):
            losses[name] = points
            courses.append(f"{name} {course(points, kept_epoch)}")
    charts = curve_charts(prefix, epochs, kept_epoch)
    if losses:
        figure = figures.curves(losses, kept_epoch)
        charts.insert(0, chart(f"{prefix}-losses", "Losses", figure, f"{'; '.join(courses)}."))
    return charts


def validator_charts(
    prefix: str,
    epochs: list[Figures],
    kept_epoch: int | None,
) -> list[Chart]:
    records = []
    for epoch in epochs:
        validators = mapping(epoch.get("validators"))
        records.append({**validators, "epoch": epoch["epoch"]})
    return curve_charts(f"{prefix}-validator", records, kept_epoch)


def curve_charts(
    prefix: str,
    epochs: list[Figures],
    kept_epoch: int | None,
) -> list[Chart]:
    """One chart for each figure that varies over the epochs."""
    keys: dict[str, None] = {}
    for epoch in epochs:
        keys |= dict.fromkeys(epoch)
    charts: list[Chart] = []
    for key in keys:
        points = series(epochs, key)
        if key in NOT_DRAWN or not varies(points):
            continue
        if len(charts) == MOST_CURVES:
            break
        title = TITLES.get(key, plain_name(key))
        better = BETTER[DIRECTION.get(key, 0)]
        meaning = VALIDATOR_MEANINGS.get(key, "")
        caption = f"{course(points, kept_epoch)}. {better} {meaning}"
        slug = re.sub(r"\W+", "-", key)
        figure = figures.curves({title: points}, kept_epoch)
        charts.append(chart(f"{prefix}-{slug}", title[:1].upper() + title[1:], figure, caption))
    return charts


def series(epochs: list[Figures], key: str) -> np.ndarray:
    """n×2: epoch and value, of the epochs that hold this figure. Values may be nan or infinite."""
    points = []
    for epoch in epochs:
        value = epoch.get(key)
        if isinstance(value, float) or is_number(value):
            points.append((epoch["epoch"], value))
    return np.array(points, dtype=float).reshape(-1, 2)


def varies(points: np.ndarray) -> bool:
    """Whether a line says more than one number would: rounding errors are no change."""
    values = points[np.isfinite(points[:, 1]), 1]
    if len(values) < 2:
        return False
    largest = float(np.abs(values).max())
    return float(values.max() - values.min()) > 1e-3 * largest


def course(points: np.ndarray, kept_epoch: int | None) -> str:
    """`0.61 → 0.92, 0.93 at the kept epoch 9`."""
    last = number(points[-1, 1])
    text = f"{number(points[0, 1])} → {last}"
    for epoch, value in points:
        if epoch == kept_epoch and number(value) != last:
            text += f", {number(value)} at the kept epoch {kept_epoch}"
    gaps = int((~np.isfinite(points[:, 1])).sum())
    return f"{text}, not finite at {gaps} epochs" if gaps else text


def uncertainty_charts(prefix: str, images: ImageTable) -> list[Chart]:
    """Entropies before and after, and the weights."""
    charts = []
    highest = number(math.log(max(len(images.classes), 2)))
    for when in images.predicted:
        means = group_means(images, when, images.tensors[f"entropy_{when}"])
        caption = f"Mean entropy: {means}; the largest possible is {highest}."
        figure = figures.entropy_densities(images, when=[when])
        title = f"Entropy {when} adaptation"
        charts.append(chart(f"{prefix}-entropy-{when}", title, figure, caption))
    caption = f"Mean weight: {group_means(images, 'after', images.tensors['weight'])}."
    figure = figures.weight_histogram(images)
    charts.append(chart(f"{prefix}-weights", "Weights of the images", figure, caption))
    return charts


def group_means(
    images: ImageTable,
    when: str,
    values: Tensor,
) -> str:
    """`471 correct 0.31, 129 incorrect 0.2`."""
    means = []
    for group, mask in images.groups(when).items():
        if mask.any():
            name = "images" if group == "all" else group
            mean = number(float(values[mask].double().mean()))
            means.append(f"{int(mask.sum()):,} {name} {mean}")
    return ", ".join(means)


def reliability_charts(prefix: str, images: ImageTable) -> list[Chart]:
    charts = []
    labels = images.labels
    if labels is not None and bool((labels < len(images.classes)).any()):
        for when in images.predicted:
            figure = figures.reliability(images, when=[when])
            title = f"Reliability {when} adaptation"
            charts.append(chart(f"{prefix}-reliability-{when}", title, figure, CALIBRATED))
    return charts


def map_blocks(
    prefix: str,
    images: ImageTable,
    most: int,
) -> list[Block]:
    """Both maps, of the same images; first the buttons that bring out a class."""
    if "features_after" not in images.tensors:
        return []
    blocks: list[Block] = [picker(images)]
    for when in images.predicted:
        figure = figures.feature_map(images, most=most, when=[when])
        drawn = f", {most:,} of them drawn" if most < len(images) else ""
        markers = [MARKER_WORDS.get(group, "") for group in images.groups(when)]
        caption = f"{len(images):,} images{drawn}. {' '.join(markers)}"
        title = f"Features {when} adaptation"
        blocks.append(chart(f"{prefix}-map-{when}", title, figure, caption))
    return blocks


def picker(images: ImageTable) -> Picker:
    items = []
    colours = figures.class_colours(len(images.classes))
    for k, name in enumerate(images.classes):
        colour = THEME.get(colours[k], colours[k])
        items.append((k, colour, name))
    return Picker(items)
