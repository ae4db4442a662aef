"""A Gaussian mixture of the target's images in a witness's features, with clusters that the source model names.

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

never raises F, so F is the one number to watch. An image with a user's label y has r_iy = 1 and −log g_iy p(u_i | y) in
F; one that the user calls new has r_ik = 0 for named clusters. A round costs O(N D (D + K) + N K²), memory is
O(N (D + K)).

Shapes: N samples, K classes, C clusters without a name, K' = K + C, D dimensions of the witness space, W width of the
witness's features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from usfan.errors import UsfanError
from usfan.maths.user_labels import UserLabels

CHUNK = 16384
"""Rows that are worked on at once."""
EVEN_PRIOR = 1.0
UNEVEN_PRIOR = 0.01
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
        """N × W unit vectors, in which neighbours are searched."""
        unit = normalize(features.to(self.first_mean), dim=1)
        return normalize(unit - self.first_mean, dim=1)

    def project(self, features: Tensor) -> Tensor:
        """N × W features → N × D."""
        return (self.centred(features) - self.second_mean) @ self.basis


@torch.no_grad()
def centred_features(features: Tensor) -> tuple[Tensor, Tensor]:
    """N × W unit vectors, normalised, centred and normalised again, and the mean m that was subtracted."""
    unit = normalize(features.float(), dim=1)
    mean = mean_row(unit)
    return normalize(unit - mean, dim=1), mean


def mean_row(rows: Tensor) -> Tensor:
    """The mean of N × W rows, summed in float64."""
    total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
    for part in rows.split(CHUNK):
        total += part.double().sum(0)
    return (total / len(rows)).float()


@torch.no_grad()
def fit_witness_space(features: Tensor, dimensions: int = 64) -> WitnessSpace:
    """From the witness's features of the target, N × W."""
    dimensions = min(dimensions, features.shape[1], len(features) - 1)
    unit, first_mean = centred_features(features)
    second_mean = mean_row(unit)
    basis = first_directions(unit - second_mean, dimensions)
    return WitnessSpace(first_mean, second_mean, basis)


def first_directions(
    centred: Tensor,
    dimensions: int,
    rounds: int = 4,
) -> Tensor:
    """W × D: the first principal directions of N × W centred features, by subspace iteration. Close to exact, and a
    tenth of the time of a W × W decomposition."""
    width = min(dimensions + 32, *centred.shape)
    generator = torch.Generator().manual_seed(0)
    subspace = torch.randn(centred.shape[1], width, generator=generator)
    subspace = subspace.to(centred.device)
    for _ in range(rounds):
        subspace = torch.linalg.qr(centred.T @ (centred @ subspace))[0]
    projected = centred @ subspace
    _, turn = torch.linalg.eigh((projected.T @ projected).double())
    directions: Tensor = subspace @ turn[:, -dimensions:].flip(1).float()
    return directions.contiguous()


@dataclass(frozen=True, eq=False)
class Mixture:
    """The fitted parameters, float64. One image alone can be judged with them (`log_joint`)."""

    means: Tensor
    """μ, K' × D."""
    cholesky: Tensor
    """Lower factor of Σ, D × D."""
    gate: Tensor
    """λ and b, 1 + K'."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted mixture, and its clusters' shares in each image."""

    mixture: Mixture
    responsibilities: Tensor
    """r, N × K', float32; clusters without a name come last."""
    free_energy: list[float]
    """F / N after each round; never rises."""
    energies: Tensor
    """N: the part of each image in F; priors have none."""

    @property
    def shares(self) -> Tensor:
        """π̂, K': the mean responsibility."""
        return self.responsibilities.double().mean(0).float()


def gate_evidence(log_names: Tensor, clusters: int) -> Tensor:
    """ℓ, B × K', float64; clusters beyond the names have the evidence of a name that says nothing."""
    names = log_names.double().clamp_min(math.log(TINY_NAME))
    classes = names.shape[1]
    return pad(names, (0, clusters - classes), value=-math.log(classes))


def gate_logits(log_names: Tensor, gate: Tensor) -> Tensor:
    """λ ℓ + b, B × K', float64."""
    bias = gate[1:]
    return gate[0] * gate_evidence(log_names, len(bias)) + bias


