"""UPA, uncertainty-aware pseudo-label filtering: cross-entropy only with the cleanest pseudo-labels of each class.

The labels are SHOT's nearest centroids. Each sample's k nearest neighbours vote with weights exp(s/5), s their cosine;
the winner is the sample's label in the next vote. A pseudo-label is as clean as its share of the last vote, and the
cleanest 60 % of each class are used. Shares within 1e-4 of 0 or 1 are ties, and the first images win.

Beside it, clean samples of one label are drawn together, the others of the batch apart: the supervised contrastive loss
of the logits of two views, one of them stronger (`views.strong_view`; on cached features the view itself).

    β · E[CE(p, label) | clean] + c · E[contrastive_loss]

The authors draw the samples of the cross-entropy for themselves, with replacement, blur some of the stronger views and
change their hue, and warm the learning rate up.

Shapes: N target samples, B batch, K classes, D features, k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.selection import best_of_each_class
from usfan.adaptation.terms.term import Batch, Context, Outputs
from usfan.config import number
from usfan.data.views import strong_view
from usfan.maths.neighbours import nearest_rows, unit_features
from usfan.maths.objectives import contrastive_loss

VOTE_TEMPERATURE = 5.0
"""Divides the cosine of a neighbour before it votes."""
TIED = 1e-4
"""Shares of the vote nearer than this to 0 or 1 are equal."""


@dataclass
class CleanLabels(PseudoLabels):
    """Nearest-centroid pseudo-labels, of which neighbours choose the clean ones."""

    pseudo_label_weight: float | None = number(0.3)
    """β, weight of the pseudo-label loss."""
    voters: int = number(4, 1)
    """Nearest neighbours that vote on a pseudo-label."""
    votes: int = number(2, 1)
    """How many times they vote, each time with the labels that won before."""
    clean_share: float = number(0.6, 0, 1)
    """Share of each class whose pseudo-labels are used."""
    contrast_weight: float = number(1.0)
    """c, weight of the contrastive loss."""
    contrast_temperature: float = number(0.1, 1e-3)
    """Divides the cosines in the contrastive loss."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.clean = context.source.probs.new_zeros(context.count)
        self.epoch = torch.zeros((), dtype=torch.long, device=context.device)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.epoch.fill_(epoch)

    def refresh(self, outputs: Outputs) -> None:
        super().refresh(outputs)
        classes = outputs.probs.shape[1]
        near, similarity = nearest_rows(unit_features(outputs.features)[:, :-1], self.voters)
        scores = vote_share(self.labels, near, similarity, classes, self.votes)
        scores = scores.clamp(TIED, 1 - TIED)
        self.clean.copy_(best_of_each_class(scores, self.labels, classes, self.clean_share))

    def mask(self, batch: Batch) -> Tensor:
        return (self.clean * self.guidance.known)[batch.samples]

    def __call__(self, batch: Batch) -> Tensor:
        return super().__call__(batch) + self.contrast_weight * self.contrast(batch)

    def contrast(self, batch: Batch) -> Tensor:
        """The mean over the global batch."""
        context = self.context
        second = batch.logits
        if batch.images.ndim == 4:
            images = strong_view(batch.images, batch.samples, context.seed, self.epoch)
            _, second = batch.forward(images)
        samples = context.gather(batch.samples)
        clean = (self.clean * self.guidance.known)[samples] > 0
        labels = self.labels[samples]
        alike = (labels[:, None] == labels) & clean[:, None] & clean
        views = (context.whole(batch.logits, batch), context.whole(second, batch))
        loss = contrastive_loss(*views, alike, self.contrast_temperature).mean()
        batch.notes["loss_contrast"] = loss
        return loss


def vote_share(
    labels: Tensor,
    near: Tensor,
    similarity: Tensor,
    classes: int,
    votes: int,
) -> Tensor:
    """N: the share of the last vote that each sample's label gets, from neighbours N×k and their similarities."""
    strength = normalize((similarity / VOTE_TEMPERATURE).exp(), p=1, dim=1)
    current = labels
    for _ in range(votes):
        table = strength.new_zeros(len(labels), classes)
        table.scatter_add_(1, current[near], strength)
        current = table.argmax(dim=1)
    return table.gather(1, labels[:, None])[:, 0]
