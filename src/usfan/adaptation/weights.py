"""The weights of the entropy term: w = exp(−H) of a prediction at temperature τ (Algorithm 1 of the paper).

"point" takes the point estimate's softmax(f/τ), "posterior" the posterior predictive. Divided by their mean, the
weights say only which samples count more than others, and leave the strength of the entropy term alone. Divided by
their mean within each predicted class, they do not say that a class that is hard as a whole counts less.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.config import AdaptConfig
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import certainty_weights
from usfan.scoring.outputs import Outputs


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


def weights_of(kind: str, outputs: Outputs, config: AdaptConfig, done: float = 0.0) -> Tensor:
    """N weights from a pass over the target, which has the posterior predictive in it already, after a share `done` of
    the epochs."""
    if kind == "point":
        raw = certainty_weights((outputs.logits / config.temperature).softmax(dim=1))
    elif config.certainty == "epistemic":
        raw = torch.exp(-outputs.mutual_information)
    else:
        raw = certainty_weights(outputs.posterior_probs)
    return raw.pow(config.weight_power * (2 * (1 - done) if config.anneal else 1))


def divide_by_mean(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean 1 over the samples in the mask (all, without one)."""
    if mask is None:
        return weights / weights.mean().clamp_min(1e-12)
    mean = (weights * mask).sum() / mask.sum().clamp_min(1)
    return weights / mean.clamp_min(1e-12)


def divide_by_class_mean(weights: Tensor, predicted: Tensor, classes: int, mask: Tensor | None = None) -> Tensor:
    """Mean 1 within each predicted class (over its samples in the mask): a hard class counts as much as an easy one."""
    mask = torch.ones_like(weights) if mask is None else mask
    zeros = torch.zeros(classes, dtype=weights.dtype, device=weights.device)
    sums, counts = (zeros.index_add(0, predicted, values) for values in (weights * mask, mask))
    return weights / (sums / counts.clamp_min(1)).clamp_min(1e-12)[predicted] * (counts[predicted] > 0)
