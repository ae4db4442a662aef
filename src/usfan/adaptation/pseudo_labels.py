"""Pseudo-labels: nearest centroids, as the SHOT recipe makes them, and the Gaussians that they are a start for.

Features get a 1 appended and are scaled to length 1. Round one: centroids c_k = Σ_i p_ik φ_i / Σ_i p_ik, each sample
goes to the nearest by cosine. Round two: the same with the hard labels of round one. Classes to which at most
`threshold` samples go by the point estimate get no centroid.

Gaussians: a mixture of K of them, of equal weight, with one covariance Σ, fitted to the same features by EM from those
labels. Nearness is then Mahalanobis': directions in which a class is wide count less. Σ is drawn to a multiple of the
identity as far as Ledoit and Wolf have it (2004), by a lot for few samples.

Shapes: N samples, K classes, D features. `total` sums over processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.posterior.fit import append_one
from usfan.scoring.objectives import Total, alone

GAUSSIAN_ROUNDS = 5
"""Rounds of EM."""


def unit_features(features: Tensor) -> Tensor:
    """[z, 1] scaled to length 1."""
    return torch.nn.functional.normalize(append_one(features.float()), dim=1)


def centroids(features: Tensor, assignment: Tensor, total: Total = alone) -> Tensor:
    """K × D' means of the features under the assignment N×K, at unit length."""
    sums, counts = total(assignment.T @ features), total(assignment.sum(dim=0))
    return torch.nn.functional.normalize(sums / (counts[:, None] + 1e-8), dim=1)


def shrunk(scatter: Tensor, fourth: Tensor, count: Tensor) -> Tensor:
    """Ledoit and Wolf's covariance from the plain one, Σ_i w_i |x_i|⁴ and Σ_i w_i of the residuals x."""
    D = scatter.shape[0]
    even = scatter.diagonal().mean() * torch.eye(D, dtype=scatter.dtype, device=scatter.device)
    away = (scatter - even).square().sum()
    noise = (fourth / count - scatter.square().sum()) / count
    share = (noise / away.clamp_min(torch.finfo(scatter.dtype).tiny)).clamp(0, 1)
    return (1 - share) * scatter + share * even


def nearest_gaussian(features: Tensor, labels: Tensor, classes: int, *, mask: Tensor | None = None) -> Tensor:
    """N labels by Gaussians with one covariance, EM from `labels`. A class without a sample there gets none here."""
    phi = unit_features(features).double()
    keep = torch.ones(len(phi), dtype=phi.dtype, device=phi.device) if mask is None else mask.double()
    phi = phi - (keep @ phi) / keep.sum().clamp_min(1)
    share = torch.nn.functional.one_hot(labels.long(), classes).to(phi)
    missing = (share * keep[:, None]).sum(dim=0) == 0
    for _ in range(GAUSSIAN_ROUNDS):
        share = share * keep[:, None]
        counts = share.sum(dim=0)
        means = share.T @ phi / counts.clamp_min(1e-8)[:, None]
        scatter = (phi.T @ (keep[:, None] * phi) - means.T @ (counts[:, None] * means)) / counts.sum().clamp_min(1)
        distances = torch.cdist(phi, means).square()
        fourth = (share * distances.square()).sum()
        covariance = shrunk(scatter, fourth, counts.sum().clamp_min(1))
        covariance.diagonal().add_(covariance.diagonal().mean() * 1e-6 + 1e-12)
        directions = torch.linalg.solve(covariance, means.T)
        scores = phi @ directions - 0.5 * (means.T * directions).sum(dim=0)
        share = scores.masked_fill(missing, -torch.inf).softmax(dim=1)
    return labels if bool(missing.all()) else share.argmax(dim=1)


def nearest_centroid(
    features: Tensor,
    probs: Tensor,
    *,
    threshold: int = 0,
    mask: Tensor | None = None,
    rounds: int = 2,
    total: Total = alone,
) -> Tensor:
    """N labels. Where `mask` is 0 a sample has no part in the centroids (open set), though it too gets a label."""
    classes = probs.shape[1]
    phi, probs = unit_features(features), probs.float()
    keep = torch.ones(len(probs), device=probs.device) if mask is None else mask.float()
    counts = total((torch.nn.functional.one_hot(probs.argmax(dim=1), classes) * keep[:, None]).sum(dim=0))
    missing = counts <= threshold
    if bool(missing.all()):
        return probs.argmax(dim=1)
    assignment = probs * keep[:, None]
    labels = probs.argmax(dim=1)
    for _ in range(rounds):
        similarity = phi @ centroids(phi, assignment, total).T
        labels = similarity.masked_fill(missing, -torch.inf).argmax(dim=1)
        assignment = torch.nn.functional.one_hot(labels, classes).float() * keep[:, None]
    return labels
