"""The objectives one sample and one class at a time, in Python floats (Eqs. 1, 2, 3 and 7 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-5
Rows = Sequence[Sequence[float]]


def softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    exps = [math.exp(value - top) for value in row]
    return [e / sum(exps) for e in exps]


def entropy(probs: Sequence[float]) -> float:
    """Eq. 2 of one sample, with the recipe's log(p + 1e-5)."""
    return -sum(p * math.log(p + EPSILON) for p in probs)


def mean_probs(rows: Rows) -> list[float]:
    table = [softmax(row) for row in rows]
    return [sum(column) / len(table) for column in zip(*table, strict=True)]


def diversity(probs: Sequence[float]) -> float:
    """Eq. 3."""
    return sum(p * math.log(p + EPSILON) for p in probs)


def information_maximization(rows: Rows, weights: Sequence[float], gamma: float) -> float:
    """(1 − γ) L_ent^ug + γ L_div, Eq. 7."""
    entropies = [w * entropy(softmax(row)) for w, row in zip(weights, rows, strict=True)]
    return (1 - gamma) * sum(entropies) / len(entropies) + gamma * diversity(mean_probs(rows))


def cross_entropy(row: Sequence[float], targets: Sequence[float]) -> float:
    return -sum(q * math.log(p) for q, p in zip(targets, softmax(row), strict=True))


def smoothed_targets(label: int, classes: int, smoothing: float) -> list[float]:
    """q of Eq. 1."""
    return [(1 - smoothing) * (k == label) + smoothing / classes for k in range(classes)]
