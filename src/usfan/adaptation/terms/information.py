"""Information maximisation over the target: Eqs. 2, 3 and 7, `scoring.objectives.information_maximization`.

    s · [(1 − γ) E[w H(p)] + γ L_div(p̂)]                    s = 2, γ = ½ and w = 1: SHOT-IM

E[w H(p)] is Eq. 7. It is the mean over the samples judged known; the weights w come from `adaptation.certainty`. L_div
is Eq. 3. If classes may be missing, it compares p̂ with the class shares that another term has estimated; if there are
none, it is left out, as in SHOT's recipe. In closed set p̂ is the mean over all samples. A batch of 64 holds two
samples of each of 31 classes, too few to be diverse by itself. So the value of p̂ mixes the batch's mean with that of
the whole target at the last refresh (`diversity_memory`); the gradient is the batch's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.facts import Facts
from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least, between
from usfan.scoring.objectives import diversity, global_mean, information_maximization, sample_entropy
from usfan.scoring.outputs import Outputs

ENOUGH_PER_CLASS = 4
"""Samples of each class in a batch, on average, that are enough to compute L_div over the batch alone."""


@dataclass
class InformationMaximization(Term):
    """Confident on each sample, diverse over all."""

    gamma: float = 0.5
    """Share of the diversity term: (1 − γ) L_ent + γ L_div."""
    objective_scale: float = 2.0
    """Multiplies the information-maximisation loss. With 2 and γ = ½, SHOT-IM is as in its recipe; the paper has 1."""
    diversity_memory: float | None = 0.0
    """How much of the mean prediction in L_div comes from the whole target at the last refresh, not from the batch;
    by default 0.9 if the method asks for it and a batch holds fewer than four samples per class."""

    def __post_init__(self) -> None:
        between("gamma", self.gamma, 0, 1)
        at_least("objective_scale", self.objective_scale, 0)
        between("diversity_memory", self.diversity_memory or 0.0, 0, 0.999)

    def decide(self, facts: Facts) -> InformationMaximization:
        if self.diversity_memory is not None:
            return self
        enough = facts.per_class >= ENOUGH_PER_CLASS
        return dataclasses.replace(self, diversity_memory=0.0 if enough else 0.9)

    def start(self, context: Context) -> None:
        self.guide, self.total = context.guide, context.runtime.total_or_alone
        self.marginal = context.source.probs.new_full((context.classes,), 1 / context.classes)
        self.asked = self.marginal.clone()

    def refresh(self, outputs: Outputs) -> None:
        share = self.guide.diverse
        self.marginal.copy_((share[:, None] * outputs.probs).sum(dim=0) / share.sum().clamp_min(1e-12))
        if self.guide.shares is not None:
            self.asked.copy_(self.guide.shares)

    def __call__(self, batch: Batch) -> Tensor:
        samples = batch.samples
        known, weights = self.guide.known[samples], self.weights(batch)

        def parts(probs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
            entropies = sample_entropy(probs)
            # Eq. 7: E[w H(p)]; without weights Eq. 2: E[H(p)]
            mean_entropy = global_mean(entropies if weights is None else weights * entropies, self.total, known)
            # Eq. 3: L_div(p̂)
            mean_probs = self.mean_probs(probs, self.guide.diverse[samples])
            divergence = diversity(mean_probs, self.asked if self.guide.uneven else None)
            batch.notes.update(loss_entropy=mean_entropy, loss_diversity=divergence)
            dropped = self.guide.uneven and self.guide.shares is None
            return mean_entropy, torch.zeros_like(divergence) if dropped else divergence

        return self.objective_scale * information_maximization(batch.logits, weights, self.gamma, parts=parts)

    def weights(self, batch: Batch) -> Tensor:
        """B weights of the entropy term."""
        weights: Tensor = self.guide.batch_weights(batch)
        return weights

    def mean_probs(self, probs: Tensor, share: Tensor) -> Tensor:
        """p̂ of the batch, with its value moved towards that of the whole target."""
        mean = global_mean(probs, self.total, share)
        memory = self.diversity_memory or 0.0
        return mean if memory == 0 else mean + memory * (self.marginal - mean).detach()
