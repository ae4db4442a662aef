"""A mixture whose clusters are seen by a witness and named by the source model.

A frozen pretrained network (the witness) shows target image i as a vector u_i. The source model shows it as names
ℓ_ik = log p(k | i). The class z_i is unknown:

    p(z_i = k | names) = g_ik = softmax_k(λ ℓ_ik + b_k)              the gate
    p(u_i | z_i = k)   = N(u_i; μ_k, Σ)                               one cluster per class, one covariance for all

λ ≥ 0 says how far the names can be trusted on this target, b_k corrects the class shares of the source; both are
fitted, not set. There may be C more clusters that no class names, for images of new classes: k = K+1 … K+C with
ℓ_ik = −log K, the value of a name that says nothing. With r_ik = p(z_i = k | u_i, names), EM lowers the free energy

    F = −Σ_i log Σ_k g_ik p(u_i | k) + ½ρ‖b‖² + ½τ Σ_k μ_kᵀΣ⁻¹μ_k + ½ν (log|Σ| + s² tr Σ⁻¹)

whose last three terms are priors worth ρ images per class for the shares (1, or 0.01 if classes may be missing), τ = 1
image at the origin for each mean and ν = D images for the covariance (s² = mean square of u). Each round

    r_ik ∝ g_ik p(u_i | k)
    μ_k = Σ_i r_ik u_i / (n_k + τ),   n_k = Σ_i r_ik
    Σ   = (Σ_ik r_ik u_i u_iᵀ − Σ_k (n_k + τ) μ_k μ_kᵀ + ν s² I) / (Σ_k n_k + ν)
    λ, b: Newton steps on Σ_ik r_ik log g_ik − ½ρ‖b‖² (concave), halved until it does not fall

never raises F, so F is the one number to watch. A round costs O(N D (D + K) + N K²), memory is O(N (D + K)).

Shapes: N samples, K classes, C clusters without a name, K' = K + C, D dimensions of the witness space, W width of the
witness's features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from usfan.errors import UsfanError

CHUNK = 16384
"""Rows that are worked on at once."""
EVEN_PRIOR, UNEVEN_PRIOR = 1.0, 0.01
"""ρ if all classes are expected in equal shares, and if some may be rare or missing."""
PRIOR_MEAN = 1.0
"""τ: one image at the origin."""
TINY_NAME = 1e-12
"""Floor of a name's probability."""


@dataclass(frozen=True, eq=False)
class WitnessSpace:
    """u = Vᵀ(normalise(normalise(f) − m) − m'): principal directions of the centred, normalised features."""

    first_mean: Tensor
    """m, W: mean of the normalised features."""
    second_mean: Tensor
    """m', W: mean after the second normalisation."""
    basis: Tensor
    """V, W × D, the directions of largest variance first."""

    def centred(self, features: Tensor) -> Tensor:
        """N × W unit vectors: what neighbours are searched in."""
        return F.normalize(F.normalize(features.to(self.first_mean), dim=1) - self.first_mean, dim=1)

    def project(self, features: Tensor) -> Tensor:
        """N × W features → N × D."""
        return (self.centred(features) - self.second_mean) @ self.basis


@torch.no_grad()
def centred_features(features: Tensor) -> tuple[Tensor, Tensor]:
    """N × W unit vectors, normalised, centred and normalised again, and the mean m that was taken off."""
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    for part in features.split(CHUNK):
        total += F.normalize(part.float(), dim=1).double().sum(0)
    mean = (total / len(features)).float()
    return F.normalize(F.normalize(features.float(), dim=1) - mean, dim=1), mean


@torch.no_grad()
def fit_witness_space(features: Tensor, dimensions: int = 64) -> WitnessSpace:
    """From the witness's features of the target, N × W."""
    dimensions = min(dimensions, features.shape[1], len(features) - 1)
    unit, first = centred_features(features)
    second = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    for part in unit.split(CHUNK):
        second += part.double().sum(0)
    second = second / len(features)
    return WitnessSpace(first, second.float(), first_directions(unit - second.float(), dimensions))


def first_directions(centred: Tensor, dimensions: int, rounds: int = 4) -> Tensor:
    """W × D: the first principal directions of N × W centred features, by subspace iteration. Close to exact, and a
    tenth of the time of a W × W decomposition."""
    width = min(dimensions + 32, *centred.shape)
    start = torch.randn(centred.shape[1], width, generator=torch.Generator().manual_seed(0)).to(centred.device)
    for _ in range(rounds):
        start = torch.linalg.qr(centred.T @ (centred @ start))[0]
    seen = centred @ start
    _, turn = torch.linalg.eigh((seen.T @ seen).double())
    found: Tensor = start @ turn[:, -dimensions:].flip(1).float()
    return found.contiguous()


