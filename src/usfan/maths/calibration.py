"""How well probabilities match outcomes: proper scores and the calibration error.

With p (N×K) the probabilities, y (N) the labels, c = max_k p the confidence and r = 1[argmax p = y]:

    NLL     −mean log p_y
    Brier   mean Σ_k (p_k − 1[y = k])²              0 to 2; for K = 2 twice the binary score
    ECE     Σ_b n_b/N · |mean_b r − mean_b c|       over 15 bins of equal width, in percent

Everything is computed in float64 on the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from usfan.errors import DataError, option

BINS = 15
LARGEST_TEMPERATURE = 50.0
SMALLEST = torch.finfo(torch.float32).tiny
"""A float32 softmax that underflowed to 0 counts as this: its log is −87, not −∞."""


class ReliabilityBins(NamedTuple):
    """One row per bin; `confidence` and `accuracy` are in [0, 1], and 0 if `counts` is 0."""

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def matching_temperature(logits: Tensor, accuracy: float) -> float:
    """T such that the mean of max softmax(z / T), which falls in T, is the accuracy, as far as 1/50 ≤ T ≤ 50 allows;
    by bisection on log T. Logits N × K."""
    low = -math.log(LARGEST_TEMPERATURE)
    high = math.log(LARGEST_TEMPERATURE)
    logits = logits.double()
    for _ in range(40):
        middle = (low + high) / 2
        confidence = (logits / math.exp(middle)).softmax(dim=1).amax(dim=1).mean()
        if float(confidence) > accuracy:
            low = middle
        else:
            high = middle
    return math.exp(high)


def calibration_metrics(
    probs: Tensor,
    labels: Tensor,
    prefix: str = "",
) -> dict[str, float]:
    """`nll`, `brier` and `ece` of probs N×K against labels N, each key with `prefix` before it."""
    probs, labels = checked(probs, labels)
    confidence, correct = _confidence_and_correct(probs, labels)
    label_probs = probs.gather(1, labels[:, None]).squeeze(1).double()
    squares = probs.double().square().sum(dim=1)
    index = _equal_width(confidence)
    gaps = torch.bincount(index, weights=correct - confidence, minlength=BINS)
    figures = {
        "nll": -label_probs.clamp_min(SMALLEST).log().mean(),
        "brier": (squares - 2 * label_probs + 1).mean(),
        "ece": 100 * (gaps.abs().sum() / len(labels)),
    }
    return {prefix + name: float(value) for name, value in figures.items()}


def reliability_bins(probs: Tensor, labels: Tensor) -> ReliabilityBins:
    """The reliability diagram of probs N×K: bins of equal width, [a, b), the last one with its right end.

    A confidence of exactly 1 belongs to the last bin.
    """
    probs, labels = checked(probs, labels)
    confidence, correct = _confidence_and_correct(probs, labels)
    index = _equal_width(confidence)
    counts = torch.bincount(index, minlength=BINS)
    sizes = counts.clamp_min(1)
    mean_confidence = torch.bincount(index, weights=confidence, minlength=BINS) / sizes
    accuracy = torch.bincount(index, weights=correct, minlength=BINS) / sizes
    return ReliabilityBins(mean_confidence, accuracy, counts)


def checked(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Both on the host, after checking that they can be scored: N×K finite probabilities, N labels in 0…K−1, N > 0."""
    probs = probs.detach().cpu()
    labels = labels.detach().cpu().long()
    if probs.ndim != 2 or labels.shape != probs.shape[:1]:
        raise DataError(
            f"probabilities N×K and labels N are needed, got shapes {tuple(probs.shape)} and {tuple(labels.shape)}"
        )
    if len(labels) == 0:
        raise DataError(
            "there is no labelled sample to score: check that DATA holds readable images with labels"
        )
    if not bool(torch.isfinite(probs).all()):
        raise DataError(
            "some probabilities are not finite: the model has diverged, try a lower learning rate"
        )
    low = int(labels.min())
    high = int(labels.max())
    if low < 0 or high >= probs.shape[1]:
        raise DataError(
            f"labels must lie in 0…{probs.shape[1] - 1}, got {low}…{high}: "
            f"with classes the model does not know, pass {option('open_set', True)}"
        )
    return probs, labels


def _confidence_and_correct(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    confidence, predicted = probs.max(dim=1)
    return confidence.double(), (predicted == labels).double()


def _equal_width(confidence: Tensor) -> Tensor:
    inner = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
    return torch.bucketize(confidence, inner, right=True)
