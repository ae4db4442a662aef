"""Open set: push samples judged unknown away from certainty, −σ E[H(p)] over them.

Then L_div is over the known samples only, and the first split is made under the target's BatchNorm statistics: under
the source's, known samples look unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.term import Batch, Term
from usfan.config import number
from usfan.maths.objectives import recipe_entropy


@dataclass
class Separation(Term):
    """Raises the entropy of samples judged unknown."""

    separation: float = number(1.0)
    """σ, weight of the term that raises the entropy of images judged unknown; only if there may be new classes."""

    def __call__(self, batch: Batch) -> Tensor:
        if not (self.separation and self.guide.rejects):
            return batch.logits.new_zeros(())
        unknown = 1 - self.context.known(batch)
        return -self.separation * self.context.mean(recipe_entropy(batch.probs), mask=unknown)
