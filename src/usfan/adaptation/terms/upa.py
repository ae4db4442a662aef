"""UPA, uncertainty-aware pseudo-label filtering: cross-entropy only with the cleanest pseudo-labels of each class.

The labels are SHOT's nearest centroids. Each sample's k nearest neighbours vote with weights exp(s/5), s their cosine;
the winner is the sample's label in the next vote. A pseudo-label is as clean as its share of the last vote, and the
cleanest 60 % of each class are used. Ties, which are common (all k agree), go to the higher probability. The authors'
contrastive term over a second, strongly augmented view is left out.

Shapes: N target samples, K classes, D features, k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.selection import best_of_each_class
from usfan.adaptation.terms.term import Batch, Context, Outputs
from usfan.config import number
from usfan.maths.neighbours import nearest_neighbours

VOTE_TEMPERATURE = 5.0
"""Divides the cosine of a neighbour before it votes."""


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

    def start(self, context: Context) -> None:
        super().start(context)
        self.clean = context.source.probs.new_zeros(context.count)

    def refresh(self, outputs: Outputs) -> None:
        super().refresh(outputs)
        classes = outputs.probs.shape[1]
        near, similarity = nearest_neighbours(outputs.features, self.voters)
        scores = vote_share(self.labels, near, similarity, classes, self.votes)
        label_probs = outputs.probs.gather(1, self.labels[:, None])[:, 0]
        scores = scores.double().round(decimals=5) + 1e-6 * label_probs
        self.clean.copy_(best_of_each_class(scores, self.labels, classes, self.clean_share))

    def mask(self, batch: Batch) -> Tensor:
        return (self.clean * self.guide.known)[batch.samples]


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
