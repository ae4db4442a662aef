"""Nearest-centroid pseudo-labels, as the SHOT recipe makes them.

Features get a 1 appended and are scaled to length 1. Round one: centroids c_k = Σ_i p_ik φ_i / Σ_i p_ik, each sample
goes to the nearest by cosine. Round two: the same with the hard labels of round one. Classes to which at most
`threshold` samples go by the point estimate get no centroid, in round two by the labels of round one.

Shapes: N samples, K classes, D features, D' = D + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from usfan.maths.neighbours import unit_features


def centroids(features: Tensor, assignment: Tensor) -> Tensor:
    """K × D' means of the features under the assignment N×K, at unit length."""
    sizes = assignment.sum(dim=0)[:, None]
    means = assignment.T @ features / (sizes + 1e-8)
    return normalize(means, dim=1)


def nearest_centroid(
    features: Tensor,
    probs: Tensor,
    *,
    threshold: int = 0,
    mask: Tensor | None = None,
    rounds: int = 2,
) -> Tensor:
    """N labels. Samples whose `mask` is 0 (open set) do not count for the centroids, but get a label too."""
    classes = probs.shape[1]
    phi = unit_features(features)
    probs = probs.float()
    if mask is None:
        mask = torch.ones(len(probs), device=probs.device)
    weights = mask.float()[:, None]
    labels = probs.argmax(dim=1)
    assignment = probs * weights
    for _ in range(rounds):
        counts = (one_hot(labels, classes) * weights).sum(dim=0)
        missing = counts <= threshold
        if bool(missing.all()):
            return labels
        similarity = phi @ centroids(phi, assignment).T
        labels = similarity.masked_fill(missing, -torch.inf).argmax(dim=1)
        assignment = one_hot(labels, classes).float() * weights
    return labels
