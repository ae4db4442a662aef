"""Made-up last layers with known answers: Gaussian classes of unit variance, and their Bayes classifier.

For class means μ_k the posterior of the class is softmax(μ_kᵀz − ½‖μ_k‖²), which a linear layer holds exactly.
`confidence` scales its logits, so that the layer is less sure than it could be, as label smoothing leaves it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LastLayer(NamedTuple):
    features: Tensor
    """N × D."""
    logits: Tensor
    """N × K."""
    weight: Tensor
    """K × D."""
    bias: Tensor
    """K."""
    labels: Tensor
    """N."""

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `KroneckerPosterior.fit` takes."""
        return self.features, self.logits, self.weight, self.bias


def last_layer(
    samples: int,
    dimensions: int,
    classes: int,
    *,
    seed: int = 0,
    separation: float = 0.5,
    confidence: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> LastLayer:
    generator = torch.Generator().manual_seed(seed)
    means = separation * torch.randn(
        classes, dimensions, generator=generator, dtype=torch.float64
    )
    labels = torch.randint(classes, (samples,), generator=generator)
    features = means[labels] + torch.randn(
        samples, dimensions, generator=generator, dtype=torch.float64
    )
    weight = confidence * means
    bias = -0.5 * confidence * means.square().sum(dim=1)
    logits = features @ weight.T + bias
    return LastLayer(
        features.to(dtype), logits.to(dtype), weight.to(dtype), bias.to(dtype), labels
    )


def shifted(features: Tensor, count: int, noise: float = 0.5, seed: int = 7) -> Tensor:
    """The first samples as another domain would show them: with more noise."""
    generator = torch.Generator().manual_seed(seed)
    part = features[:count]
    return part + noise * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(
        part
    )
