"""Pseudo-labels by Gaussians, which were tried and did not help.

A mixture of K Gaussians of equal weight, with one covariance Σ, is fitted to the unit features by EM from
nearest-centroid labels. Σ is shrunk towards a multiple of the identity by the rule of Ledoit and Wolf (2004).

Shapes: N samples, K classes, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.maths.neighbours import unit_features

GAUSSIAN_ROUNDS = 5
"""Rounds of EM."""


def shrunk(scatter: Tensor, fourth: Tensor, count: Tensor) -> Tensor:
    """Ledoit and Wolf's covariance from the plain one, Σ_i w_i |x_i|⁴ and Σ_i w_i of the residuals x."""
    D = scatter.shape[0]
    even = scatter.diagonal().mean() * torch.eye(D, dtype=scatter.dtype, device=scatter.device)
    away = (scatter - even).square().sum()
    noise = (fourth / count - scatter.square().sum()) / count
    share = (noise / away.clamp_min(torch.finfo(scatter.dtype).tiny)).clamp(0, 1)
    return (1 - share) * scatter + share * even


def nearest_gaussian(
    features: Tensor, labels: Tensor, classes: int, *, mask: Tensor | None = None
) -> Tensor:
    """N labels by Gaussians with a shared covariance, by EM from `labels`. A class without samples there gets none."""
    phi = unit_features(features).double()
    keep = (
        torch.ones(len(phi), dtype=phi.dtype, device=phi.device)
        if mask is None
        else mask.double()
    )
    phi = phi - (keep @ phi) / keep.sum().clamp_min(1)
    share = torch.nn.functional.one_hot(labels.long(), classes).to(phi)
    missing = (share * keep[:, None]).sum(dim=0) == 0
    for _ in range(GAUSSIAN_ROUNDS):
        share = share * keep[:, None]
        counts = share.sum(dim=0)
        means = share.T @ phi / counts.clamp_min(1e-8)[:, None]
        scatter = (
            phi.T @ (keep[:, None] * phi) - means.T @ (counts[:, None] * means)
        ) / counts.sum().clamp_min(1)
        distances = torch.cdist(phi, means).square()
        fourth = (share * distances.square()).sum()
        covariance = shrunk(scatter, fourth, counts.sum().clamp_min(1))
        covariance.diagonal().add_(covariance.diagonal().mean() * 1e-6 + 1e-12)
        directions = torch.linalg.solve(covariance, means.T)
        scores = phi @ directions - 0.5 * (means.T * directions).sum(dim=0)
        share = scores.masked_fill(missing, -torch.inf).softmax(dim=1)
    return labels if bool(missing.all()) else share.argmax(dim=1)
