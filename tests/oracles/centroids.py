"""Pseudo-labels and neighbours by loops over samples, in Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def unit(row: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in row))
    return [v / length if length else 0.0 for v in row]


def with_one(features: Rows) -> list[list[float]]:
    """[z, 1] at length 1."""
    return [unit([*row, 1.0]) for row in features]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def nearest_centroid(
    features: Rows,
    probs: Rows,
    *,
    threshold: int = 0,
    mask: Sequence[float] | None = None,
    rounds: int = 2,
) -> list[int]:
    """SHOT's rule: soft centroids first, then hard ones; classes with too few samples are no candidates, in the second
    round by the labels of the first."""
    phi = with_one(features)
    samples = range(len(probs))
    classes = range(len(probs[0]))
    keep = list(mask) if mask is not None else [1.0] * len(probs)
    labels = [largest(row) for row in probs]
    share = [[p * keep[i] for p in probs[i]] for i in samples]
    for _ in range(rounds):
        counts = [sum(keep[i] for i in samples if labels[i] == k) for k in classes]
        candidates = [k for k in classes if counts[k] > threshold]
        if not candidates:
            break
        means = {
            k: unit([sum(share[i][k] * phi[i][d] for i in samples) for d in range(len(phi[0]))])
            for k in classes
        }
        labels = [max(candidates, key=lambda k: dot(phi[i], means[k])) for i in samples]
        share = [[keep[i] * (labels[i] == k) for k in classes] for i in samples]
    return labels


def neighbours(features: Rows, count: int) -> list[list[tuple[int, float]]]:
    """For each sample the (position, similarity) of its nearest by cosine, itself left out."""
    phi = with_one(features)
    result = []
    for i, row in enumerate(phi):
        others = sorted(
            ((dot(row, phi[j]), j) for j in range(len(phi)) if j != i), reverse=True
        )
        result.append([(j, max(0.0, s)) for s, j in others[:count]])
    return result
