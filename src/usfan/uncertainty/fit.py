"""Kronecker factors of the last layer in one pass, and the prior precision by evidence.

For a softmax layer with logits Wφ, φ = [z, 1], the generalised Gauss–Newton matrix of one sample is
(diag(p) − ppᵀ) ⊗ φφᵀ. Over N samples it is approximated by B ⊗ A with

    A = N⁻¹ Σ φφᵀ             D' × D'   (D' = D + 1 with a bias, D without)
    B = Σ (diag(p) − ppᵀ)     K × K

As Σ_k p_k = 1, B_kk = Σ_{j≠k} Σ p_k p_j: B is taken from the products alone, so that nothing cancels if p ≈ 1.
So the Hessian of the negative log-posterior (Eq. 5 of the paper, H = V ⊗ U) is B ⊗ A + δI for a prior precision δ.
With eigenvalues a of A, b of B and λ = {a_d b_k}, P = D'K, the log evidence is, up to the log-likelihood,

    ½ P log δ − ½ Σ log(λ + δ) − ½ δ ‖θ‖²

Its derivative in δ is ½ (γ/δ − ‖θ‖²), γ = Σ λ/(λ + δ) the effective number of parameters. γ/δ falls strictly in δ,
so the stationary point δ = γ/‖θ‖² (MacKay's fixed point) is unique and is the maximum.

Shapes: N samples, K classes, D features.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.errors import UsfanError

CHUNK = 4096


@dataclass(frozen=True)
class Factors:
    """Sums over samples."""

    second_moment: Tensor
    """Σ φφᵀ, D' × D', float64."""
    probs_outer: Tensor
    """Σ ppᵀ, K × K, float64."""
    count: int
    """N."""
    log_likelihood: float | None = None
    """Σ log p[label], if labels were given."""

    @property
    def A(self) -> Tensor:
        return self.second_moment / self.count

    @property
    def B(self) -> Tensor:
        between = self.probs_outer - torch.diag(self.probs_outer.diagonal())
        return torch.diag(between.sum(dim=1)) - between


def append_one(features: Tensor) -> Tensor:
    """φ = [z, 1]: the bias is one more weight."""
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)


@torch.no_grad()
def batch_factors(
    features: Tensor, logits: Tensor, *, bias: bool, labels: Tensor | None = None
) -> Factors:
    """The factors of one batch. Products are taken in the input's precision (float32 at least), sums in float64."""
    check_batch(features, logits, labels)
    size = features.shape[1] + bias
    classes = logits.shape[1]
    second = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    outer = torch.zeros(classes, classes, dtype=torch.float64, device=features.device)
    likelihood = torch.zeros((), dtype=torch.float64, device=features.device)
    wide = torch.float64 if features.dtype == torch.float64 else torch.float32
    for start in range(0, len(features), CHUNK):
        z = features[start : start + CHUNK].to(wide)
        log_p = logits[start : start + CHUNK].to(wide).log_softmax(dim=1)
        phi = append_one(z) if bias else z
        p = log_p.exp()
        second += phi.T @ phi
        outer += p.T @ p
        if labels is not None:
            chosen = log_p.gather(1, labels[start : start + CHUNK, None].to(log_p.device))
            likelihood += chosen.sum(dtype=torch.float64)
    return Factors(second, outer, len(features), None if labels is None else float(likelihood))


def check_batch(features: Tensor, logits: Tensor, labels: Tensor | None) -> None:
    shapes = f"{tuple(features.shape)} and {tuple(logits.shape)}"
    if features.ndim != 2 or logits.ndim != 2 or len(features) != len(logits):
        raise UsfanError(f"features must be N×D and logits N×K with the same N; got {shapes}")
    if len(features) == 0 or logits.shape[1] < 2:
        raise UsfanError(
            f"a posterior needs at least one sample and at least two classes; got {shapes}"
        )
    for name, values in (("features", features), ("logits", logits)):
        if not values.is_floating_point() or not bool(values.isfinite().all()):
            raise UsfanError(
                f"{name} must be finite floating-point numbers; got {values.dtype}, or NaN or infinity in them: "
                "check the model and its input"
            )
    if labels is None:
        return
    last = logits.shape[1] - 1
    if labels.shape != features.shape[:1] or labels.is_floating_point():
        raise UsfanError(
            f"labels must hold one class index per sample ({len(features)}); "
            f"got {labels.dtype} of {tuple(labels.shape)}"
        )
    if bool((labels < 0).any() | (labels > last).any()):
        raise UsfanError(f"labels must be class indices from 0 to {last}")


def check_layer(factors: Factors, weight: Tensor, bias: Tensor | None) -> None:
    classes = len(factors.probs_outer)
    width = len(factors.second_moment) - (bias is not None)
    if weight.shape != (classes, width):
        raise UsfanError(
            f"weight must be K×D = {classes}×{width} for these features and logits; got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != (classes,):
        raise UsfanError(f"bias must hold {classes} values; got {tuple(bias.shape)}")
    if not bool(factors.second_moment.isfinite().all()):
        raise UsfanError(
            "the features are so large that their squares overflow: scale them, or give float64"
        )
    if not math.isfinite(square_norm(weight, bias)):
        raise UsfanError("the weights of the last layer hold NaN or infinity")


def square_norm(weight: Tensor, bias: Tensor | None) -> float:
    """‖θ‖²."""
    total = weight.detach().double().square().sum()
    if bias is not None:
        total = total + bias.detach().double().square().sum()
    return float(total)


def log_evidence(eigenvalues: Tensor, precision: float, square_norm: float) -> float:
    """The log evidence up to the log-likelihood; `eigenvalues` are the λ = a_d b_k, in any shape."""
    return 0.5 * (
        eigenvalues.numel() * math.log(precision)
        - float(torch.log(eigenvalues + precision).sum())
        - precision * square_norm
    )


def evidence_precision(eigenvalues: Tensor, square_norm: float) -> float:
    """The δ that maximises the evidence: the root of γ(δ)/δ = ‖θ‖², by bisection on log δ."""
    if square_norm <= 0:
        raise UsfanError(
            "all weights of the last layer are zero: the evidence has no maximum; give the prior as a number"
        )
    low = math.log(1e-12)
    high = math.log(1e15)
    for _ in range(70):
        middle = 0.5 * (low + high)
        delta = math.exp(middle)
        if float((eigenvalues / (eigenvalues + delta)).sum()) / delta > square_norm:
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))


def choose_precision(
    prior: float | str,
    eigenvalues: Tensor,
    square_norm: float,
    count: int,
    weight_decay: float | None,
) -> float:
    """A prior as users name it: a positive number, "evidence", or "weight-decay" (N × the training's weight decay)."""
    if prior == "evidence":
        return evidence_precision(eigenvalues, square_norm)
    if prior == "weight-decay":
        if weight_decay is None or not 0 < weight_decay < math.inf:
            raise UsfanError(
                'prior="weight-decay" needs weight_decay, a positive number: the one used in the training'
            )
        return count * weight_decay
    if not isinstance(prior, numbers.Real) or not 0 < float(prior) < math.inf:
        raise UsfanError(
            f'prior must be a positive number, "evidence" or "weight-decay"; got {prior!r}'
        )
    return float(prior)
