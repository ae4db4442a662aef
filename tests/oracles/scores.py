"""Evaluation figures the slow way: plain loops over samples, in Python floats."""

import math
from collections.abc import Sequence


def nll(probs: Sequence[Sequence[float]], labels: Sequence[int]) -> float:
    return sum(-math.log(p[y]) for p, y in zip(probs, labels, strict=True)) / len(labels)


def brier(probs: Sequence[Sequence[float]], labels: Sequence[int]) -> float:
    total = 0.0
    for p, y in zip(probs, labels, strict=True):
        total += sum((v - (k == y)) ** 2 for k, v in enumerate(p))
    return total / len(labels)


def ece(confidence: Sequence[float], correct: Sequence[bool], bins: int = 15) -> float:
    """Percent; bins [a, b), the last with its right end."""
    groups: dict[int, list[int]] = {}
    for i, c in enumerate(confidence):
        groups.setdefault(max(b for b in range(bins) if b == 0 or c >= b / bins), []).append(i)
    return (
        100
        * sum(_gap(group, confidence, correct) for group in groups.values())
        / len(confidence)
    )


def _gap(group: Sequence[int], confidence: Sequence[float], correct: Sequence[bool]) -> float:
    mean_confidence = sum(confidence[i] for i in group) / len(group)
    accuracy = sum(correct[i] for i in group) / len(group)
    return len(group) * abs(accuracy - mean_confidence)


def auroc(score: Sequence[float], positive: Sequence[bool]) -> float:
    """Percent; the share of pairs of a positive and a negative in the right order, ties counting one half."""
    pairs = [
        (s > t) + (s == t) / 2
        for s, p in zip(score, positive, strict=True)
        for t, q in zip(score, positive, strict=True)
        if p and not q
    ]
    return 100 * sum(pairs) / len(pairs)


def average_precision(score: Sequence[float], positive: Sequence[bool]) -> float:
    """Percent; the sum over thresholds, the highest first, of precision times the gain in recall."""
    total = 0.0
    recall = 0.0
    for threshold in sorted(set(score), reverse=True):
        caught = [p for s, p in zip(score, positive, strict=True) if s >= threshold]
        gain = sum(caught) / sum(positive) - recall
        total += gain * sum(caught) / len(caught)
        recall += gain
    return 100 * total


def open_set_by_hand(
    predicted: Sequence[int], unknown: Sequence[bool], labels: Sequence[int], K: int
) -> list[float | None]:
    """Percent right of each class, the unknown one last; None for a class with no sample."""
    accuracies: list[float | None] = []
    for k in range(K + 1):
        own = [i for i, y in enumerate(labels) if y == k]
        right = [unknown[i] if k == K else (not unknown[i] and predicted[i] == k) for i in own]
        accuracies.append(100 * sum(right) / len(right) if own else None)
    return accuracies


def two_means_sse(low: Sequence[float], high: Sequence[float]) -> float:
    return sum(
        sum((v - sum(group) / len(group)) ** 2 for v in group) for group in (low, high) if group
    )


def best_two_means_sse(values: Sequence[float]) -> float:
    """The smallest within-cluster sum of squares over every cut of the sorted values."""
    ordered = sorted(values)
    return min(two_means_sse(ordered[:cut], ordered[cut:]) for cut in range(1, len(ordered)))
