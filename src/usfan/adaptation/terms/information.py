"""Information maximisation over the target: Eqs. 2, 3 and 7, as in `maths.objectives.information_maximization`.

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

from torch import Tensor

from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.adaptation.thresholds import DIVERSE_BATCH, DIVERSITY_MEMORY
from usfan.config import number
from usfan.maths.objectives import diversity, recipe_entropy


@dataclass
class InformationMaximization(Term):
    """Predictions are certain on each sample, and diverse over all."""

    gamma: float = number(0.5, 0, 1)
    """Share of the diversity term: (1 − γ) L_ent + γ L_div."""
    objective_scale: float = number(2.0)
    """Multiplies the information-maximisation loss. With 2 and γ = ½, SHOT-IM is as in its recipe; the paper has 1."""
    diversity_memory: float | None = number(0.0, 0, 0.999)
    """How much of the mean prediction in L_div comes from the whole target at the last refresh, not from the batch;
    by default 0.9 if the method asks for it and a batch holds fewer than four samples per class."""

    def decide(self, facts: RunFacts) -> InformationMaximization:
        memory = self.diversity_memory
        if memory is None:
            memory = 0.0 if facts.per_class >= DIVERSE_BATCH else DIVERSITY_MEMORY
        return dataclasses.replace(self, diversity_memory=memory)

    def start(self, context: Context) -> None:
        self.marginal = context.source.probs.new_full((context.classes,), 1 / context.classes)
        self.target_shares = self.marginal.clone()

    def refresh(self, outputs: Outputs) -> None:
        weights = self.guidance.diverse
        total = (weights[:, None] * outputs.probs).sum(dim=0)
        self.marginal.copy_(total / weights.sum().clamp_min(1e-12))
        if self.guidance.shares is not None:
            self.target_shares.copy_(self.guidance.shares)

    def __call__(self, batch: Batch) -> Tensor:
        probs = batch.probs
        # Eq. 7: E[w H(p)]; with weights 1 Eq. 2: E[H(p)]
        weights = self.guidance.batch_weights(batch)
        mean_entropy = self.context.mean(weights * recipe_entropy(probs), batch)
        # Eq. 3: L_div(p̂)
        mean_probs = self.mean_probs(probs, self.guidance.diverse[batch.samples])
        divergence = diversity(mean_probs, self.target_shares if self.guidance.uneven else None)
        batch.notes.update(loss_entropy=mean_entropy, loss_diversity=divergence)
        loss = (1 - self.gamma) * mean_entropy
        if self.guidance.shares is not None or not self.guidance.uneven:
            loss = loss + self.gamma * divergence
        return self.objective_scale * loss

    def mean_probs(self, probs: Tensor, weights: Tensor) -> Tensor:
        """p̂ of the batch, with its value moved towards that of the whole target."""
        mean = self.context.mean(probs, mask=weights)
        if not self.diversity_memory:
            return mean
        return mean + self.diversity_memory * (self.marginal - mean).detach()
