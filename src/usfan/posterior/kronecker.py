"""The Kronecker-factored Laplace posterior of a last layer, in its eigenbasis (Eqs. 4–6 of the paper, its appendix).

    p(θ | D) ≈ N(θ_MAP, H⁻¹),   H = B ⊗ A + δI,   A = Q_A diag(a) Q_Aᵀ,   B = Q_B diag(b) Q_Bᵀ

"exact" damping adds δ to every product a_d b_k; "factored" damping, as the published program has it, replaces H by
(B + √δ I) ⊗ (A + √δ I). The variance of the logits of a sample with φ = [z, 1] is

    Q_B diag_k(Σ_d (Q_Aᵀφ)_d² R_dk) Q_Bᵀ,   R_dk = 1 / (a_d b_k + δ)   or   1 / ((a_d + √δ)(b_k + √δ))

Shapes: B batch, K classes, D features, D' = D + 1 with a bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from usfan.errors import UsfanError
from usfan.posterior.fit import (
    Factors,
    append_one,
    batch_factors,
    check_layer,
    choose_precision,
    log_evidence,
    square_norm,
)
from usfan.posterior.predictive import (
    certainty_weights,
    low_rank_basis,
    noise_table,
    predictive_moments,
    predictive_probs,
    sobol_normal,
)

DAMPING = ("exact", "factored")
TENSORS = ("weight", "bias", "feature_values", "feature_vectors", "class_values", "class_vectors")


def as_features(given: Any) -> Tensor:
    """A tensor as it is; a copy of anything that numpy makes numbers of."""
    if isinstance(given, Tensor):
        return given
    try:
        return torch.from_numpy(np.array(given, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise UsfanError(f"features must be B×D numbers: {error}") from error


@dataclass(frozen=True, eq=False)
class KroneckerPosterior:
    """Frozen data and pure functions of it. `fit` makes one; `to` moves it; `tensors` and `settings` are saved."""

    kind = "kronecker"

    weight: Tensor
    """θ_MAP, K × D: the effective weight, after weight normalisation."""
    bias: Tensor | None
    """K, or None for a layer without bias."""
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
    """N, how many samples were seen."""
    prior: str = "number"
    """How δ was chosen: "number", "evidence" or "weight-decay"."""
    damping: str = "exact"
    """"exact" or "factored"."""
    log_likelihood: float | None = None
    """Σ log p[label] of the samples seen, if labels were given."""

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
    ) -> KroneckerPosterior:
        """From features N×D and logits N×K of all the data, tensors or arrays. Larger sets: sum `batch_factors`, then
        `from_factors`."""
        features, logits, weight = (torch.as_tensor(given) for given in (features, logits, weight))
        bias = None if bias is None else torch.as_tensor(bias)
        labels = None if labels is None else torch.as_tensor(labels).to(logits.device)
        labels = labels if labels is None or labels.is_floating_point() else labels.long()
        factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
        return cls.from_factors(factors, weight, bias, prior, weight_decay=weight_decay, damping=damping)

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
    ) -> KroneckerPosterior:
        check_layer(factors, weight, bias)
        if damping not in DAMPING:
            raise UsfanError(f"damping must be one of {', '.join(DAMPING)}; got {damping!r}")
        a, q_a = torch.linalg.eigh(factors.A)
        b, q_b = torch.linalg.eigh(factors.B)
        a, b = a.clamp_min(0), b.clamp_min(0)
        precision = choose_precision(prior, torch.outer(a, b), square_norm(weight, bias), factors.count, weight_decay)
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
        )

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood at δ: up to the log-likelihood, constant in δ; with it when labels were given."""
        eigenvalues = torch.outer(self.feature_values.double(), self.class_values.double())
        value = log_evidence(eigenvalues, self.prior_precision, square_norm(self.weight, self.bias))
        return value + (self.log_likelihood or 0.0)

    @property
    def effective_parameters(self) -> float:
        """γ = Σ λ/(λ + δ): how many of the weights the data determined."""
        eigenvalues = torch.outer(self.feature_values.double(), self.class_values.double())
        return float((eigenvalues / (eigenvalues + self.prior_precision)).sum())

    @functools.cached_property
    def variance_table(self) -> Tensor:
        """R, D' × K."""
        a, b = self.feature_values.double()[:, None], self.class_values.double()[None, :]
        if self.damping == "exact":
            table = 1 / (a * b + self.prior_precision)
        else:
            root = math.sqrt(self.prior_precision)
            table = 1 / ((a + root) * (b + root))
        return table.to(self.weight)

    @functools.cached_property
    def basis(self) -> Tensor:
        """G, R × K (see `posterior.predictive`).

        A softmax does not see the all-ones direction, which no data determines: b = 0 there, and the variance is so
        large that it would take the accuracy of all the others. Its column is left out.
        """
        vectors = self.class_vectors.double()
        visible = (vectors - vectors.mean(dim=0)).norm(dim=0) > 0.02
        return low_rank_basis(self.variance_table.double() * visible).to(self.weight)

    @functools.cached_property
    def _noise(self) -> dict[int, Tensor]:
        return {}

    def logits(self, features: Any) -> Tensor:
        """The point estimate, B × K. Features are B × D, here and below: a tensor, or what makes one."""
        return torch.nn.functional.linear(as_features(features).to(self.weight), self.weight, self.bias)

    @torch.no_grad()
    def eigen_variance(self, features: Any) -> Tensor:
        """s, B × K: the variances of the logits along the columns of Q_B."""
        features = self._checked(features)
        phi = append_one(features) if self.bias is not None else features
        return (phi @ self.feature_vectors).square() @ self.variance_table

    def logit_variance(self, features: Any) -> Tensor:
        """B × K × K, exact for this posterior."""
        return torch.einsum("ik,bk,jk->bij", self.class_vectors, self.eigen_variance(features), self.class_vectors)

    def predictive(
        self, features: Any, temperature: float = 0.4, samples: int = 128, generator: torch.Generator | None = None
    ) -> Tensor:
        """Eq. 6: B × K probabilities. Fixed scrambled Sobol draws; fresh random ones when a generator is given.

        It carries no gradient, and neither do `moments` and `certainty`: weights are constants of the loss.
        """
        return predictive_probs(*self._draw(features, temperature, samples, generator), temperature)

    def moments(
        self, features: Any, temperature: float = 0.4, samples: int = 128, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The predictive B × K, and its mutual information B: the epistemic part of its entropy."""
        probs, mean_entropy = predictive_moments(*self._draw(features, temperature, samples, generator), temperature)
        return probs, (-torch.xlogy(probs, probs).sum(dim=1) - mean_entropy).clamp_min(0)

    def certainty(
        self, features: Any, temperature: float = 0.4, samples: int = 128, generator: torch.Generator | None = None
    ) -> Tensor:
        """Algorithm 1: B weights exp(−H) of the predictive."""
        return certainty_weights(self.predictive(features, temperature, samples, generator))

    @torch.no_grad()
    def draw_heads(self, samples: int, seed: int = 2022) -> Tensor:
        """M × K × D' heads θ_m = θ_MAP + Q_B (√R ∘ ε_m)ᵀ Q_Aᵀ, the bias in the last column; the same for one seed."""
        K, D = len(self.class_values), len(self.feature_values)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(samples, K, D, generator=generator, dtype=torch.float64).to(self.weight)
        mean = self.weight if self.bias is None else torch.cat([self.weight, self.bias[:, None]], dim=1)
        return mean + self.class_vectors @ (noise * self.variance_table.T.sqrt()) @ self.feature_vectors.T

    @torch.no_grad()
    def draws(self, features: Any, samples: int = 8, seed: int = 2022) -> Tensor:
        """B × M × K logits under M heads drawn from the posterior, the same heads for every sample."""
        features = self._checked(features)
        phi = append_one(features) if self.bias is not None else features
        return torch.einsum("bd,mkd->bmk", phi, self.draw_heads(samples, seed))

    @torch.no_grad()
    def _draw(
        self, features: Any, temperature: float, samples: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        features = self._checked(features)
        if not temperature > 0 or samples < 1:
            raise UsfanError(f"temperature must be positive and samples at least 1; got {temperature} and {samples}")
        if generator is None:
            noise = self.noise(samples)
        else:
            shape = (samples, len(self.class_values))
            draws = torch.randn(shape, generator=generator, device=generator.device).to(self.weight)
            noise = noise_table(self.basis, self.class_vectors, draws)
        coefficients = self.eigen_variance(features).sqrt() @ self.basis.T
        return self.logits(features), coefficients, noise

    def noise(self, samples: int) -> Tensor:
        """E of the fixed draws, R × M × K; made once for each M."""
        if samples not in self._noise:
            # The first column belongs to the all-ones direction, which a softmax does not see: give it the last,
            # weakest Sobol dimension, and the best ones to the directions of largest variance.
            draws = sobol_normal(samples, len(self.class_values)).roll(1, dims=1)
            self._noise[samples] = noise_table(self.basis, self.class_vectors, draws.to(self.weight))
        return self._noise[samples]

    def _checked(self, features: Any) -> Tensor:
        found = as_features(features)
        if found.ndim != 2 or found.shape[1] != self.weight.shape[1]:
            raise UsfanError(f"features must be B×{self.weight.shape[1]}; got {tuple(found.shape)}")
        return found.to(self.weight)

    def with_prior(
        self, prior: float | str, *, damping: str | None = None, weight_decay: float | None = None
    ) -> KroneckerPosterior:
        """The same factors under another prior: no data is needed."""
        eigenvalues = torch.outer(self.feature_values.double(), self.class_values.double())
        norm = square_norm(self.weight, self.bias)
        precision = choose_precision(prior, eigenvalues, norm, self.count, weight_decay)
        name = prior if isinstance(prior, str) else "number"
        damping = damping or self.damping
        if damping not in DAMPING:
            raise UsfanError(f"damping must be one of {', '.join(DAMPING)}; got {damping!r}")
        return dataclasses.replace(self, prior_precision=precision, prior=name, damping=damping)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> KroneckerPosterior:
        """The same posterior on another device or in another floating-point type."""
        moved: dict[str, Any] = {name: t.to(device=device, dtype=dtype) for name, t in self.tensors().items()}
        return dataclasses.replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """What `posterior.safetensors` holds."""
        return {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}

    def settings(self) -> dict[str, Any]:
        """What `config.json` holds of it."""
        names = ("prior_precision", "count", "prior", "damping", "log_likelihood")
        return {name: getattr(self, name) for name in names}
