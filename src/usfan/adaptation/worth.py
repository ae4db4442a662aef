"""What a user's labels are worth: each is left out in turn, and predicted with the help of the others.

The labels are dealt into parts. For each part the adaptation is repeated with the labels of the other parts, and asked
about the images of this one; once more it is repeated without any label. Both are right on some share of the labelled
images, and the difference is what the other labels brought. The repetitions give the last iterate. Images that were
chosen because they are hard are no sample of the target: the difference is meant, not the shares.

Shapes: L labelled images, N target samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.given import Given
from usfan.compute.runtime import permutation
from usfan.progress import bar

Again = Callable[[Given | None], Tensor]
"""Repeats the adaptation with these labels; N predicted classes."""


def describe(given: Given, before: Tensor) -> dict[str, Any]:
    """How many labels there are, and on how many of these images the source model is right; `before`: N classes."""
    right = float((before[given.rows] == given.labels).double().mean())
    return {"count": len(given), "classes": len(given.labels.unique()), "before": round(100 * right, 1)}


def left_out(given: Given, again: Again, folds: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    """The share of the labelled images that is right without labels and with those of the others, in percent; and the N
    classes that are predicted without labels."""
    parts = min(folds, len(given))
    part_of = torch.empty(len(given), dtype=torch.long)
    part_of[permutation(len(given), seed, 1 << 22)] = torch.arange(len(given)) % parts
    part_of = part_of.to(given.rows.device)
    right = torch.zeros(len(given), dtype=torch.bool, device=given.rows.device)
    with bar("what the labels are worth", parts + 1, "repetitions") as shown:
        plain = again(None)
        shown.advance()
        for part in range(parts):
            held = part_of == part
            rest = given.without(held)
            found = again(rest) if len(rest) else plain
            right[held] = (found[given.rows] == given.labels)[held]
            shown.advance()
    without = float((plain[given.rows] == given.labels).double().mean())
    figures = {"without": round(100 * without, 1), "left_out": round(100 * float(right.double().mean()), 1)}
    return {**figures, "folds": parts}, plain
