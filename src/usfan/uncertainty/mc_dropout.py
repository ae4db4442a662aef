"""MC dropout: dropout of the features before the last layer, at test time (Gal and Ghahramani 2016).

    f_m = W (r_m ∘ z) / (1 − ρ) + b,    r_md = 1 with probability 1 − ρ, else 0

The masks r_m are fixed, and the same for every sample.

Shapes: B batch, K classes, D features, M draws.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usfan.config_checks import DROPOUT_RATES, between
from usfan.errors import ConfigError, option
from usfan.uncertainty.base import DrawsOfPart, FitSettings, Uncertainty

if TYPE_CHECKING:
    from usfan.uncertainty.kronecker import KroneckerPosterior

TRAINING_RATE = 0.5
"""Rate of dropout in training, if neither the user nor the network sets another."""
UNTRAINED_RATE = 0.1
"""Rate for a head that was trained without dropout: nothing determines it, so it is a guess."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class MCDropout(Uncertainty):
    """M heads that each leave out some features."""

    kind = "mc-dropout"
    stored_settings = MappingProxyType({"rate": DROPOUT_RATES})

    rate: float = TRAINING_RATE
    """ρ, the share of the features that a draw leaves out."""

    def __post_init__(self) -> None:
        between("rate", self.rate, *DROPOUT_RATES)

    @classmethod
    def from_posterior(
        cls,
        posterior: KroneckerPosterior,
        settings: FitSettings,
        features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> MCDropout:
        rate = settings.dropout_rate
        if rate is None:
            rate = settings.trained_rate or UNTRAINED_RATE
            if not settings.trained_rate:
                log.warning(
                    "the model was trained without dropout before its last layer: MC dropout takes the rate %s, "
                    "a guess; dropout_rate sets another",
                    rate,
                )
        return cls(posterior.weight, posterior.bias, rate)

    @classmethod
    def training_dropout(
        cls, requested: float | None, network: float, bottleneck: int
    ) -> float:
        if requested == 0:
            raise ConfigError(
                f"uncertainty mc-dropout needs dropout in training: leave {option('dropout', 0)} out, or give a rate"
            )
        if not bottleneck:
            raise ConfigError(
                "uncertainty mc-dropout: dropout stands after the bottleneck, and bottleneck is 0"
            )
        return requested or network or TRAINING_RATE

    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        masks = self.masks(samples)

        def draws(part: slice) -> Tensor:
            masked = features[part, None] * masks
            return torch.nn.functional.linear(masked, self.weight, self.bias) / temperature

        return draws

    def draw_size(self, samples: int) -> int:
        return samples * sum(self.weight.shape)

    def masks(self, samples: int, seed: int = 2022) -> Tensor:
        """M × D factors r_m / (1 − ρ): the same on every machine and every call."""
        if samples not in self._fixed:
            generator = torch.Generator().manual_seed(seed)
            shape = (samples, self.weight.shape[1])
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
            factors = (uniform >= self.rate) / (1 - self.rate)
            self._fixed[samples] = factors.to(self.weight)
        return self._fixed[samples]