@dataclass(frozen=True, eq=False)
class Mixture:
    """The fitted parameters, float64. One image alone can be judged with them (`log_joint`)."""

    means: Tensor
    """μ, K' × D."""
    cholesky: Tensor
    """Lower factor of Σ, D × D."""
    reliability: float
    """λ."""
    bias: Tensor
    """b, K'."""


@dataclass(frozen=True, eq=False)
class Fit:
    mixture: Mixture
    responsibilities: Tensor
    """r, N × K', float32; clusters without a name come last."""
    free_energy: list[float]
    """F / N after each round; never rises."""

    @property
    def shares(self) -> Tensor:
        """π̂, K': the mean responsibility."""
        return self.responsibilities.double().mean(0).float()


def gate_logits(log_names: Tensor, reliability: float, bias: Tensor) -> Tensor:
    """λ ℓ + b, B × K', float64; entries of the bias beyond the names are clusters without a name."""
    names = log_names.double().clamp_min(math.log(TINY_NAME))
    more = len(bias) - names.shape[1]
    if more:
        names = torch.cat([names, names.new_full((len(names), more), -math.log(names.shape[1]))], dim=1)
    return reliability * names + bias


def log_normal(points: Tensor, means: Tensor, cholesky: Tensor) -> Tensor:
    """log N(u; μ_k, LLᵀ) up to −½ D log 2π, B × K."""
    white = torch.linalg.solve_triangular(cholesky, points.T, upper=False).T
    white_means = torch.linalg.solve_triangular(cholesky, means.T, upper=False).T
    square: Tensor = white.square().sum(1, keepdim=True) - 2 * white @ white_means.T + white_means.square().sum(1)
    return -0.5 * square.clamp_min(0) - cholesky.diagonal().log().sum()


def log_joint(mixture: Mixture, points: Tensor, log_names: Tensor) -> Tensor:
    """log g_ik + log p(u_i | k), B × K', float64: softmax gives r, logsumexp the log-likelihood of each image."""
    gate = gate_logits(log_names, mixture.reliability, mixture.bias).log_softmax(1)
    return gate + log_normal(points.double(), mixture.means, mixture.cholesky)


@torch.no_grad()
def responsibilities(mixture: Mixture, points: Tensor, log_names: Tensor) -> Tensor:
    """r, N × K', float32."""
    parts = [log_joint(mixture, u, names).softmax(1).float() for u, names in _chunks(points, log_names)]
    return torch.cat(parts)


@torch.no_grad()
def fit_mixture(
    points: Tensor,
    log_names: Tensor,
    *,
    start: Mixture | None = None,
    begin: Tensor | None = None,
    prior: float = EVEN_PRIOR,
    rounds: int = 20,
    tolerance: float = 1e-5,
) -> Fit:
    """EM from the names, from an earlier mixture's gate, or from given responsibilities (`begin`, N × K', which may
    have columns for clusters without a name). Stops after `rounds`, or if F / N falls by less than `tolerance`.
    `prior` is ρ."""
    check_inputs(points, log_names)
    count, dimensions = points.shape
    square = sum(float(part.double().square().sum()) for part in points.split(CHUNK))
    spread = max(square / (count * dimensions), 1e-12)  # 0 if all images are the same
    columns = log_names.shape[1] if begin is None else begin.shape[1]
    reliability = start.reliability if start else 1.0
    bias = start.bias if start else torch.zeros(columns, dtype=torch.float64, device=points.device)
    if begin is None:
        begin = torch.cat([gate_logits(names, reliability, bias).softmax(1).float() for (names,) in _chunks(log_names)])
    r = begin
    history: list[float] = []
    mixture = start
    for _ in range(rounds):
        means, covariance = update_clusters(points, r, spread)
        reliability, bias = update_gate(log_names, r, reliability, bias, prior)
        mixture = Mixture(means, torch.linalg.cholesky(covariance), reliability, bias)
        r, likelihood = expectation(mixture, points, log_names)
        energy = (prior_energy(mixture, spread, prior) - likelihood) / count
        history.append(energy)
        if len(history) > 1 and history[-2] - energy < tolerance:
            break
    assert mixture is not None
    return Fit(mixture, r, history)


def expectation(mixture: Mixture, points: Tensor, log_names: Tensor) -> tuple[Tensor, float]:
    """r, N × K' float32, and Σ_i log Σ_k g_ik p(u_i | k)."""
    parts, likelihood = [], 0.0
    for u, names in _chunks(points, log_names):
        joint = log_joint(mixture, u, names)
        parts.append(joint.softmax(1).float())
        likelihood += float(joint.logsumexp(1).sum())
    return torch.cat(parts), likelihood


