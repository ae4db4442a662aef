"""The loss of one step of stage 2, for every method and setting.

    loss = s · [(1 − γ) L_ent^ug + γ L_div] + β · CE(pseudo-labels)         s = 2: SHOT-IM is the recipe's at γ = ½

Open set: L_ent and CE over the samples judged known, L_div over all (recipe). With separation σ > 0 the entropy of the
others is raised, −σ (1 − γ) E[H], and L_div is over the known ones.

Shapes: B batch, K classes, D features; `samples` are the B sample numbers, by which the tables of `Guidance` are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.guidance import Guidance, diversity_share
from usfan.adaptation.methods import Method
from usfan.adaptation.weights import raw_weights
from usfan.compute.runtime import Runtime
from usfan.config import AdaptConfig
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.scoring.objectives import (
    diversity,
    global_mean,
    sample_entropy,
    smoothed_cross_entropy,
    soft_cross_entropy,
)

LOSSES = ("loss", "loss_entropy", "loss_diversity", "loss_pseudo")


@dataclass
class Objective:
    """The loss of a batch, from its features and logits and the tables of the epoch."""

    config: AdaptConfig
    method: Method
    guidance: Guidance
    posterior: KroneckerPosterior
    runtime: Runtime
    pseudo_label_weight: Tensor
    """β of this epoch: a tensor, so that a captured step reads the new value."""

    @property
    def separation(self) -> float:
        return (self.config.separation or 0.0) if self.config.open_set else 0.0

    def __call__(self, samples: Tensor, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the figures of `LOSSES` without gradient."""
        config, guide, total = self.config, self.guidance, self.runtime.total_or_alone
        known = guide.known[samples]
        weights = self.weights(samples, features, logits, known)
        probs = self.probs(features, logits)
        entropies = sample_entropy(probs)
        loss_entropy = global_mean(weights * entropies if config.weigh_entropy else entropies, total, known)
        loss = (1 - config.gamma) * loss_entropy
        if self.separation:
            loss = loss - (1 - config.gamma) * self.separation * global_mean(entropies, total, 1 - known)
        loss_diversity = diversity(self.mean_probs(probs, weights, known))
        if not config.partial_set:
            loss = loss + config.gamma * loss_diversity
        loss = config.objective_scale * loss
        loss_pseudo = torch.zeros_like(loss)
        if self.method.pseudo_labels:
            each = smoothed_cross_entropy(logits, guide.pseudo_labels[samples], 0.0)
            each = each * weights if config.weigh_pseudo_labels else each
            loss_pseudo = global_mean(each, total, known)
            loss = loss + self.pseudo_label_weight * loss_pseudo
        if config.neighbours:
            each = (1 - guide.certainty[samples]) * soft_cross_entropy(logits, guide.targets[samples])
            loss = loss + config.neighbour_weight * global_mean(each, total, known)
        return loss, torch.stack([loss, loss_entropy, loss_diversity, loss_pseudo]).detach()

    def probs(self, features: Tensor, logits: Tensor) -> Tensor:
        """B×K, what information is maximised of: the point estimate."""
        return logits.softmax(dim=1)

    def weights(self, samples: Tensor, features: Tensor, logits: Tensor, known: Tensor) -> Tensor:
        """B, from the table of the epoch, or as in Algorithm 1 from the batch as it is."""
        config = self.config
        if self.method.weights == "none" or config.refresh == "epoch":
            return self.guidance.weights[samples]
        kind, tau, draws = self.method.weights, config.temperature, config.samples
        weights = raw_weights(kind, features, logits, self.posterior, temperature=tau, samples=draws)
        weights = weights.pow(config.weight_power)
        if not config.normalise_weights:
            return weights
        return weights / global_mean(weights, self.runtime.total_or_alone, known).clamp_min(1e-12)

    def mean_probs(self, probs: Tensor, weights: Tensor, known: Tensor) -> Tensor:
        """p̂ of the batch; where the config says so, with the value of the whole target's, and the batch's gradient."""
        share_of_each = diversity_share(self.config, weights, known)
        mean = global_mean(probs, self.runtime.total_or_alone, share_of_each)
        share = self.config.diversity_memory or 0.0
        return mean if share == 0 else mean + share * (self.guidance.marginal - mean).detach()
