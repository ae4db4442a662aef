"""The weights of the entropy term: w = exp(−H) of a prediction at temperature τ (Algorithm 1 of the paper).

"point" takes the point estimate's softmax(f/τ), "posterior" the posterior predictive. Divided by their mean, the
weights say only which samples count more than others, and leave the strength of the entropy term alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.config import AdaptConfig
from usfan.models.model import Outputs
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import certainty_weights


def raw_weights(
    kind: str, features: Tensor, logits: Tensor, posterior: KroneckerPosterior, *, temperature: float, samples: int
) -> Tensor:
    """B weights in [1/K, 1], without gradient."""
    with torch.no_grad():
        if kind == "none":
            return logits.new_ones(len(logits))
        if kind == "point":
            return certainty_weights((logits.detach() / temperature).softmax(dim=1))
        return posterior.certainty(features.detach(), temperature, samples)


def weights_of(kind: str, outputs: Outputs, config: AdaptConfig) -> Tensor:
    """N weights from a pass over the target, which has the posterior predictive in it already."""
    if kind == "point":
        raw = certainty_weights((outputs.logits / config.temperature).softmax(dim=1))
    elif config.certainty == "epistemic":
        raw = torch.exp(-outputs.mutual_information)
    else:
        raw = certainty_weights(outputs.posterior_probs)
    return raw.pow(config.weight_power)


def divide_by_mean(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean 1 over the samples in the mask (all, without one)."""
    if mask is None:
        return weights / weights.mean().clamp_min(1e-12)
    mean = (weights * mask).sum() / mask.sum().clamp_min(1)
    return weights / mean.clamp_min(1e-12)
