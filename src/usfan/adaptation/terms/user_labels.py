"""Cross-entropy with the labels that the user gave for a few target images: w · E[CE(p, label)].

In every step some of these images, or all if they are few, go through the network beside the batch (`batch.beside`), so
each label counts many times in every epoch. The other terms see the batch alone. Before terms are refreshed, these
labels replace the predictions of a pass over the target (`adaptation.user_labels`): centroids, banks, clusters and
weights then rest on them.

Shapes: L labelled images, N target samples, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.term import Batch, Context, Term
from usfan.config import number
from usfan.maths.objectives import smoothed_cross_entropy


@dataclass
class UserLabelsTerm(Term):
    """The term; `given_label_weight` is a setting of the run, not of a method."""

    given_label_weight: float = number(1.0)
    """Weight of the cross-entropy with the labels of --labels."""

    def start(self, context: Context) -> None:
        self.labels = torch.zeros(context.count, dtype=torch.long, device=context.device)
        context.pin(self.labels)

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.beside is not None
        samples, logits = batch.beside
        loss = self.context.mean(smoothed_cross_entropy(logits, self.labels[samples], 0.0))
        batch.notes["loss_given"] = loss
        return self.given_label_weight * loss
