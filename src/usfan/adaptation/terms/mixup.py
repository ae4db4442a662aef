"""Mixup: convex combinations of two samples of a batch, λ a + (1 − λ) b, λ ~ Beta(α, α).

Partners and λ are functions of (seed, epoch, sample), drawn at the start of an epoch: the step has no randomness of its
own, and a resumed run draws the same. The samples of a batch, in the random order of the epoch, form a ring, and each
is mixed with the next one. Over several processes the ring is that of the global batch.

It mixes whatever the network takes: pixels, or cached features of a frozen backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least


@dataclass
class Mixup(Term):
    """What a term with mixup needs; the term itself defines `__call__`."""

    mixup_alpha: float = 0.2
    """α of Beta(α, α), from which λ is drawn; 0 mixes nothing."""

    def __post_init__(self) -> None:
        at_least("mixup_alpha", self.mixup_alpha, 0)

    def start(self, context: Context) -> None:
        self.guide, self.runtime, self.total = context.guide, context.runtime, context.runtime.total_or_alone
        self.seed = context.seed
        self.keys = torch.zeros(context.count, dtype=torch.long, device=context.device)
        self.shares = context.source.probs.new_ones(context.count)
        """N: place in the epoch's order, and λ."""

    def begin_epoch(self, epoch: int) -> None:
        draw = np.random.default_rng((self.seed, epoch, 1))
        self.keys.copy_(torch.from_numpy(draw.permutation(len(self.keys))))
        if self.mixup_alpha > 0:
            self.shares.copy_(torch.from_numpy(draw.beta(self.mixup_alpha, self.mixup_alpha, len(self.shares))))

    def mixed(self, batch: Batch, shares: Tensor, *values: Tensor) -> list[Tensor]:
        """Each of the values B×… of the batch's samples, mixed with those of their partners."""
        samples = self.runtime.gathered(batch.samples)
        order = self.keys[samples].argsort()
        partners = torch.empty_like(order).index_copy_(0, order, order.roll(-1))
        if self.runtime.world > 1:  # this process's part of the global batch
            partners = partners[(samples == batch.samples[:, None]).int().argmax(dim=1)]
        return [mix(value, self.runtime.gathered(value)[partners], shares) for value in values]


def mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """λ a + (1 − λ) b, with B shares for tensors B×…"""
    share = share.view(-1, *[1] * (one.ndim - 1)).to(one.dtype)
    return share * one + (1 - share) * other
