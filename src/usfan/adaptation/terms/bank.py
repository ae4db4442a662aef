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

from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.config import number
from usfan.maths.neighbours import nearest_in_bank


@dataclass
class Bank(Term):
    """The bank of a term; the term itself defines `__call__`."""

    neighbours: int = number(3, 1)
    """Nearest samples, by cosine of the features, with which a prediction is compared."""

    def start(self, context: Context) -> None:
        self.features = torch.zeros_like(context.source.features)
        self.probs = torch.zeros_like(context.source.probs)

    def refresh(self, outputs: Outputs) -> None:
        self.features.copy_(normalize(outputs.features, dim=1))
        self.probs.copy_(outputs.probs)

    @torch.no_grad()
    def look(self, batch: Batch) -> Tensor:
        """Write the batch into the bank; positions B×k of each sample's nearest neighbours in it."""
        features = normalize(batch.features, dim=1)
        self.write(batch, features)
        return nearest_in_bank(features, self.features, self.neighbours, batch.samples)

    def write(self, batch: Batch, features: Tensor) -> None:
        rows = self.context.gather(batch.samples)
        self.features.index_copy_(0, rows, self.context.gather(features))
        self.probs.index_copy_(0, rows, self.context.gather(batch.probs.detach()))

    def mean(self, each: Tensor, batch: Batch) -> Tensor:
        """The mean over the samples judged known, noted for the log."""
        loss = self.context.mean(each, batch)
        batch.notes["loss_neighbours"] = loss
        return loss


def agreement(probs: Tensor, near: Tensor) -> Tensor:
    """p·p_j, B×k: how likely a sample B×K and its neighbour B×k×K are to be of one class."""
    return torch.einsum("bk,bjk->bj", probs, near)
