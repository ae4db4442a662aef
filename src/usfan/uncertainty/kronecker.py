"""The Kronecker-factored Laplace posterior of a last layer, in its eigenbasis (Eqs. 4–6 of the paper, its appendix).

    p(θ | D) ≈ N(θ_MAP, H⁻¹),   H = B ⊗ A + δI,   A = Q_A diag(a) Q_Aᵀ,   B = Q_B diag(b) Q_Bᵀ

"exact" damping adds δ to every product a_d b_k; "factored" damping, as the published program has it, replaces H by
(B + √δ I) ⊗ (A + √δ I). "sum" curvature is that of the loss summed over the N samples; "mean" curvature, as the
published program has it, that of the mean loss: B / N stands in the place of B. The variance of the logits of a sample
with φ = [z, 1] is

    Q_B diag_k(Σ_d (Q_Aᵀφ)_d² R_dk) Q_Bᵀ,   R_dk = 1 / (a_d b_k + δ)   or   1 / ((a_d + √δ)(b_k + √δ))

Shapes: B batch, K classes, D features, D' = D + 1 with a bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.config_checks import CURVATURE, DAMPING, one_of
from usfan.errors import UsfanError
from usfan.uncertainty.base import DrawsOfPart, Features, StoredSettings, Uncertainty
from usfan.uncertainty.fit import (
    Factors,
    append_one,
    batch_factors,
    check_layer,
    choose_precision,
    log_evidence,
    square_norm,
)
from usfan.uncertainty.predictive import low_rank_basis, noise_table, sobol_normal


@dataclass(frozen=True, eq=False)
class KroneckerPosterior(Uncertainty):
    """The posterior of the paper. θ_MAP are `weight` and `bias`. `fit` makes one; `to` moves it."""

    kind = "kronecker"

    feature_values: Tensor
    """a, eigenvalues of A, D', ascending."""
    feature_vectors: Tensor
    """Q_A, D' × D', a column per eigenvalue."""
    class_values: Tensor
    """b, eigenvalues of B, K, ascending."""
    class_vectors: Tensor
    """Q_B, K × K, a column per eigenvalue."""
    prior_precision: float
    """δ in use."""
    count: int
    """N, the number of samples."""
    prior: str = "number"
    """How δ was chosen: "number", "evidence" or "weight-decay"."""
    damping: str = "exact"
    """"exact" or "factored"."""
    log_likelihood: float | None = None
    """Σ log p[label] of the samples, if labels were given."""
    curvature: str = "sum"
    """"sum" or "mean"."""

    def __post_init__(self) -> None:
        one_of("damping", self.damping, DAMPING)
        one_of("curvature", self.curvature, CURVATURE)

    @classmethod
    def fit(
        cls,
        features: Tensor,
        logits: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        prior: float | str = "evidence",
        *,
        labels: Tensor | None = None,
        weight_decay: float | None = None,
        damping: str = "exact",
        curvature: str = "sum",
    ) -> KroneckerPosterior:
        """From features N×D and logits N×K of all the data, tensors or arrays."""
        features = torch.as_tensor(features)
        logits = torch.as_tensor(logits)
        weight = torch.as_tensor(weight)
        bias = None if bias is None else torch.as_tensor(bias)
        labels = None if labels is None else torch.as_tensor(labels).to(logits.device)
        labels = labels if labels is None or labels.is_floating_point() else labels.long()
        factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
        return cls.from_factors(
            factors,
            weight,
            bias,
            prior,
            weight_decay=weight_decay,
            damping=damping,
            curvature=curvature,
        )

    @classmethod
    @torch.inference_mode(False)
    def from_factors(
        cls,
        factors: Factors,
        weight: Tensor,
        bias: Tensor | None = None,
        prior: float | str = "evidence",
        *,
        weight_decay: float | None = None,
        damping: str = "exact",
        curvature: str = "sum",
    ) -> KroneckerPosterior:
        check_layer(factors, weight, bias)
        a, q_a = torch.linalg.eigh(factors.A)
        b, q_b = torch.linalg.eigh(factors.B)
        a = a.clamp_min(0)
        b = b.clamp_min(0)
        count = summed_samples(prior, factors.count, curvature)
        norm = square_norm(weight, bias)
        precision = choose_precision(prior, torch.outer(a, b), norm, count, weight_decay)
        dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        a, q_a, b, q_b = (t.to(weight.device, dtype).contiguous() for t in (a, q_a, b, q_b))
        return cls(
            # Copies: the layer may go on training.
            weight.detach().to(dtype, copy=True),
            None if bias is None else bias.detach().to(dtype, copy=True),
            a,
            q_a,
            b,
            q_b,
            precision,
            factors.count,
            prior if isinstance(prior, str) else "number",
            damping,
            factors.log_likelihood,
            curvature,
        )

    @staticmethod
    def posterior_shapes(classes: int, features: int, bias: bool) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in `posterior.safetensors`."""
        size = features + bias
        shapes: dict[str, tuple[int, ...]] = {
            "weight": (classes, features),
            "feature_values": (size,),
            "feature_vectors": (size, size),
            "class_values": (classes,),
            "class_vectors": (classes, classes),
        }
        return shapes | {"bias": (classes,)} if bias else shapes

    def check(self) -> None:
        """Raise unless eigenvalues and eigenvectors are those of symmetric matrices."""
        for name in ("feature", "class"):
            values = getattr(self, f"{name}_values")
            if bool((values < 0).any()) or bool((values.diff() < 0).any()):
                raise UsfanError(
                    f"'{name}_values' must be non-negative and ascending: eigenvalues of a symmetric matrix"
                )
            if not is_orthonormal(getattr(self, f"{name}_vectors")):
                raise UsfanError(f"'{name}_vectors' is not an orthonormal basis")

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood at δ: up to the log-likelihood, constant in δ; with it when labels were given."""
        norm = square_norm(self.weight, self.bias)
        value = log_evidence(self.eigenvalues, self.prior_precision, norm)
        return value + (self.log_likelihood or 0.0)

    @property
    def effective_parameters(self) -> float:
        """γ = Σ λ/(λ + δ): how many of the weights the data determined."""
        return float((self.eigenvalues / (self.eigenvalues + self.prior_precision)).sum())

    @property
    def eigenvalues(self) -> Tensor:
        """λ, D' × K."""
        return torch.outer(self.feature_values.double(), self.curvature_values)

    @property
    def curvature_values(self) -> Tensor:
        """b, or b / N of the mean loss, K."""
        values = self.class_values.double()
        return values / self.count if self.curvature == "mean" else values

    @functools.cached_property
    def variance_table(self) -> Tensor:
        """R, D' × K."""
        a = self.feature_values.double()[:, None]
        b = self.curvature_values[None, :]
        if self.damping == "exact":
            table = 1 / (a * b + self.prior_precision)
        else:
            root = math.sqrt(self.prior_precision)
            table = 1 / ((a + root) * (b + root))
        return table.to(self.weight)

    @functools.cached_property
    def basis(self) -> Tensor:
        """G, R × K (see `uncertainty.predictive`).

        A softmax does not see the all-ones direction, which no data determines: b = 0 there, and the variance is so
        large that it would take the accuracy of all the others. Its column is left out.
        """
        vectors = self.class_vectors.double()
        visible = (vectors - vectors.mean(dim=0)).norm(dim=0) > 0.02
        return low_rank_basis(self.variance_table.double() * visible).to(self.weight)

    @torch.no_grad()
    def eigen_variance(self, features: Features) -> Tensor:
        """s, B × K: the variances of the logits along the columns of Q_B."""
        phi = self._extended(features)
        return (phi @ self.feature_vectors).square() @ self.variance_table

    def logit_variance(self, features: Features) -> Tensor:
        """B × K × K, exact for this posterior."""
        return torch.einsum(
            "ik,bk,jk->bij",
            self.class_vectors,
            self.eigen_variance(features),
            self.class_vectors,
        )

    @torch.no_grad()
    def draw_heads(self, samples: int, seed: int = 2022) -> Tensor:
        """M × K × D' heads θ_m = θ_MAP + Q_B (√R ∘ ε_m)ᵀ Q_Aᵀ, the bias in the last column; the same for one seed."""
        K = len(self.class_values)
        D = len(self.feature_values)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(samples, K, D, generator=generator, dtype=torch.float64).to(
            self.weight
        )
        mean = self.weight
        if self.bias is not None:
            mean = torch.cat([self.weight, self.bias[:, None]], dim=1)
        scaled = noise * self.variance_table.T.sqrt()
        return mean + self.class_vectors @ scaled @ self.feature_vectors.T

    @torch.no_grad()
    def draws(self, features: Features, samples: int = 8, seed: int = 2022) -> Tensor:
        """B × M × K logits under M heads drawn from the posterior, the same heads for every sample."""
        return torch.einsum(
            "bd,mkd->bmk", self._extended(features), self.draw_heads(samples, seed)
        )

    @torch.no_grad()
    def distances(self, features: Features) -> Tensor:
        """B: φᵀ(A + ρI)⁻¹φ relative to its mean over the source, with ρ = mean(a) D'/N because A is that of N samples.
        Its mean is 1 on the source, and larger the farther the samples lie from it."""
        a = self.feature_values.double()
        ridge = a + a.mean() * len(a) / self.count
        squares = (self._extended(features) @ self.feature_vectors).double().square()
        return (squares / ridge).sum(dim=1) / (a / ridge).sum()

    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        noise = self.noise(samples, generator)
        coefficients = self.eigen_variance(features).sqrt() @ self.basis.T
        mean = self.logits(features)

        def draws(part: slice) -> Tensor:
            moved = (coefficients[part] / temperature) @ noise.flatten(1)
            return moved.view(-1, *noise.shape[1:]).add_((mean[part] / temperature)[:, None, :])

        return draws

    def noise(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """E, R × M × K: of fresh draws, or of the fixed ones, which are made once for each M."""
        classes = len(self.class_values)
        if generator is not None:
            shape = (samples, classes)
            draws = torch.randn(shape, generator=generator, device=generator.device)
            return noise_table(self.basis, self.class_vectors, draws.to(self.weight))
        if samples not in self._fixed:
            # The first column belongs to the all-ones direction, which a softmax does not see: give it the last,
            # weakest Sobol dimension, and the best ones to the directions of largest variance.
            draws = sobol_normal(samples, classes).roll(1, dims=1).to(self.weight)
            self._fixed[samples] = noise_table(self.basis, self.class_vectors, draws)
        return self._fixed[samples]

    def _extended(self, features: Features) -> Tensor:
        """φ, B × D'."""
        z = self._checked(features)
        return append_one(z) if self.bias is not None else z

    def with_prior(
        self,
        prior: float | str,
        *,
        damping: str | None = None,
        curvature: str | None = None,
        weight_decay: float | None = None,
    ) -> KroneckerPosterior:
        """The same factors under another prior: no data is needed."""
        curvature = curvature or self.curvature
        count = summed_samples(prior, self.count, curvature)
        norm = square_norm(self.weight, self.bias)
        precision = choose_precision(prior, self.eigenvalues, norm, count, weight_decay)
        return dataclasses.replace(
            self,
            prior_precision=precision,
            prior=prior if isinstance(prior, str) else "number",
            damping=damping or self.damping,
            curvature=curvature,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in `posterior.safetensors`."""
        return self._all_tensors()

    def settings(self) -> StoredSettings:
        """The settings in the table `posterior` of `config.json`."""
        names = ("prior_precision", "count", "prior", "damping", "log_likelihood", "curvature")
        return {name: getattr(self, name) for name in names}


def is_orthonormal(vectors: Tensor) -> bool:
    """Whether QᵀQ = I, tested on random vectors: one entry that is off by 1e-3 shows in nearly every one of them. The
    product itself would take seconds from a few thousand features on."""
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(len(vectors), 32, generator=generator, dtype=vectors.dtype)
    error = (vectors.T @ (vectors @ probes) - probes).abs().max()
    return bool(error <= 2e-4)  # huge values make it NaN


def summed_samples(prior: float | str, count: int, curvature: str) -> int:
    """How many samples' loss the curvature is that of: N, or 1 of the mean. The evidence is that of all the data."""
    one_of("curvature", curvature, CURVATURE)
    if curvature == "mean" and prior == "evidence":
        raise UsfanError('curvature="mean" has no evidence: give the prior as a number')
    return 1 if curvature == "mean" else count
