"""TENT: the entropy of each prediction, E[H(p)], with no other term; BatchNorm's scales and shifts move.

With a gate g < 1 it leaves out samples with H > g ln K, as EATA does with g = 0.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import between
from usfan.posterior.predictive import entropy
from usfan.scoring.objectives import global_mean, sample_entropy
from usfan.scoring.outputs import Outputs


@dataclass
class Entropy(Term):
    """Confident on each sample."""

    entropy_gate: float = 1.0
    """Samples with an entropy above this share of ln K are left out: 1 leaves out none, 0.4 is EATA's."""
    certain: bool = False
    """Ask the gate about the posterior predictive at the last refresh instead of the batch's own predictions."""

    def __post_init__(self) -> None:
        between("entropy_gate", self.entropy_gate, 0, 1)

    def start(self, context: Context) -> None:
        self.guide, self.total = context.guide, context.runtime.total_or_alone
        self.doubt = context.source.probs.new_zeros(context.count)
        self.most = self.entropy_gate * math.log(context.classes)

    def refresh(self, outputs: Outputs) -> None:
        self.doubt.copy_(entropy(outputs.posterior_probs))

    def __call__(self, batch: Batch) -> Tensor:
        each = sample_entropy(batch.probs)
        mask = self.guide.known[batch.samples]
        if self.entropy_gate < 1:
            doubt = self.doubt[batch.samples] if self.certain else each.detach()
            mask = mask * (doubt <= self.most)
        loss = global_mean(each, self.total, mask)
        batch.notes["loss_entropy"] = loss
        return loss
