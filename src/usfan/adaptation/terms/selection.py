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
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(classes):
        members = (labels == label).nonzero()[:, 0]
        count = int(share * len(members) + 1e-6)
        best = scores[members].argsort(descending=True, stable=True)[:count]
        chosen[members[best]] = True
    return chosen