def log_normal(
    points: Tensor,
    means: Tensor,
    cholesky: Tensor,
) -> Tensor:
    """log N(u; μ_k, LLᵀ) up to −½ D log 2π, B × K."""
    white = torch.linalg.solve_triangular(cholesky, points.T, upper=False).T
    white_means = torch.linalg.solve_triangular(cholesky, means.T, upper=False).T
    square: Tensor = white.square().sum(1, keepdim=True) - 2 * white @ white_means.T
    square = square + white_means.square().sum(1)
    half_log_determinant = cholesky.diagonal().log().sum()
    return -0.5 * square.clamp_min(0) - half_log_determinant


def log_joint(
    mixture: Mixture,
    points: Tensor,
    log_names: Tensor,
) -> Tensor:
    """log g_ik + log p(u_i | k), B × K', float64: softmax gives r, logsumexp the log-likelihood of each image."""
    log_gate = gate_logits(log_names, mixture.gate).log_softmax(1)
    return log_gate + log_normal(points.double(), mixture.means, mixture.cholesky)


@torch.no_grad()
def expectation(
    mixture: Mixture,
    points: Tensor,
    log_names: Tensor,
    labels: UserLabels | None = None,
) -> tuple[Tensor, Tensor]:
    """r, N × K' float32, and the N log-likelihoods log Σ_k g_ik p(u_i | k), of a labelled image log g_iy p(u_i | y)."""
    parts = []
    likelihoods = []
    for u, names in _chunks(points, log_names):
        joint = log_joint(mixture, u, names)
        parts.append(joint.softmax(1).float())
        likelihoods.append(joint.logsumexp(1))
    r = torch.cat(parts)
    likelihood = torch.cat(likelihoods)
    if labels is None:
        return r, likelihood
    for rows, allowed in labels.allowed(log_names.shape[1], r.shape[1]):
        joint = log_joint(mixture, points[rows], log_names[rows])
        joint = joint.masked_fill(~allowed, -math.inf)
        r[rows] = joint.softmax(1).float()
        likelihood[rows] = joint.logsumexp(1)
    return r, likelihood


@torch.no_grad()
def membership(mixture: Mixture, points: Tensor) -> Tensor:
    """N × K', float64: in which cluster each image lies by its looks alone, whatever its names say."""
    parts = [
        log_normal(u.double(), mixture.means, mixture.cholesky).softmax(1)
        for u in points.split(CHUNK)
    ]
    return torch.cat(parts)


@torch.no_grad()
def fit_mixture(
    points: Tensor,
    log_names: Tensor,
    *,
    start: Mixture | None = None,
    begin: Tensor | None = None,
    labels: UserLabels | None = None,
    prior: float = EVEN_PRIOR,
    rounds: int = 20,
    tolerance: float = 1e-5,
) -> Fit:
    """EM from the names, from an earlier mixture's gate (`start`), or from responsibilities (`begin`, N × K', which may
    have columns for clusters without a name). Images with a user's label belong to its cluster. Stops after `rounds`,
    or if F / N falls by less than `tolerance`. `prior` is ρ."""
    check_inputs(points, log_names)
    squares = [float(part.double().square().sum()) for part in points.split(CHUNK)]
    spread = max(sum(squares) / points.numel(), 1e-12)  # 0 if all images are the same
    if start is not None:
        gate = start.gate
    else:
        clusters = log_names.shape[1] if begin is None else begin.shape[1]
        gate = points.new_zeros(1 + clusters, dtype=torch.float64)
        gate[0] = 1.0
    if begin is None:
        begin = gate_logits(log_names, gate).softmax(1).float()
    r = begin if labels is None else labels.pinned(begin)
    history: list[float] = []
    for _ in range(rounds):
        means, covariance = update_clusters(points, r, spread)
        gate = update_gate(log_names, r, gate, prior)
        mixture = Mixture(means, torch.linalg.cholesky(covariance), gate)
        r, likelihood = expectation(mixture, points, log_names, labels)
        energy = (prior_energy(mixture, spread, prior) - float(likelihood.sum())) / len(points)
        history.append(energy)
        if len(history) > 1 and history[-2] - energy < tolerance:
            break
    return Fit(mixture, r, history, -likelihood)


def update_clusters(
    points: Tensor,
    r: Tensor,
    spread: float,
) -> tuple[Tensor, Tensor]:
    """μ (K' × D) and Σ (D × D) from the responsibilities, N × K'."""
    clusters = r.shape[1]
    dimensions = points.shape[1]
    mass = points.new_zeros(clusters, dtype=torch.float64)
    first = points.new_zeros(clusters, dimensions, dtype=torch.float64)
    second = points.new_zeros(dimensions, dimensions, dtype=torch.float64)
    for u, part in _chunks(points, r):
        u = u.double()
        part = part.double()
        mass += part.sum(0)
        first += part.T @ u
        second += (u * part.sum(1, keepdim=True)).T @ u
    weight = (mass + PRIOR_MEAN)[:, None]
    means = first / weight
    scatter = second - means.T @ (weight * means)
    covariance = regularised_covariance(scatter, spread, mass.sum())
    return means, 0.5 * (covariance + covariance.T)


