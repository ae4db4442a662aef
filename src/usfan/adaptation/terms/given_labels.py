"""Cross-entropy with the labels that the user gave for a few target images: w · E[CE(p, label)].

In every step some of these images, or all if they are few, go through the network beside the batch (`batch.beside`), so
each label is heard in every epoch many times. The other terms see the batch alone. What a pass over the target says of
these images is replaced by their labels before terms are refreshed (`adaptation.given`): centroids, banks, clusters and
weights then rest on them.

Shapes: L labelled images, N target samples, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy


@dataclass
class GivenLabels(Term):
    """The term; `given_label_weight` is a setting of the run, not of a method."""

    given_label_weight: float = 1.0
    """Weight of the cross-entropy with the labels of --labels."""

    def __post_init__(self) -> None:
        at_least("given_label_weight", self.given_label_weight, 0)

    def start(self, context: Context) -> None:
        assert context.given is not None
        self.labels = torch.zeros(context.count, dtype=torch.long, device=context.device)
        context.given.pin(self.labels)
        self.total = context.runtime.total_or_alone

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.beside is not None
        samples, logits = batch.beside
        each = smoothed_cross_entropy(logits, self.labels[samples], 0.0)
        loss = global_mean(each, self.total)
        batch.notes["loss_given"] = loss
        return self.given_label_weight * loss
