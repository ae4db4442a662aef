"""Open set: push samples judged unknown away from certainty, −σ E[H(p)] over them.

Then L_div is over the known samples only, and the first split is made under the target's BatchNorm statistics: under
the source's, known samples look unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.objectives import global_mean, sample_entropy


@dataclass
class Separation(Term):
    """Raises the entropy of samples judged unknown."""

    separation: float = 1.0
    """σ, weight of the term that raises the entropy of images judged unknown; only if there may be new classes."""

    def __post_init__(self) -> None:
        at_least("separation", self.separation, 0)

    def start(self, context: Context) -> None:
        self.guide, self.total = context.guide, context.runtime.total_or_alone

    def __call__(self, batch: Batch) -> Tensor:
        if not (self.separation and self.guide.rejects):
            return batch.logits.new_zeros(())
        unknown = 1 - self.guide.known[batch.samples]
        return -self.separation * global_mean(sample_entropy(batch.probs), self.total, unknown)