def update_clusters(points: Tensor, r: Tensor, spread: float) -> tuple[Tensor, Tensor]:
    """μ (K' × D) and Σ (D × D) from the responsibilities, N × K'."""
    dimensions = points.shape[1]
    mass = torch.zeros(r.shape[1], dtype=torch.float64, device=points.device)
    first = torch.zeros(r.shape[1], dimensions, dtype=torch.float64, device=points.device)
    second = torch.zeros(dimensions, dimensions, dtype=torch.float64, device=points.device)
    for u, part in _chunks(points, r):
        u, part = u.double(), part.double()
        mass += part.sum(0)
        first += part.T @ u
        second += (u * part.sum(1, keepdim=True)).T @ u
    means = first / (mass + PRIOR_MEAN)[:, None]
    scatter = second - means.T @ ((mass + PRIOR_MEAN)[:, None] * means)
    eye = torch.eye(dimensions, dtype=torch.float64, device=points.device)
    covariance = (scatter + dimensions * spread * eye) / (mass.sum() + dimensions)
    return means, 0.5 * (covariance + covariance.T)


def update_gate(
    log_names: Tensor, r: Tensor, reliability: float, bias: Tensor, prior: float = EVEN_PRIOR
) -> tuple[float, Tensor]:
    """λ and b by two damped Newton steps on the concave Σ r log g − ½ρ‖b‖²."""
    value = gate_objective(log_names, r, reliability, bias, prior)
    for _ in range(2):
        gradient, hessian = gate_derivatives(log_names, r, reliability, bias, prior)
        step = torch.linalg.solve(hessian, gradient)
        length = 1.0
        for _ in range(12):
            tried = max(reliability + length * float(step[0]), 0.0), bias + length * step[1:]
            tried_value = gate_objective(log_names, r, *tried, prior)
            if tried_value >= value:
                (reliability, bias), value = tried, tried_value
                break
            length /= 2
        else:
            break
    return reliability, bias


def gate_objective(log_names: Tensor, r: Tensor, reliability: float, bias: Tensor, prior: float = EVEN_PRIOR) -> float:
    total = -0.5 * prior * float(bias.square().sum())
    for names, part in _chunks(log_names, r):
        total += float((part.double() * gate_logits(names, reliability, bias).log_softmax(1)).sum())
    return total


def gate_derivatives(
    log_names: Tensor, r: Tensor, reliability: float, bias: Tensor, prior: float = EVEN_PRIOR
) -> tuple[Tensor, Tensor]:
    """Gradient (1 + K') and negative Hessian of the gate's objective, λ first."""
    size = len(bias)
    gradient = torch.zeros(1 + size, dtype=torch.float64, device=r.device)
    hessian = torch.zeros(1 + size, 1 + size, dtype=torch.float64, device=r.device)
    zero = torch.zeros_like(bias)
    for names, part in _chunks(log_names, r):
        evidence = gate_logits(names, 1.0, zero)
        gate = (reliability * evidence + bias).softmax(1)
        rest = part.double() - gate
        spread = gate * (evidence - (gate * evidence).sum(1, keepdim=True))
        gradient[0] += (rest * evidence).sum()
        gradient[1:] += rest.sum(0)
        hessian[0, 0] += (spread * evidence).sum()
        hessian[0, 1:] += spread.sum(0)
        hessian[1:, 1:] += torch.diag(gate.sum(0)) - gate.T @ gate
    gradient[1:] -= prior * bias
    hessian[1:, 0] = hessian[0, 1:]
    hessian.diagonal()[0] += 1e-6
    hessian.diagonal()[1:] += prior
    return gradient, hessian


def prior_energy(mixture: Mixture, spread: float, prior: float = EVEN_PRIOR) -> float:
    """The three priors' part of F."""
    dimensions = mixture.means.shape[1]
    white = torch.linalg.solve_triangular(mixture.cholesky, mixture.means.T, upper=False)
    log_determinant = 2 * float(mixture.cholesky.diagonal().log().sum())
    trace = float(torch.cholesky_inverse(mixture.cholesky).trace())
    return (
        0.5 * prior * float(mixture.bias.square().sum())
        + 0.5 * PRIOR_MEAN * float(white.square().sum())
        + 0.5 * dimensions * (log_determinant + spread * trace)
    )


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


def check_inputs(points: Tensor, log_names: Tensor) -> None:
    if points.ndim != 2 or log_names.ndim != 2 or len(points) != len(log_names):
        shapes = f"{tuple(points.shape)} and {tuple(log_names.shape)}"
        raise UsfanError(f"points must be N×D and log_names N×K with the same N; got {shapes}")
    if len(points) < 2 or log_names.shape[1] < 2:
        raise UsfanError(f"a mixture needs at least two samples and two classes; got {tuple(log_names.shape)}")
    if not bool(torch.isfinite(points).all()):
        raise UsfanError("the witness's features are not finite numbers: check its weights and its input")
    if bool(torch.isnan(log_names).any()):
        raise UsfanError("the source model's predictions are not numbers: check where it comes from")
