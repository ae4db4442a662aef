"""The posterior of a last layer with every matrix written out, in float64: slow, and plain to read.

θ is the K × D' matrix [W, b], flattened row by row, so that a Kronecker product reads (classes) ⊗ (features).

Shapes: N samples, K classes, D features, D' = D + 1 with a bias, P = K·D' parameters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian


def extended(features: Tensor, bias: bool = True) -> Tensor:
    """φ = [z, 1], one sample at a time."""
    one = torch.ones(1, dtype=torch.float64)
    return torch.stack([torch.cat([z.double(), one]) if bias else z.double() for z in features])


def parameters(weight: Tensor, bias: Tensor | None) -> Tensor:
    """θ, K × D'."""
    return (
        weight.double()
        if bias is None
        else torch.cat([weight.double(), bias.double()[:, None]], dim=1)
    )


def factors(features: Tensor, logits: Tensor, bias: bool = True) -> tuple[Tensor, Tensor]:
    """A = N⁻¹ Σ φφᵀ and B = Σ (diag(p) − ppᵀ), summed sample by sample."""
    phis = extended(features, bias)
    probs = logits.double().softmax(dim=1)
    a = sum(torch.outer(phi, phi) for phi in phis) / len(phis)
    b = sum(torch.diag(p) - torch.outer(p, p) for p in probs)
    return a, b


def ggn(theta: Tensor, phis: Tensor) -> Tensor:
    """Σ Jᵀ (∂²ℓ/∂f²) J by automatic differentiation, P × P: J = ∂f/∂θ of the logits f, ℓ the cross-entropy."""
    total = torch.zeros(theta.numel(), theta.numel(), dtype=torch.float64)
    for phi in phis:
        slopes = jacobian(lambda t, phi=phi: t @ phi, theta).flatten(start_dim=1)
        curvature = hessian(lambda f: f.logsumexp(dim=0) - f[0], theta @ phi)
        total += slopes.T @ curvature @ slopes
    return total


def authors_precision(features: Tensor, logits: Tensor, variance: float, bias: bool) -> Tensor:
    """H of U-SFAN's published program, P × P: the Kronecker factors of the mean loss are means over the samples, and
    the root of the prior precision 1 / variance stands beside each of them."""
    phis = extended(features, bias)
    probs = logits.double().softmax(dim=1)
    a = torch.stack([torch.outer(phi, phi) for phi in phis]).mean(dim=0)
    b = torch.stack([torch.diag(p) - torch.outer(p, p) for p in probs]).mean(dim=0)
    root = math.sqrt(1 / variance)
    for factor in (a, b):
        factor.diagonal().add_(root)
    return torch.kron(b, a)


def precision(a: Tensor, b: Tensor, delta: float, damping: str = "exact") -> Tensor:
    """H, P × P: B ⊗ A + δI, or (B + √δ I) ⊗ (A + √δ I)."""
    if damping == "exact":
        return torch.kron(b, a) + delta * torch.eye(len(a) * len(b), dtype=torch.float64)
    root = math.sqrt(delta)
    return torch.kron(b + root * torch.eye(len(b)), a + root * torch.eye(len(a)))


def logit_variance(phis: Tensor, covariance: Tensor, classes: int) -> Tensor:
    """J Σ Jᵀ with J = I ⊗ φᵀ, B × K × K."""
    jacobians = torch.stack(
        [torch.kron(torch.eye(classes, dtype=torch.float64), phi[None, :]) for phi in phis]
    )
    return jacobians @ covariance @ jacobians.mT


def log_evidence(hessian_of_data: Tensor, theta: Tensor, delta: float) -> float:
    """log p(D | δ) − log p(D | θ): the prior's density at θ, times the volume of the posterior, by log-determinant."""
    size = theta.numel()
    log_prior = 0.5 * size * math.log(delta / (2 * math.pi)) - 0.5 * delta * float(
        theta.square().sum()
    )
    sign, log_det = torch.linalg.slogdet(
        hessian_of_data + delta * torch.eye(size, dtype=torch.float64)
    )
    if sign <= 0:
        raise ArithmeticError("the precision of the posterior is not positive definite")
    return log_prior + 0.5 * size * math.log(2 * math.pi) - 0.5 * float(log_det)


def theta_predictive(
    theta: Tensor,
    precision: Tensor,
    phis: Tensor,
    temperature: float,
    samples: int,
    generator: torch.Generator,
) -> Tensor:
    """softmax(θ_m φ / τ) for M draws θ_m ~ N(θ, H⁻¹) of all the weights, M × B × K."""
    factor = torch.linalg.cholesky(precision)
    noise = torch.randn(theta.numel(), samples, generator=generator, dtype=torch.float64)
    moved = torch.linalg.solve_triangular(factor.mT, noise, upper=True).T.reshape(
        samples, *theta.shape
    )
    return (torch.einsum("mkd,bd->mbk", theta + moved, phis) / temperature).softmax(dim=-1)
