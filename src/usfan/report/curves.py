"""What changed from epoch to epoch: losses, validators, learning rate. And runs beside each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from usfan.report.blocks import Figure, is_number, number, plain_name
from usfan.report.svg import Axes, padded, ticks
from usfan.report.terms import VALIDATORS
from usfan.scoring.validators import DIRECTION

LOSSES = {
    "loss": "whole loss",
    "loss_entropy": "entropy",
    "loss_diversity": "diversity",
    "loss_pseudo": "pseudo-labels",
}
SKIPPED = {"epoch", "time", "seconds", *LOSSES}
NAMES = {
    "lr": "learning rate",
    "weight_mean": "mean weight",
    "validation_accuracy": "accuracy on held-out source images (%)",
    "entropy": "mean entropy (nats)",
    "information_maximization": "information maximisation (nats)",
    "coverage": "share of the classes that are predicted",
    "largest_class": "share of the largest class",
    "drift": "share that left the source prediction",
    "certain": "share of certain predictions",
}
Series = np.ndarray
"""n×2: epoch, value."""


def series(epochs: list[dict[str, Any]], key: str) -> Series:
    """The epochs that hold this figure. A value that is not finite stays: the line breaks there."""
    pairs = [(e["epoch"], e[key]) for e in epochs if isinstance(e.get(key), float) or is_number(e.get(key))]
    return np.array(pairs, float).reshape(-1, 2)


def training_figures(prefix: str, epochs: list[dict[str, Any]], kept: int | None) -> list[Figure]:
    """Losses in one figure, then learning rate and whatever else was logged, each in its own."""
    found = {key: series(epochs, key) for key in LOSSES}
    losses = {LOSSES[k]: v for k, v in found.items() if len(v) > 1 and (k == "loss" or np.any(v[:, 1] != 0))}
    figures = [lines(f"{prefix}-losses", "Losses", "loss", losses, kept)] if losses else []
    keys = [k for k in dict.fromkeys(k for e in epochs for k in e) if k not in SKIPPED]
    return figures + [curve(f"{prefix}-{slug(k)}", k, v, kept) for k in keys if len(v := series(epochs, k)) > 1]


def validator_figures(prefix: str, epochs: list[dict[str, Any]], kept: int | None) -> list[Figure]:
    judged = [{**e["validators"], "epoch": e["epoch"]} for e in epochs if isinstance(e.get("validators"), dict)]
    keys = [k for k in dict.fromkeys(k for e in judged for k in e) if k != "epoch"]
    return [curve(f"{prefix}-validator-{slug(k)}", k, v, kept) for k in keys if len(v := series(judged, k)) > 1]


def slug(key: str) -> str:
    return re.sub(r"\W+", "-", key)


def curve(id: str, key: str, values: Series, kept: int | None) -> Figure:
    """One figure over the epochs, with the epoch that was kept."""
    name = NAMES.get(key, plain_name(key))
    better = {1: " Higher is better.", -1: " Lower is better."}.get(DIRECTION.get(key, 0), "")
    explained = f" {VALIDATORS[key]}" if key in VALIDATORS else ""
    return lines(id, name[0].upper() + name[1:], "", {name: values}, kept, f"{better}{explained}")


def lines(id: str, title: str, y_name: str, values: Mapping[str, Series], kept: int | None, remark: str = "") -> Figure:
    """One line per series; dots carry the values."""
    every = np.concatenate(list(values.values()))
    first, last = int(every[:, 0].min()), int(every[:, 0].max())
    axes = Axes((first, last), padded(every[:, 1]))
    axes.frame("epoch", y_name, x_ticks=ticks(first, last, 6, whole=True))
    if kept is not None and first <= kept <= last:
        axes.upright(kept, "kept")
    for i, (name, rows) in enumerate(values.items()):
        axes.line(rows[:, 0], rows[:, 1], f"k{i}")
        shown = rows[np.isfinite(rows[:, 1])]
        if len(shown) <= 60:
            for epoch, value in shown.tolist():
                axes.dot(epoch, value, f"k{i}", f"{name}, epoch {int(epoch)}: {number(value)}", 2.5)
    several = len(values) > 1
    told = [f"{name + ' ' if several else ''}{course(rows, kept)}" for name, rows in values.items()]
    legend = tuple((f"k{i}", name) for i, name in enumerate(values)) if several else ()
    caption = "; ".join(told) + "." + remark
    return Figure(
        id, title, axes.size, axes.body(), caption, f"Line chart over epochs {first} to {last}. {caption}", legend
    )


def course(rows: Series, kept: int | None) -> str:
    """`0.61 → 0.92, 0.93 at the kept epoch 9`."""
    text = f"{number(rows[0, 1])} → {number(rows[-1, 1])}"
    chosen = rows[rows[:, 0] == kept] if kept is not None else rows[:0]
    if len(chosen) and number(chosen[0, 1]) != number(rows[-1, 1]):
        text += f", {number(chosen[0, 1])} at the kept epoch {int(chosen[0, 0])}"
    broken = int((~np.isfinite(rows[:, 1])).sum())
    return text + (f", not finite at {broken} epochs" if broken else "")
