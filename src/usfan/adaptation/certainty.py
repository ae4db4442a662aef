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

from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.thresholds import SHORT_RUN
from usfan.config import Config, choice, number
from usfan.config_checks import TEMPERATURES
from usfan.errors import ConfigError
from usfan.maths.objectives import certainty_weights
from usfan.maths.outputs import Outputs
from usfan.uncertainty.base import Uncertainty


@dataclass(frozen=True)
class Certainty(Config):
    """How samples are weighted. Settings that are None are decided by `decide`."""

    weights: str = choice("none", "point", "posterior")
    """none (all samples equal), point (certainty of the point estimate) or posterior (of the posterior predictive)."""
    refresh: str = choice("epoch", "tenth", "step")
    """When weights are computed: epoch or tenth (of the run; both with test views and BatchNorm in test mode), or step
    (Algorithm 1: in every batch)."""
    normalise_weights: bool = True
    """Divide the weights by their mean, so that weighting does not weaken the entropy term as a whole."""
    balance: bool | None = False
    """Divide the weights by their mean within each predicted class, so that a hard class counts as much as an easy
    one."""
    anneal: bool | None = False
    """Decay the exponent on the weights from 2 in the first epoch to about 0 in the last."""
    temperature: float = number(0.4, *TEMPERATURES)
    """τ of the certainty weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance and not self.normalise_weights:
            raise ConfigError(
                "balance divides the weights by their mean, and normalise_weights=off forbids that"
            )
        if self.refresh == "step" and (self.balance or self.anneal):
            raise ConfigError(
                "balance and anneal need weights per epoch: leave out refresh=step"
            )

    def decide(self, facts: RunFacts) -> Certainty:
        """The same with every open setting decided from the facts."""
        averaged = self.refresh != "step" and self.normalise_weights
        balance = self.balance
        if balance is None:
            balance = averaged
        anneal = self.anneal
        if anneal is None:
            long_run = facts.epochs >= SHORT_RUN
            anneal = averaged and facts.pretrained and facts.setting == "closed" and long_run
        return dataclasses.replace(self, balance=balance, anneal=anneal)

    def is_due(self, epoch: int, epochs: int) -> bool:
        """Whether weights are computed after this many of all epochs. A tenth of the run that ends within an epoch
        counts from the end of that epoch."""
        if self.refresh != "tenth":
            return self.refresh == "epoch"
        return epoch == 0 or 10 * epoch // epochs > 10 * (epoch - 1) // epochs

    def of_pass(self, outputs: Outputs, known: Tensor, done: float) -> Tensor:
        """N weights from a pass over the target, after a share `done` of the epochs."""
        if self.weights == "none":
            return torch.ones_like(known)
        exponent = 2 * (1 - done) if self.anneal else 1
        weights = self.raw(outputs).pow(exponent)
        if self.balance:
            predicted = outputs.logits.argmax(dim=1)
            return divide_by_class_mean(weights, predicted, outputs.logits.shape[1], known)
        if self.normalise_weights:
            return divide_by_mean(weights, known)
        return weights

    def raw(self, outputs: Outputs) -> Tensor:
        """N weights in [1/K, 1], before they are scaled."""
        if self.weights == "posterior":
            return certainty_weights(outputs.posterior_probs)
        return self.of_logits(outputs.logits)

    def of_logits(self, logits: Tensor) -> Tensor:
        """B weights of the point estimate."""
        return certainty_weights((logits / self.temperature).softmax(dim=1))

    @torch.no_grad()
    def of_batch(
        self,
        features: Tensor,
        logits: Tensor,
        uncertainty: Uncertainty,
        samples: int,
    ) -> Tensor:
        """B weights in [1/K, 1] of a batch as it is, not normalised: Algorithm 1."""
        if self.weights == "posterior":
            return uncertainty.certainty(features, self.temperature, samples)
        return self.of_logits(logits)


def divide_by_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Mean 1 over the samples in the mask."""
    mean = (weights * mask).sum() / mask.sum().clamp_min(1)
    return weights / mean.clamp_min(1e-12)


def divide_by_class_mean(
    weights: Tensor,
    predicted: Tensor,
    classes: int,
    mask: Tensor,
) -> Tensor:
    """Mean 1 within each predicted class, over its samples in the mask."""
    zeros = weights.new_zeros(classes)
    sums = zeros.index_add(0, predicted, weights * mask)
    counts = zeros.index_add(0, predicted, mask)
    means = (sums / counts.clamp_min(1)).clamp_min(1e-12)
    return weights / means[predicted] * (counts[predicted] > 0)
