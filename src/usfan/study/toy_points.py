"""The data set of the paper's toy experiment: three classes in the plane, and two targets made from them.

Each class, about its own mean, is scaled by 1.2, moved by (t, t), turned, and blurred by noise. Under the mild shift
the classes stay about where they were. Under the strong one the first class (blue) crosses the plane, into the region
of the second (red).

Shapes: N = 500 points, N×2. A point is an image of one pixel with two channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from usfan.data.store import Store
from usfan.store.model import AdaptedModel, SourceModel

# The paper's layout: the three centres that scikit-learn's make_blobs draws in the box ±10 from random state 37.
CENTRES = (
    (8.88993206, -0.71803651),
    (-6.14409942, 1.63789754),
    (2.40168420, 3.68448035),
)
COUNTS = (167, 167, 166)
SPREAD = 1.3
SCALE = 1.2
TURNS = (-10.0, 10.0, 10.0)
"""Degrees, counter-clockwise. The published program counts clockwise: 10, −10, −10."""
NOISE = 1.5
SHIFTS = {
    "mild": (-1.0, 1.3, 1.5),
    "strong": (-10.0, 2.3, 3.3),
}
"""How far each class moves, along both axes."""
CLASSES = ("blue class", "red class", "green class")
FLIPPED = 50.0
"""Per cent: a run that ends below has swapped classes."""

Metrics = dict[str, dict[str, dict[str, Any]]]
"""Shift → line of the table → figures."""


@dataclass(frozen=True)
class Domains:
    """The data of one seed."""

    source: Tensor
    """N×2."""
    labels: Tensor
    """N, the same for source and target: target point i is source point i, moved."""
    targets: dict[str, Tensor]
    """Shift → N×2."""


@dataclass(frozen=True)
class SeedModels:
    """The data and the models of one seed."""

    seed: int
    domains: Domains
    source: SourceModel
    adapted: dict[str, dict[str, AdaptedModel]] = field(default_factory=dict)
    """Shift → line of the table → model."""


def make_domains(seed: int) -> Domains:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(len(COUNTS))
    labels = classes.repeat_interleave(torch.tensor(COUNTS))
    spread = torch.randn(2, len(labels), generator=generator).T
    noise = torch.randn(2, len(labels), generator=generator).T
    centres = torch.tensor(CENTRES)
    source = centres[labels] + SPREAD * spread
    targets = {}
    for name, moves in SHIFTS.items():
        targets[name] = shift(source, labels, moves) + NOISE * noise
    return Domains(source, labels, targets)


def shift(points: Tensor, labels: Tensor, moves: Sequence[float]) -> Tensor:
    """Each class, about its mean: scaled, moved, then turned (the move is turned too)."""
    result = torch.empty_like(points)
    for label, (move, degrees) in enumerate(zip(moves, TURNS, strict=True)):
        angle = math.radians(degrees)
        cosine = math.cos(angle)
        sine = math.sin(angle)
        turn = torch.tensor([[cosine, sine], [-sine, cosine]])
        rows = labels == label
        mean = points[rows].mean(dim=0)
        moved = SCALE * (points[rows] - mean) + move
        result[rows] = moved @ turn + mean
    return result


def point_store(points: Tensor, labels: Tensor | None = None) -> Store:
    """Points N×2 as images N×2×1×1."""
    pixels = points.reshape(-1, 2, 1, 1).contiguous()
    return Store(pixels, torch.arange(len(points)), labels, CLASSES)
