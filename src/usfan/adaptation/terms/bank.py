"""A bank: the normalised features and predictions of all target samples, for terms that compare a sample with its
neighbours.

Every pass over the target writes all rows, and every step writes the rows of its batch before it looks up neighbours.
The bank carries no gradient. Over several processes each of them writes the rows of the global batch.

Shapes: N target samples, B batch, K classes, D features, k neighbours. Memory: N × (D + K).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usfan.adaptation.certainty import divide_by_mean
from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.posterior.predictive import certainty_weights
from usfan.scoring.neighbours import nearest_in_bank
from usfan.scoring.objectives import global_mean
from usfan.scoring.outputs import Outputs


@dataclass
class Bank(Term):
    """What a term with a bank needs; the term itself defines `__call__`."""

    neighbours: int = 3
    """Nearest samples, by cosine of the features, with which a prediction is compared."""
    certain: bool = False
    """Weigh each neighbour by the certainty of its posterior predictive (mean 1 over the target)."""

    def __post_init__(self) -> None:
        at_least("neighbours", self.neighbours, 1)

    def start(self, context: Context) -> None:
        self.guide, self.runtime, self.total = context.guide, context.runtime, context.runtime.total_or_alone
        self.features, self.probs = torch.zeros_like(context.source.features), torch.zeros_like(context.source.probs)
        self.certainty = self.probs.new_ones(context.count)

    def refresh(self, outputs: Outputs) -> None:
        self.features.copy_(normalize(outputs.features, dim=1))
        self.probs.copy_(outputs.probs)
        if self.certain:
            self.certainty.copy_(divide_by_mean(certainty_weights(outputs.posterior_probs), self.guide.known))

    @torch.no_grad()
    def look(self, batch: Batch) -> Tensor:
        """Write the batch into the bank; positions B×k of each sample's nearest neighbours in it."""
        own = normalize(batch.features, dim=1)
        rows = self.runtime.gathered(batch.samples)
        self.features.index_copy_(0, rows, self.runtime.gathered(own))
        self.probs.index_copy_(0, rows, self.runtime.gathered(batch.probs))
        return nearest_in_bank(own, self.features, self.neighbours, batch.samples)

    def mean(self, each: Tensor, batch: Batch) -> Tensor:
        """The mean over the samples judged known, noted for the log."""
        loss = global_mean(each, self.total, self.guide.known[batch.samples])
        batch.notes["loss_neighbours"] = loss
        return loss


def agreement(probs: Tensor, near: Tensor) -> Tensor:
    """p·p_j, B×k: how likely a sample B×K and its neighbour B×k×K are to be of one class."""
    return torch.einsum("bk,bjk->bj", probs, near)
