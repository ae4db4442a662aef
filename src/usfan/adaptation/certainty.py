"""The weights of the entropy term: w = exp(−H) of a prediction at temperature τ (Algorithm 1 of the paper).

"point" takes the point estimate's softmax(f/τ), "posterior" the posterior predictive. Divided by their mean, the
weights say only which samples count more than others, and leave the strength of the entropy term alone. Divided by
their mean within each predicted class, they do not say that a class that is hard as a whole counts less.

Shapes: N samples, B batch, K classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.facts import Facts
from usfan.config_checks import TEMPERATURES, between, one_of
from usfan.errors import ConfigError
from usfan.posterior.predictive import certainty_weights
from usfan.posterior.uncertainty import Uncertainty
from usfan.scoring.outputs import Outputs

SHORT = 4
"""A run of fewer epochs is too short for a schedule."""


@dataclass(frozen=True)
class Certainty:
    """How samples are weighted. Settings that are None are decided by `decide`."""

    weights: str = "none"
    """none (all samples equal), point (certainty of the point estimate) or posterior (of the posterior predictive)."""
    refresh: str = "epoch"
    """When weights are computed: epoch (test views, BatchNorm in test mode) or step (Algorithm 1: in every batch)."""
    normalise_weights: bool = True
    """Divide the weights by their mean, so that weighting does not weaken the entropy term as a whole."""
    balance: bool | None = False
    """Divide the weights by their mean within each predicted class, so that a hard class counts as much as an easy
    one."""
    anneal: bool | None = False
    """Decay the exponent on the weights from 2 in the first epoch to about 0 in the last."""
    temperature: float = 0.4
    """τ of the certainty weights."""

    def __post_init__(self) -> None:
        one_of("weights", self.weights, ("none", "point", "posterior"))
        one_of("refresh", self.refresh, ("epoch", "step"))
        if not self.temperature > 0:
            raise ConfigError(f"temperature must be positive; got {self.temperature}")
        between("temperature", self.temperature, *TEMPERATURES)
        if self.balance and not self.normalise_weights:
            raise ConfigError("balance divides the weights by their mean, and normalise_weights=off forbids that")
        if self.refresh == "step" and (self.balance or self.anneal):
            raise ConfigError("balance and anneal need weights per epoch: leave out refresh=step")

    def decide(self, facts: Facts) -> Certainty:
        averaged = self.refresh == "epoch" and self.normalise_weights
        scheduled = averaged and facts.pretrained and facts.setting == "closed" and facts.epochs >= SHORT
        return dataclasses.replace(
            self,
            balance=averaged if self.balance is None else self.balance,
            anneal=scheduled if self.anneal is None else self.anneal,
        )

    def of_pass(self, outputs: Outputs, known: Tensor, done: float) -> Tensor:
        """N weights from a pass over the target, after a share `done` of the epochs."""
        if self.weights == "none":
            return torch.ones_like(known)
        raw = self.raw(outputs).pow(2 * (1 - done) if self.anneal else 1)
        if self.balance:
            return divide_by_class_mean(raw, outputs.logits.argmax(dim=1), outputs.logits.shape[1], known)
        return divide_by_mean(raw, known) if self.normalise_weights else raw

    def raw(self, outputs: Outputs) -> Tensor:
        """N weights in [1/K, 1], before they are scaled."""
        if self.weights == "none":
            return torch.ones_like(outputs.logits[:, 0])
        if self.weights == "point":
            return certainty_weights((outputs.logits / self.temperature).softmax(dim=1))
        return certainty_weights(outputs.posterior_probs)

    @torch.no_grad()
    def of_batch(self, features: Tensor, logits: Tensor, uncertainty: Uncertainty, samples: int) -> Tensor:
        """B weights in [1/K, 1] of a batch as it is, not normalised: Algorithm 1."""
        if self.weights == "none":
            return logits.new_ones(len(logits))
        if self.weights == "point":
            return certainty_weights((logits / self.temperature).softmax(dim=1))
        return uncertainty.certainty(features, self.temperature, samples)


def divide_by_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Mean 1 over the samples in the mask."""
    mean = (weights * mask).sum() / mask.sum().clamp_min(1)
    return weights / mean.clamp_min(1e-12)


def divide_by_class_mean(weights: Tensor, predicted: Tensor, classes: int, mask: Tensor | None = None) -> Tensor:
    """Mean 1 within each predicted class, over its samples in the mask."""
    mask = torch.ones_like(weights) if mask is None else mask
    zeros = torch.zeros(classes, dtype=weights.dtype, device=weights.device)
    sums, counts = (zeros.index_add(0, predicted, values) for values in (weights * mask, mask))
    return weights / (sums / counts.clamp_min(1)).clamp_min(1e-12)[predicted] * (counts[predicted] > 0)
