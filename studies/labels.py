"""Sources of pseudo-labels that were tried and did not help: propagation over neighbours, Gaussians.

With unit features φ, k nearest neighbours N(i) by cosine, similarity s_ij, certainty w_j and prediction p_j:

    q_i = Σ_{j∈N(i)} s_ij w_j p_j / Σ_{j∈N(i)} s_ij w_j                       one hop
    F ← α S F + (1 − α) Y,  Y_j = w_j p_j,  S the row-normalised similarities   propagation: many hops

Gaussians: a mixture of K of them, of equal weight, with one covariance Σ, fitted to the same features by EM from
nearest-centroid labels. Σ is shrunk towards a multiple of the identity by the rule of Ledoit and Wolf (2004).

Shapes: N samples, K classes, D features, k neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.scoring.neighbours import unit_features

GAUSSIAN_ROUNDS = 5
"""Rounds of EM."""


def neighbour_targets(places: Tensor, similarities: Tensor, probs: Tensor, certainty: Tensor) -> Tensor:
    """q, N×K: the certainty-weighted mean prediction of the neighbours."""
    strength = similarities * certainty[places]
    mixed = torch.einsum("nk,nkc->nc", strength, probs[places])
    return mixed / strength.sum(dim=1, keepdim=True).clamp_min(1e-12)


def propagate(
    places: Tensor, similarities: Tensor, probs: Tensor, certainty: Tensor, *, alpha: float = 0.9, steps: int = 20
) -> Tensor:
    """F, N×K, rows summing to one: predictions spread over the neighbour graph from the certain samples."""
    links = similarities.pow(3)
    links = links / links.sum(dim=1, keepdim=True).clamp_min(1e-12)
    seeds = certainty[:, None] * probs
    spread = seeds
    for _ in range(steps):
        spread = alpha * torch.einsum("nk,nkc->nc", links, spread[places]) + (1 - alpha) * seeds
    return spread / spread.sum(dim=1, keepdim=True).clamp_min(1e-12)


def shrunk(scatter: Tensor, fourth: Tensor, count: Tensor) -> Tensor:
    """Ledoit and Wolf's covariance from the plain one, Σ_i w_i |x_i|⁴ and Σ_i w_i of the residuals x."""
    D = scatter.shape[0]
    even = scatter.diagonal().mean() * torch.eye(D, dtype=scatter.dtype, device=scatter.device)
    away = (scatter - even).square().sum()
    noise = (fourth / count - scatter.square().sum()) / count
    share = (noise / away.clamp_min(torch.finfo(scatter.dtype).tiny)).clamp(0, 1)
    return (1 - share) * scatter + share * even


def nearest_gaussian(features: Tensor, labels: Tensor, classes: int, *, mask: Tensor | None = None) -> Tensor:
    """N labels by Gaussians with a shared covariance, by EM from `labels`. A class without samples there gets none."""
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
