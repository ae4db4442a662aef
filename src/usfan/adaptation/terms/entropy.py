"""TENT: the entropy of each prediction, E[H(p)], with no other term; BatchNorm's scales and shifts move."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.term import Batch, Term
from usfan.maths.objectives import soft_cross_entropy


@dataclass
class Entropy(Term):
    """Predictions are certain on each sample."""

    def __call__(self, batch: Batch) -> Tensor:
        loss = self.context.mean(soft_cross_entropy(batch.logits, batch.probs), batch)
        batch.notes["loss_entropy"] = loss
        return loss
