"""Mixup: convex combinations of two samples of a batch, λ a + (1 − λ) b, λ ~ Beta(α, α).

Partners and λ are functions of (seed, epoch, sample), drawn at the start of an epoch: the step itself has no
randomness, and a resumed run draws the same. The samples of a batch, in the random order of the epoch, form a ring, and
each is mixed with the next one. Over several processes the ring is that of the global batch.

It mixes whatever the network takes: pixels, or cached features of a frozen backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from usfan.adaptation.terms.term import Batch, Context, Term
from usfan.config import number


@dataclass
class Mixup(Term):
    """The mixup of a term; the term itself defines `__call__`."""

    mixup_alpha: float = number(0.2, 1e-3)
    """α of Beta(α, α), from which λ is drawn."""

    def start(self, context: Context) -> None:
        self.keys = torch.zeros(context.count, dtype=torch.long, device=context.device)
        """N: position in the epoch's order."""
        self.shares = context.source.probs.new_ones(context.count)
        """N: λ."""

    def begin_epoch(self, epoch: int) -> None:
        draw = np.random.default_rng((self.context.seed, epoch, 1))
        count = self.context.count
        self.keys.copy_(torch.from_numpy(draw.permutation(count)))
        shares = draw.beta(self.mixup_alpha, self.mixup_alpha, count)
        self.shares.copy_(torch.from_numpy(shares))

    def mixed(self, batch: Batch, shares: Tensor, *values: Tensor) -> list[Tensor]:
        """Each of the values B×… of the batch's samples, mixed with those of their partners."""
        context = self.context
        order = self.keys[context.gather(batch.samples)].argsort()
        partners = torch.empty_like(order).index_copy_(0, order, order.roll(-1))
        partners = context.local(partners, batch)
        return [mix(value, context.gather(value)[partners], shares) for value in values]


def mix(
    one: Tensor,
    other: Tensor,
    share: Tensor,
) -> Tensor:
    """λ a + (1 − λ) b, with B shares for tensors B×…"""
    share = share.view(-1, *[1] * (one.ndim - 1)).to(one.dtype)
    return share * one + (1 - share) * other
