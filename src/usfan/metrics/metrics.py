"""Accuracy, closed set and open set: the figures of `usfan evaluate`, beside those of `calibration`.

    accuracy              share of samples with argmax p = y
    per_class_accuracy    the same among the samples of one class; None for a class with no sample
    accuracy_low, _high   its Wilson interval, 95 %: which accuracies on all images of this kind fit these N
    mean_class_accuracy   mean of the latter over the classes that have samples (VisDA-C's figure)

In open set the classes that the source never saw are one more, "unknown", with index K:

    a_k     share of class k's samples that are not flagged unknown and are given class k      (k < K)
    a_K     share of the unknown samples that are flagged: `unknown_accuracy`
    OS      mean of a_0 … a_K           OS*   mean of a_0 … a_{K−1}
    HOS     2·OS*·a_K / (OS* + a_K), and 0 when either is 0

A class with no sample is left out of every mean. AUROC and AUPR take "unknown" as the positive group and need
no threshold. p is N×K, y is N. Percentages run from 0 to 100; `nll`, `brier` and `entropy` (nats) are plain numbers.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from usfan.maths.calibration import calibration_metrics, checked
from usfan.maths.objectives import entropy


def classification_metrics(
    probs: Tensor, labels: Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """All closed-set figures of probs N×K against labels N; see the module and `calibration` for each."""
    probs, labels = checked(probs, labels)
    table = confusion(labels, probs.argmax(dim=1), len(classes))
    per_class = class_accuracies(table.diagonal(), table.sum(dim=1))
    return {
        "accuracy": 100 * int(table.diagonal().sum()) / len(labels),
        "mean_class_accuracy": mean_of_present(per_class),
        "per_class_accuracy": dict(zip(classes, per_class, strict=True)),
        **calibration_metrics(probs, labels),
        "entropy": float(entropy(probs.double()).mean()),
    }


def open_set_metrics(
    predicted: Tensor, unknown: Tensor, score: Tensor, labels: Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Open-set figures of N decisions: `predicted` class, `unknown` flag, `score` (higher = more unknown).

    `labels` are N class indices, K for an unknown sample.
    """
    K = len(classes)
    predicted = predicted.cpu().long()
    unknown = unknown.cpu().bool()
    labels = labels.cpu().long()
    decided = torch.where(unknown, K, predicted)
    total = torch.bincount(labels, minlength=K + 1)
    right = torch.bincount(labels[decided == labels], minlength=K + 1)
    per_class = class_accuracies(right, total)
    os_star = mean_of_present(per_class[:K])
    unknown_accuracy = per_class[K]
    hos = None
    if os_star is not None and unknown_accuracy is not None:
        hos = statistics.harmonic_mean([os_star, unknown_accuracy])
    areas = detection(score, labels == K)
    return {
        "os": mean_of_present(per_class),
        "os_star": os_star,
        "unknown_accuracy": unknown_accuracy,
        "hos": hos,
        "auroc_unknown": areas["auroc"],
        "aupr_unknown": areas["aupr"],
        "per_class_accuracy": dict(
            zip([*classes, unknown_name(classes)], per_class, strict=True)
        ),
    }


def unknown_name(classes: Sequence[str]) -> str:
    """Name of the group of unknown samples: "unknown", or "(unknown)" beside a known class of that name."""
    return "(unknown)" if "unknown" in classes else "unknown"


def detection(score: Tensor, is_unknown: Tensor) -> dict[str, float | None]:
    """`auroc` and `aupr` (the average precision) of a score (N, higher = more unknown); None if one of the two groups
    is absent."""
    from sklearn.metrics import average_precision_score, roc_auc_score  # a second to import

    is_unknown = is_unknown.cpu()
    score = score.cpu().double()
    if bool(is_unknown.all()) or not bool(is_unknown.any()):
        return {"auroc": None, "aupr": None}
    return {
        "auroc": 100 * float(roc_auc_score(is_unknown, score)),
        "aupr": 100 * float(average_precision_score(is_unknown, score)),
    }


def confusion(label: Tensor, predicted: Tensor, K: int) -> Tensor:
    """K×K counts: row = true class, column = predicted class."""
    label = label.detach().cpu().long()
    predicted = predicted.detach().cpu().long()
    return torch.bincount(label * K + predicted, minlength=K * K).view(K, K)


def class_accuracies(right: Tensor, total: Tensor) -> list[float | None]:
    """Percent right of each class; None if `total` is 0."""
    counts = zip(right.tolist(), total.tolist(), strict=True)
    return [100 * r / n if n else None for r, n in counts]


def mean_of_present(values: Sequence[float | None]) -> float | None:
    """The mean of what is not None; None when nothing is left."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
