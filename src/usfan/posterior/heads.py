"""Uncertainties that are a handful of heads: the point estimate, MC dropout and, in `posterior.ensemble`, an ensemble.

Each has M heads (W_m, b_m). The logits of a draw are f_m = W_m z + b_m, and as with the posterior (Eq. 6)

    p̂ = M⁻¹ Σ_m softmax(f_m / τ),    w = exp(−H(p̂)),    I = H(p̂) − M⁻¹ Σ_m H(softmax(f_m / τ))

    point         M = 1 and W_1 = W, so I = 0
    mc-dropout    W_m = W diag(r_m) / (1 − ρ) with r_md = 1 with probability 1 − ρ, else 0: dropout before the last
                  layer at test time (Gal and Ghahramani 2016). The masks are fixed, and the same for every sample

Shapes: B batch, K classes, D features, M draws.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from usfan.errors import UsfanError
from usfan.posterior.kronecker import as_features
from usfan.posterior.predictive import CHUNK_ELEMENTS, certainty_weights, entropy

UNTRAINED_RATE = 0.1
"""Rate of MC dropout for a head that was trained without dropout: nothing tells the rate, so it is a guess."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Frozen data and pure functions of it. A kind says what its draws are."""

    kind = "heads"

    weight: Tensor
    """W of the point estimate, K × D."""
    bias: Tensor | None
    """K, or None for a layer without bias."""

    @property
    def widest(self) -> int:
        """Numbers that one draw of one sample takes at once."""
        return len(self.weight)

    def count(self, samples: int) -> int:
        """M, how many heads there are if `samples` are asked for."""
        return samples

    def logits(self, features: Any) -> Tensor:
        """The point estimate, B × K. Features are B × D, here and below: a tensor, or what makes one."""
        return torch.nn.functional.linear(self._checked(features), self.weight, self.bias)

    @torch.no_grad()
    def draws(self, features: Any, samples: int = 8) -> Tensor:
        """B × M × K logits, the same heads for every sample; if there are fewer heads than asked for, they repeat."""
        M = self.count(samples)
        found = self._draw(self._checked(features), M)
        return found[:, torch.arange(samples, device=found.device) % M]

    def predictive(self, features: Any, temperature: float = 0.4, samples: int = 128) -> Tensor:
        """B × K probabilities, the mean over the heads (Eq. 6). No gradient goes through it."""
        return self._mean(features, temperature, samples)[0]

    def moments(self, features: Any, temperature: float = 0.4, samples: int = 128) -> tuple[Tensor, Tensor]:
        """The predictive B × K, and its mutual information B."""
        probs, mean_entropy = self._mean(features, temperature, samples)
        return probs, (entropy(probs) - mean_entropy).clamp_min(0)

    def certainty(self, features: Any, temperature: float = 0.4, samples: int = 128) -> Tensor:
        """B weights exp(−H) of the predictive (Algorithm 1)."""
        return certainty_weights(self.predictive(features, temperature, samples))

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """The same on another device or in another floating-point type."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(
            self, **{k: v.to(device=device, dtype=dtype) for k, v in own.items() if isinstance(v, Tensor)}
        )

    def tensors(self) -> dict[str, Tensor]:
        """What is saved of it beside the head itself."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What `config.json` holds of it."""
        return {"kind": self.kind}

    def _draw(self, features: Tensor, samples: int) -> Tensor:
        """B × M × K logits of M heads."""
        raise NotImplementedError

    @torch.no_grad()
    def _mean(self, features: Any, temperature: float, samples: int) -> tuple[Tensor, Tensor]:
        """The mean prediction B × K and the mean entropy B of the draws, a part of the batch at a time."""
        if not temperature > 0 or samples < 1:
            raise UsfanError(f"temperature must be positive and samples at least 1; got {temperature} and {samples}")
        features = self._checked(features)
        M = self.count(samples)
        probs, entropies = features.new_empty(len(features), len(self.weight)), features.new_empty(len(features))
        chunk = max(1, CHUNK_ELEMENTS.get(features.device.type, 1 << 24) // (M * self.widest))
        for start in range(0, len(features), chunk):
            part = slice(start, start + chunk)
            log_p = (self._draw(features[part], M) / temperature).log_softmax(dim=-1)
            p = log_p.exp()
            probs[part] = p.mean(dim=1)
            entropies[part] = -(p * log_p).sum(dim=-1).mean(dim=1)
        return probs, entropies

    def _checked(self, features: Any) -> Tensor:
        found = as_features(features)
        if found.ndim != 2 or found.shape[1] != self.weight.shape[1]:
            raise UsfanError(f"features must be B×{self.weight.shape[1]}; got {tuple(found.shape)}")
        return found.to(self.weight)


@dataclass(frozen=True, eq=False)
class PointEstimate(Heads):
    """The head itself: what is uncertain is the class, never the weights."""

    kind = "point"

    def count(self, samples: int) -> int:
        return 1

    def moments(self, features: Any, temperature: float = 0.4, samples: int = 128) -> tuple[Tensor, Tensor]:
        """I is exactly 0: rounding must not pass for a score of the unknown."""
        probs = self.predictive(features, temperature, samples)
        return probs, torch.zeros_like(probs[:, 0])

    def _draw(self, features: Tensor, samples: int) -> Tensor:
        return self.logits(features)[:, None]


@dataclass(frozen=True, eq=False)
class MCDropout(Heads):
    """Dropout of the features before the last layer, at test time."""

    kind = "mc-dropout"

    rate: float = 0.5
    """ρ, the share of the features that a draw leaves out."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise UsfanError(f"the rate of MC dropout must lie between 0 and 1; got {self.rate}")

    @property
    def widest(self) -> int:
        return sum(self.weight.shape)

    @functools.cached_property
    def _masks(self) -> dict[int, Tensor]:
        return {}

    def masks(self, samples: int, seed: int = 2022) -> Tensor:
        """M × D factors r_m / (1 − ρ): the same on every machine and every call."""
        if samples not in self._masks:
            generator = torch.Generator().manual_seed(seed)
            kept = torch.rand(samples, self.weight.shape[1], generator=generator, dtype=torch.float64) >= self.rate
            self._masks[samples] = (kept / (1 - self.rate)).to(self.weight)
        return self._masks[samples]

    def settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "rate": self.rate}

    def _draw(self, features: Tensor, samples: int) -> Tensor:
        dropped = features[:, None] * self.masks(samples)
        return torch.nn.functional.linear(dropped, self.weight, self.bias)
