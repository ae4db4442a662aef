"""The figures of a run as charts of the page, each with a caption that tells its numbers."""

from __future__ import annotations

import math
import re

import matplotlib.figure
import numpy as np

from usfan.maths.validators import DIRECTION
from usfan.metrics.stored_images import ImageTable
from usfan.report import figures
from usfan.report.blocks import Block, Chart, Picker
from usfan.report.formatting import is_number, mapping, number, plain_name
from usfan.report.glossary import VALIDATOR_MEANINGS
from usfan.report.inline_svg import THEME, inline_svg
from usfan.report.overview import kept_epoch
from usfan.report.run import Figures, Run

NOT_DRAWN = {"epoch", "time", "seconds"}
TITLES = {
    "loss": "whole loss",
    "loss_entropy": "loss: entropy",
    "loss_diversity": "loss: diversity",
    "loss_pseudo": "loss: pseudo-labels",
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


def training_charts(prefix: str, run: Run) -> list[Chart]:
    """One chart for each figure that varies over the epochs."""
    epoch = kept_epoch(run)
    records = [{**record, **mapping(record.get("validators"))} for record in run.epochs]
    charts: list[Chart] = []
    keys: dict[str, None] = {}
    for record in records:
        keys |= dict.fromkeys(record)
    for key in keys:
        points = series(records, key)
        if key in NOT_DRAWN or not varies(points):
            continue
        if len(charts) == MOST_CURVES:
            break
        title = TITLES.get(key, plain_name(key))
        better = BETTER[DIRECTION.get(key, 0)]
        caption = f"{course(points)}. {better} {VALIDATOR_MEANINGS.get(key, '')}"
        slug = re.sub(r"\W+", "-", key)
        figure = figures.curve(points, epoch)
        charts.append(
            chart(f"{prefix}-curve-{slug}", title[:1].upper() + title[1:], figure, caption)
        )
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
    return float(np.ptp(values)) > 1e-3 * float(np.abs(values).max())


def course(points: np.ndarray) -> str:
    """`0.61 → 0.92`."""
    text = f"{number(points[0, 1])} → {number(points[-1, 1])}"
    gaps = int((~np.isfinite(points[:, 1])).sum())
    return f"{text}, not finite at {gaps} epochs" if gaps else text


def uncertainty_charts(prefix: str, images: ImageTable) -> list[Block]:
    """Entropies before and after."""
    charts: list[Block] = []
    highest = number(math.log(max(len(images.classes), 2)))
    for when in images.predicted:
        means = group_means(images, when)
        caption = f"Mean entropy: {means}; the largest possible is {highest}."
        figure = figures.entropy_densities(images, when=[when])
        title = f"Entropy {when} adaptation"
        charts.append(chart(f"{prefix}-entropy-{when}", title, figure, caption))
    return charts


def group_means(images: ImageTable, when: str) -> str:
    """`471 correct 0.31, 129 incorrect 0.2`."""
    entropies = images.tensors[f"entropy_{when}"].double()
    means = []
    for group, mask in images.groups(when).items():
        if mask.any():
            name = "images" if group == "all" else group
            mean = number(float(entropies[mask].mean()))
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