def regularised_covariance(
    scatter: Tensor,
    spread: float | Tensor,
    count: Tensor | int,
) -> Tensor:
    """(S + ν s² I) / (n + ν), ν = D, from the scatter matrix S of n images and s²."""
    dimensions = len(scatter)
    unit = torch.eye(dimensions, dtype=torch.float64, device=scatter.device)
    return (scatter + dimensions * spread * unit) / (count + dimensions)


def update_gate(
    log_names: Tensor,
    r: Tensor,
    gate: Tensor,
    prior: float,
) -> Tensor:
    """λ and b by two damped Newton steps on the concave Σ r log g − ½ρ‖b‖²."""
    value = gate_objective(log_names, r, gate, prior)
    for _ in range(2):
        gradient, hessian = gate_derivatives(log_names, r, gate, prior)
        step = torch.linalg.solve(hessian, gradient)
        length = 1.0
        for _ in range(12):
            new_gate = gate + length * step
            new_gate[0].clamp_min_(0)
            new_value = gate_objective(log_names, r, new_gate, prior)
            if new_value >= value:
                break
            length /= 2
        else:
            return gate
        gate = new_gate
        value = new_value
    return gate


def gate_objective(
    log_names: Tensor,
    r: Tensor,
    gate: Tensor,
    prior: float,
) -> float:
    """Σ r log g − ½ρ‖b‖²."""
    total = -0.5 * prior * float(gate[1:].square().sum())
    for names, part in _chunks(log_names, r):
        log_gate = gate_logits(names, gate).log_softmax(1)
        total += float((part.double() * log_gate).sum())
    return total


def gate_derivatives(
    log_names: Tensor,
    r: Tensor,
    gate: Tensor,
    prior: float,
) -> tuple[Tensor, Tensor]:
    """Gradient (1 + K') and negative Hessian of the gate's objective, λ first."""
    size = len(gate)
    gradient = torch.zeros_like(gate)
    hessian = gate.new_zeros(size, size)
    for names, part in _chunks(log_names, r):
        evidence = gate_evidence(names, size - 1)
        g = (gate[0] * evidence + gate[1:]).softmax(1)
        rest = part.double() - g
        spread = g * (evidence - (g * evidence).sum(1, keepdim=True))
        gradient[0] += (rest * evidence).sum()
        gradient[1:] += rest.sum(0)
        hessian[0, 0] += (spread * evidence).sum()
        hessian[0, 1:] += spread.sum(0)
        hessian[1:, 1:] += torch.diag(g.sum(0)) - g.T @ g
    gradient[1:] -= prior * gate[1:]
    hessian[1:, 0] = hessian[0, 1:]
    hessian.diagonal()[0] += 1e-6
    hessian.diagonal()[1:] += prior
    return gradient, hessian


def prior_energy(
    mixture: Mixture,
    spread: float,
    prior: float,
) -> float:
    """The three priors' part of F."""
    cholesky = mixture.cholesky
    white = torch.linalg.solve_triangular(cholesky, mixture.means.T, upper=False)
    log_determinant = 2 * float(cholesky.diagonal().log().sum())
    trace = float(torch.cholesky_inverse(cholesky).trace())
    shares = 0.5 * prior * float(mixture.gate[1:].square().sum())
    means = 0.5 * PRIOR_MEAN * float(white.square().sum())
    return shares + means + 0.5 * len(cholesky) * (log_determinant + spread * trace)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


def check_inputs(points: Tensor, log_names: Tensor) -> None:
    if points.ndim != 2 or log_names.ndim != 2 or len(points) != len(log_names):
        shapes = f"{tuple(points.shape)} and {tuple(log_names.shape)}"
        raise UsfanError(f"points must be N×D and log_names N×K with the same N; got {shapes}")
    if min(log_names.shape) < 2:
        raise UsfanError(
            f"a mixture needs at least two samples and two classes; got {tuple(log_names.shape)}"
        )
    if not bool(torch.isfinite(points).all()):
        raise UsfanError(
            "the witness's features are not finite numbers: check its weights and its input"
        )
    if bool(torch.isnan(log_names).any()):
        raise UsfanError(
            "the source model's predictions are not numbers: check where it comes from"
        )
