"""Figures of the N target images: entropy densities, reliability and weights."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from usfan.report.blocks import Figure, number, percent
from usfan.report.read_samples import Samples
from usfan.report.svg import Axes, ticks
from usfan.scoring.calibration import calibration_metrics, entropies, reliability_bins

GROUP_CLASS = {"all": "c-all", "correct": "c-right", "incorrect": "c-wrong", "unknown class": "c-unknown"}
WHEN = {"before": "before adaptation", "after": "after adaptation"}
SERIES = {"probs": ("c-point", "point estimate"), "posterior": ("c-posterior", "posterior")}


def entropy_figures(prefix: str, samples: Samples) -> list[Figure]:
    """Densities of the entropy; filled: posterior predictive, dashed: point estimate. One panel before, one after."""
    top = math.log(max(len(samples.classes), 2))
    grid = np.linspace(0, top, 120)
    figures = []
    for when, title in WHEN.items():
        posterior, probs = samples.get(f"entropy_{when}"), samples.get(f"probs_{when}")
        if posterior is None:
            continue
        groups = {name: mask.numpy() for name, mask in samples.groups(when).items()}
        own = posterior.double().numpy()
        point = entropies(probs).numpy() if probs is not None else None
        curves = {name: density(own[mask], grid, len(own)) for name, mask in groups.items()}
        dashed = {name: density(point[mask], grid, len(own)) for name, mask in groups.items() if point is not None}
        highest = max(float(c.max()) for c in (*curves.values(), *dashed.values()))
        axes = Axes((0, top), (0, highest * 1.05))
        axes.frame("entropy of the prediction (nats)", "density")
        for name, values in curves.items():
            axes.area(grid, values, GROUP_CLASS[name])
            axes.line(grid, values, GROUP_CLASS[name])
        for name, values in dashed.items():
            axes.line(grid, values, f"{GROUP_CLASS[name]} dashed")
        told = ", ".join(f"{named(name, mask)} {median(own[mask])}" for name, mask in groups.items() if mask.any())
        caption = f"Median entropy: {told}; the largest possible is {number(top)}."
        legend = [(GROUP_CLASS[name], name if name != "all" else "posterior") for name in groups]
        legend += [("dashed", "point estimate")] if point is not None else []
        alt = f"Density of the posterior's entropy, {title}. {caption}"
        figures.append(
            Figure(f"{prefix}-entropy-{when}", f"Entropy {title}", axes.size, axes.body(), caption, alt, tuple(legend))
        )
    return figures


def named(group: str, mask: np.ndarray) -> str:
    return f"{number(int(mask.sum()))} {'images' if group == 'all' else group}"


def median(values: np.ndarray) -> str:
    return number(float(np.median(values))) if len(values) else "–"


def density(values: np.ndarray, grid: np.ndarray, total: int) -> np.ndarray:
    """A Gaussian kernel density on the grid, mirrored at both ends so that no mass leaks out.

    Its area is the share of these values in `total`. The values are binned first: the cost does not grow with N.
    """
    low, high = float(grid[0]), float(grid[-1])
    width = (high - low) / 45
    counts, edges = np.histogram(np.clip(values, low, high), bins=400, range=(low, high))
    centres = (edges[1:] + edges[:-1]) / 2
    kernel = sum(
        np.exp(-0.5 * ((grid[:, None] - c) / width) ** 2) for c in (centres, 2 * low - centres, 2 * high - centres)
    )
    result: np.ndarray = kernel @ counts / (width * math.sqrt(2 * math.pi) * max(total, 1))
    return result


def reliability_figures(prefix: str, samples: Samples) -> list[Figure]:
    """Accuracy against confidence, point estimate and posterior, before and after; samples of known classes only."""
    if samples.labels is None:
        return []
    known = samples.labels < len(samples.classes)
    if not bool(known.any()):
        return []
    figures = []
    for when, title in WHEN.items():
        tables = {s: t[known] for s in SERIES if (t := samples.get(f"{s}_{when}")) is not None}
        if not tables:
            continue
        axes = Axes((0, 1), (0, 1), (360, 300))
        axes.frame("confidence", "accuracy", x_ticks=ticks(0, 1), y_ticks=ticks(0, 1))
        axes.line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), "mark")
        told, legend = [], []
        for series, probs in tables.items():
            css, name = SERIES[series]
            draw_reliability(axes, probs, samples.labels[known], css, name)
            error = calibration_metrics(probs, samples.labels[known])["ece"]
            told.append(f"{name} {percent(error)}")
            legend.append((css, f"{name}, ECE {percent(error)}"))
        caption = f"Calibration error (ECE): {', '.join(told)}. "
        caption += "A calibrated model lies on the dashed line; larger dots hold more images."
        alt = f"Reliability diagram, {title}. {caption}"
        figures.append(
            Figure(
                f"{prefix}-reliability-{when}",
                f"Reliability {title}",
                axes.size,
                axes.body(),
                caption,
                alt,
                tuple(legend),
            )
        )
    return figures


def draw_reliability(axes: Axes, probs: Tensor, labels: Tensor, css: str, name: str) -> None:
    bins = reliability_bins(probs, labels)
    full = bins.counts > 0
    confidence, accuracy, counts = (t[full].double().numpy() for t in (bins.confidence, bins.accuracy, bins.counts))
    many = counts >= 0.005 * counts.sum()  # a bin of a few images is noise: a dot, but no corner of the line
    axes.line(confidence[many], accuracy[many], css)
    for c, a, n in zip(confidence.tolist(), accuracy.tolist(), counts.tolist(), strict=True):
        title = f"{name}: {int(n):,} images, confidence {100 * c:.1f} %, accuracy {100 * a:.1f} %"
        axes.dot(c, a, css, title, 2.5 + 5 * math.sqrt(n / counts.sum()))


def weight_figure(prefix: str, samples: Samples) -> Figure | None:
    """The certainty weights exp(−H) of the final model, 20 bins; stacked by group if labels exist."""
    weight = samples.get("weight")
    if weight is None:
        return None
    values = np.clip(weight.double().numpy(), 0, 1)
    edges = np.linspace(0, 1, 21)
    groups = {name: mask.numpy() for name, mask in samples.groups("after").items()}
    counts = {name: np.histogram(values[mask], edges)[0] for name, mask in groups.items()}
    total = np.sum(list(counts.values()), axis=0)
    axes = Axes((0, 1), (0, 100 * float(total.max()) / len(values) * 1.05), (360, 230))
    axes.frame("weight", "images (%)", x_ticks=ticks(0, 1))
    floor = np.zeros(20)
    for name, count in counts.items():
        for i in np.flatnonzero(count).tolist():
            title = f"{name}: {int(count[i]):,} images with a weight from {edges[i]:.2f} to {edges[i + 1]:.2f}"
            bottom, top = 100 * floor[i] / len(values), 100 * (floor[i] + count[i]) / len(values)
            axes.bar(edges[i], edges[i + 1], bottom, top, GROUP_CLASS[name], title)
        floor += count
    apart = {name: number(float(values[mask].mean())) for name, mask in groups.items() if mask.any() and name != "all"}
    means = ", ".join(f"{name} {mean}" for name, mean in apart.items())
    caption = f"Mean weight {number(float(values.mean()))}{f' ({means})' if means else ''}; "
    caption += f"{percent(100 * float((values > 0.5).mean()))} of the images weigh more than 0.5."
    legend = tuple((GROUP_CLASS[name], name) for name in groups) if len(groups) > 1 else ()
    alt = f"Histogram of the certainty weights after adaptation. {caption}"
    return Figure(f"{prefix}-weights", "Weights of the images", axes.size, axes.body(), caption, alt, legend)
