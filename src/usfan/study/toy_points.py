"""The data of the paper's toy experiment: three classes in the plane, and two targets made from them.

Each class, about its own mean, is scaled by 1.2, moved by (t, t), turned, and blurred by noise. Under the mild shift
the classes stay about where they were. Under the strong one the first class (blue) crosses the plane, into the region
of the second (red).

Shapes: N = 500 points, N×2. A point is an image of one pixel with two channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from usfan.data.store import Store
from usfan.store.model import AdaptedModel

CLASSES = ("blue class", "red class", "green class")
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
FLIPPED = 50.0
"""Per cent: a run that ends below has swapped classes."""


@dataclass(frozen=True)
class ToyRuns:
    """The data and the models of one seed."""

    seed: int
    labels: Tensor
    """The same for source and targets: target point i is source point i, moved."""
    targets: dict[str, Tensor]
    """Shift → points."""
    adapted: dict[tuple[str, str], AdaptedModel] = field(default_factory=dict)
    """(line of the table, shift) → model."""


def make_points(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Source points, their labels, and the targets by shift. Target point i is source point i, moved."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    spread = torch.randn(2, len(labels), generator=generator).T
    noise = torch.randn(2, len(labels), generator=generator).T
    points = torch.tensor(CENTRES)[labels] + SPREAD * spread
    targets = {}
    for name, moves in SHIFTS.items():
        target = NOISE * noise
        for label, (move, degrees) in enumerate(zip(moves, TURNS, strict=True)):
            rows = labels == label
            mean = points[rows].mean(dim=0)
            moved = SCALE * (points[rows] - mean) + move  # the move is turned too
            target[rows] += moved @ turn(degrees) + mean
        targets[name] = target
    return points, labels, targets


def turn(degrees: float) -> Tensor:
    """2×2: turns row vectors counter-clockwise."""
    angle = math.radians(degrees)
    cosine = math.cos(angle)
    sine = math.sin(angle)
    return torch.tensor([[cosine, sine], [-sine, cosine]])


def point_store(points: Tensor, labels: Tensor | None = None) -> Store:
    """Points N×2 as images N×2×1×1."""
    pixels = points.reshape(-1, 2, 1, 1).contiguous()
    return Store(pixels, torch.arange(len(points)), labels, CLASSES)


def accuracy(model: AdaptedModel, labels: Tensor) -> float:
    """Per cent. Only here labels of the target are used."""
    assert model.passes is not None
    right = model.passes.after.logits.argmax(dim=1) == labels
    return 100 * float(right.double().mean())
