"""Open set: push samples judged unknown away from certainty, −σ E[H(p)] over them.

Then L_div is over the known samples only, and the first split is made under the target's BatchNorm statistics: under
the source's, known samples look unknown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.terms.term import Batch, Term
from usfan.config import number
from usfan.maths.objectives import recipe_entropy


@dataclass
class Separation(Term):
    """Raises the entropy of samples judged unknown."""

    separation: float | None = number(None)
    """σ, weight of the term that raises the entropy of images judged unknown, if there may be new classes; by default
    1 for a network trained from scratch, else 0."""

    def decide(self, facts: RunFacts) -> Separation:
        weight = self.separation
        if weight is None:
            weight = 0.0 if facts.pretrained else 1.0
        return dataclasses.replace(self, separation=weight)

    def __call__(self, batch: Batch) -> Tensor:
        if not (self.separation and self.guidance.rejects):
            return batch.logits.new_zeros(())
        unknown = 1 - self.context.known(batch)
        return -self.separation * self.context.mean(recipe_entropy(batch.probs), mask=unknown)
