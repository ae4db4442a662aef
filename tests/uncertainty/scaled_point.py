"""A made-up uncertainty: the point estimate at the temperature that fits the source labels best.

f_1 = s (Wz + b),    s = argmin_s CE(softmax(s (Wz + b)), y) on the source
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from usfan.errors import ConfigError
from usfan.uncertainty.base import DrawsOfPart, FitSettings, StoredSettings, Uncertainty
from usfan.uncertainty.kronecker import KroneckerPosterior


@dataclass(frozen=True, eq=False)
class ScaledPoint(Uncertainty):
    """One setting and one tensor are stored."""

    kind = "scaled-point"
    needs_source_data = True
    stored_settings = MappingProxyType({"scale": (0.1, 10.0)})

    losses: Tensor
    """Cross-entropy at each scale that was tried."""
    scale: float = 1.0
    """s."""

    @classmethod
    def from_posterior(
        cls,
        posterior: KroneckerPosterior,
        settings: FitSettings,
        features: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> ScaledPoint:
        if features is None:
            raise ConfigError("this model has no scaled point estimate: train it with one")
        logits = posterior.logits(features)
        scales = [0.2 + 0.1 * step for step in range(20)]
        cross_entropy = torch.nn.functional.cross_entropy
        losses = torch.stack([cross_entropy(scale * logits, labels) for scale in scales])
        return cls(posterior.weight, posterior.bias, losses, scales[int(losses.argmin())])

    @classmethod
    def tensor_shapes(
        cls, settings: StoredSettings, weight: Tensor, bias: Tensor | None
    ) -> dict[str, tuple[int, ...]]:
        return {"losses": (20,)}

    @classmethod
    def from_stored(
        cls, posterior: KroneckerPosterior, settings: StoredSettings, tensors: dict[str, Tensor]
    ) -> ScaledPoint:
        return cls(
            posterior.weight, posterior.bias, tensors["losses"], float(settings["scale"] or 1)
        )

    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        return lambda part: (self.scale * self.logits(features[part]) / temperature)[:, None]
