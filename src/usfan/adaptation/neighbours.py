"""Neighbours in the target: what the certain ones nearby say about an uncertain sample.

With unit features φ and k nearest neighbours N(i) by cosine, similarity s_ij, certainty w_j and prediction p_j:

    q_i = Σ_{j∈N(i)} s_ij w_j p_j / Σ_{j∈N(i)} s_ij w_j                       one hop
    F ← α S F + (1 − α) Y,  Y_j = w_j p_j,  S the row-normalised similarities   propagation: many hops

Certain samples are the seeds; an uncertain one, however far from its class in the source's eyes, gets the label that
its neighbourhood agrees on.

Shapes: N samples, K classes, D features, k neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.adaptation.pseudo_labels import unit_features

CHUNK = {"cpu": 128}
"""Rows of similarities at a time, where not 512: small pieces take little memory, and a GPU wants large ones."""


def nearest_neighbours(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions N×k and similarities N×k (clamped at 0) of each sample's nearest neighbours, itself left out."""
    phi = unit_features(features)
    k = min(k, len(phi) - 1)
    places, values = [], []
    chunk = CHUNK.get(phi.device.type, 512)
    for start in range(0, len(phi), chunk):
        similarity = phi[start : start + chunk] @ phi.T
        rows = torch.arange(len(similarity), device=phi.device)
        similarity[rows, rows + start] = -torch.inf
        top = similarity.topk(k, dim=1)
        places.append(top.indices)
        values.append(top.values.clamp_min(0))
    return torch.cat(places), torch.cat(values)


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
