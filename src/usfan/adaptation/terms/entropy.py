"""TENT: the entropy of each prediction, E[H(p)], with no other term; BatchNorm's scales and shifts move.

With a gate g < 1 it leaves out samples with H > g ln K, as EATA does with g = 0.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.config import number
from usfan.maths.objectives import entropy, recipe_entropy


@dataclass
class Entropy(Term):
    """Predictions are certain on each sample."""

    entropy_gate: float = number(1.0, 0, 1)
    """Samples with an entropy above this share of ln K are left out: 1 leaves out none, 0.4 is EATA's."""
    certain: bool = False
    """Ask the gate about the posterior predictive at the last refresh instead of the batch's predictions."""

    def start(self, context: Context) -> None:
        self.doubt = context.source.probs.new_zeros(context.count)

    def refresh(self, outputs: Outputs) -> None:
        self.doubt.copy_(entropy(outputs.posterior_probs))

    def __call__(self, batch: Batch) -> Tensor:
        each = recipe_entropy(batch.probs)
        mask = self.context.known(batch)
        if self.entropy_gate < 1:
            doubt = self.doubt[batch.samples] if self.certain else each.detach()
            most = self.entropy_gate * math.log(self.context.classes)
            mask = mask * (doubt <= most)
        loss = self.context.mean(each, mask=mask)
        batch.notes["loss_entropy"] = loss
        return loss
