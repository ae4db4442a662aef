"""The posterior of the last layer with its full covariance instead of Kronecker factors: another kind of `Uncertainty`.

    p(θ | D) ≈ N(θ_MAP, (Σ_i φ_i φ_iᵀ ⊗ (diag(p_i) − p_i p_iᵀ) + δI)⁻¹)      the exact last-layer GGN

Shapes: N samples, B batch, K classes, D' = D + 1 with a bias, M draws. θ is D' × K, flattened row by row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.posterior.fit import append_one
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import certainty_weights, sobol_normal

CHUNK = 256
"""Samples whose K × K covariances are made at a time."""


@dataclass(frozen=True, eq=False)
class FullPosterior:
    """With the prior precision that maximises the evidence of the Kronecker factors."""

    kind = "full"

    covariance: Tensor
    """D' × K × D' × K."""
    head: KroneckerPosterior
    """The posterior by factors: the layer itself and the prior are taken from it."""

    @classmethod
    def fit(cls, features: Tensor, logits: Tensor, posterior: KroneckerPosterior) -> FullPosterior:
        """From features N×D and logits N×K of all the data."""
        phi = (append_one(features) if posterior.bias is not None else features).double()
        p = logits.double().softmax(dim=1)
        curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        D, K = phi.shape[1], p.shape[1]
        outer = (phi[:, :, None] * phi[:, None, :]).flatten(1)
        total = (outer.T @ curvature.flatten(1)).view(D, D, K, K).permute(0, 2, 1, 3).reshape(D * K, D * K)
        total.diagonal().add_(posterior.prior_precision)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(total)).to(posterior.weight).view(D, K, D, K)
        return cls(covariance, posterior)

    @property
    def prior_precision(self) -> float:
        return self.head.prior_precision

    def to(self, device: Any = None) -> FullPosterior:
        return dataclasses.replace(self, covariance=self.covariance.to(device), head=self.head.to(device))

    def extended(self, features: Tensor) -> Tensor:
        return append_one(features) if self.head.bias is not None else features

    @torch.no_grad()
    def moments(self, features: Tensor, temperature: float = 0.4, samples: int = 128) -> tuple[Tensor, Tensor]:
        """The predictive B × K, and its mutual information B."""
        mean, phi = self.head.logits(features), self.extended(features)
        draws = sobol_normal(samples, mean.shape[1]).to(mean)
        D, K = phi.shape[1], mean.shape[1]
        table = self.covariance.permute(0, 2, 1, 3).reshape(D * D, K * K)
        probs, entropies = [], []
        for z, f in zip(phi.split(CHUNK), mean.split(CHUNK), strict=True):
            variance = ((z[:, :, None] * z[:, None, :]).flatten(1) @ table).view(-1, K, K)
            values, vectors = torch.linalg.eigh(variance)
            root = vectors * values.clamp_min(0).sqrt()[:, None, :]
            p = ((f[:, None, :] + torch.einsum("mk,blk->bml", draws, root)) / temperature).softmax(dim=-1)
            probs.append(p.mean(dim=1))
            entropies.append(-torch.xlogy(p, p).sum(dim=-1).mean(dim=1))
        found = torch.cat(probs)
        return found, (-torch.xlogy(found, found).sum(dim=1) - torch.cat(entropies)).clamp_min(0)

    def predictive(self, features: Tensor, temperature: float = 0.4, samples: int = 128) -> Tensor:
        return self.moments(features, temperature, samples)[0]

    def certainty(self, features: Tensor, temperature: float = 0.4, samples: int = 128) -> Tensor:
        return certainty_weights(self.predictive(features, temperature, samples))

    @torch.no_grad()
    def draws(self, features: Tensor, samples: int = 8, seed: int = 2022) -> Tensor:
        """B × M × K logits under M heads drawn from the posterior, the same heads for every sample."""
        D, K = self.covariance.shape[:2]
        factor = torch.linalg.cholesky(self.covariance.reshape(D * K, D * K).double())
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(samples, D * K, generator=generator, dtype=torch.float64).to(factor)
        moved = (noise @ factor.T).view(samples, D, K).to(features)
        return self.head.logits(features)[:, None] + torch.einsum("bd,mdk->bmk", self.extended(features), moved)
