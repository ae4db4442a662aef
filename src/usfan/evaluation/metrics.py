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

A class with no sample is left out of every mean. AUROC, AUPR and FPR95 take "unknown" as the positive group and need
no threshold. p is N×K, y is N. Percentages run from 0 to 100; `nll`, `brier` and `entropy` (nats) are plain numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from usfan.errors import DataError
from usfan.scoring.calibration import calibration_metrics, checked, entropies


def classification_metrics(probs: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """All closed-set figures of probs N×K against labels N; see the module and `calibration` for each."""
    probs, labels = checked(probs, labels)
    if len(classes) != probs.shape[1]:
        raise DataError(f"{len(classes)} class names were given for {probs.shape[1]} columns of probabilities")
    table = confusion(labels, probs.argmax(dim=1), len(classes))
    per_class = class_accuracies(table.diagonal(), table.sum(dim=1))
    return {
        "accuracy": 100 * int(table.diagonal().sum()) / len(labels),
        "mean_class_accuracy": mean_of_present(per_class),
        "per_class_accuracy": dict(zip(classes, per_class, strict=True)),
        **calibration_metrics(probs, labels),
        "entropy": float(entropies(probs).mean()),
    }


def wilson_interval(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Of a share of `count` independent samples, in percent (Wilson 1927): all p with |p̂ − p| ≤ z √(p(1 − p)/count)."""
    share, spread = right / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = (share * (1 - share) * spread + spread * spread / 4) ** 0.5 / (1 + spread)
    return round(100 * (centre - half), 4), round(100 * (centre + half), 4)


def open_set_metrics(
    predicted: Tensor, unknown: Tensor, score: Tensor, labels: Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Open-set figures of N decisions: `predicted` class, `unknown` flag, `score` (higher = more unknown).

    `labels` are N class indices, K for an unknown sample.
    """
    K = len(classes)
    predicted, unknown, labels = predicted.cpu().long(), unknown.cpu().bool(), labels.cpu().long()
    _check_open_set(predicted, unknown, score, labels, K)
    decided = torch.where(unknown, K, predicted)
    total = torch.bincount(labels, minlength=K + 1)
    right = torch.bincount(labels[decided == labels], minlength=K + 1)
    per_class = class_accuracies(right, total)
    known, caught = mean_of_present(per_class[:K]), per_class[K]
    detection = detection_table({"score": score}, labels == K)["score"]
    return {
        "os": mean_of_present(per_class),
        "os_star": known,
        "unknown_accuracy": caught,
        "hos": _harmonic_mean(known, caught),
        "auroc_unknown": detection["auroc"],
        "aupr_unknown": detection["aupr"],
        "per_class_accuracy": dict(zip([*classes, unknown_name(classes)], per_class, strict=True)),
    }


def unknown_name(classes: Sequence[str]) -> str:
    """What the group of unknown samples is called: "unknown", or "(unknown)" beside a known class of that name."""
    return "(unknown)" if "unknown" in classes else "unknown"


def detection_table(scores: Mapping[str, Tensor], is_unknown: Tensor) -> dict[str, dict[str, float | None]]:
    """`auroc`, `aupr`, `fpr95` of every score (N, higher = more unknown), to compare them side by side.

    AUPR is the average precision. FPR95 is the share of the known samples lost when the threshold is low
    enough to catch 95 % of the unknown ones. All three are None when one of the two groups is absent.
    """
    is_unknown = is_unknown.cpu().bool()
    return {name: _detection(score.detach().cpu().double(), is_unknown, name) for name, score in scores.items()}


def _detection(score: Tensor, is_unknown: Tensor, name: str) -> dict[str, float | None]:
    if score.shape != is_unknown.shape or bool(score.isnan().any()):
        raise DataError(f"score {name!r} must be {len(is_unknown)} numbers without NaN, got shape {tuple(score.shape)}")
    if bool(is_unknown.all()) or not bool(is_unknown.any()):
        return {"auroc": None, "aupr": None, "fpr95": None}
    # torchmetrics puts scores outside [0, 1] through a sigmoid, which ties the large ones: ranks keep their order.
    _, rank = torch.unique(score, return_inverse=True)
    rank = rank.double() / rank.max().clamp_min(1)
    caught = score[is_unknown].sort(descending=True).values
    threshold = caught[(95 * len(caught) + 99) // 100 - 1]
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision  # slow to import

    return {
        "auroc": 100 * float(binary_auroc(rank, is_unknown.long())),
        "aupr": 100 * float(binary_average_precision(rank, is_unknown.long())),
        "fpr95": 100 * float((score[~is_unknown] >= threshold).double().mean()),
    }


def _harmonic_mean(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return 2 * a * b / (a + b) if a and b else 0.0


def _check_open_set(predicted: Tensor, unknown: Tensor, score: Tensor, labels: Tensor, K: int) -> None:
    shapes = {name: tuple(t.shape) for name, t in locals().items() if isinstance(t, Tensor)}
    if labels.ndim != 1 or len(set(shapes.values())) != 1:
        raise DataError(f"one value per sample is needed in each, got shapes {shapes}")
    if len(labels) == 0:
        raise DataError("there is no labelled sample to score: check that DATA holds readable images with labels")
    if int(labels.min()) < 0 or int(labels.max()) > K:
        raise DataError(f"labels must lie in 0…{K} ({K} = unknown), got {int(labels.min())}…{int(labels.max())}")


def confusion(label: Tensor, predicted: Tensor, K: int) -> Tensor:
    """K×K counts: row = true class, column = predicted class."""
    label, predicted = label.detach().cpu().long(), predicted.detach().cpu().long()
    return torch.bincount(label * K + predicted, minlength=K * K).view(K, K)


def class_accuracies(right: Tensor, total: Tensor) -> list[float | None]:
    """Percent right of each class; None if `total` is 0."""
    return [100 * r / n if n else None for r, n in zip(right.tolist(), total.tolist(), strict=True)]


def mean_of_present(values: Sequence[float | None]) -> float | None:
    """The mean of what is not None; None when nothing is left."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
