"""The best samples of each class, by a score: which pseudo-labels are trusted."""

from __future__ import annotations

import torch
from torch import Tensor


def best_of_each_class(
    scores: Tensor,
    labels: Tensor,
    classes: int,
    share: float | Tensor,
) -> Tensor:
    """N booleans: true for the ⌊share · n⌋ samples of each class of n samples that have the highest scores."""
    by_score = scores.argsort(descending=True, stable=True)
    order = by_score[labels[by_score].argsort(stable=True)]  # class by class, the best first
    ordered = labels[order]
    counts = torch.bincount(labels, minlength=classes)
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(labels), device=labels.device) - first[ordered]
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    chosen[order] = rank < (share * counts + 1e-6).floor()[ordered]
    return chosen
