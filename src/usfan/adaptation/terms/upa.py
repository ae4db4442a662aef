"""UPA, uncertainty-aware pseudo-label filtering: cross-entropy only with the cleanest pseudo-labels of each class.

The labels are SHOT's nearest centroids. Each sample's k nearest neighbours vote with weights exp(s/5), s their cosine;
the winner is the sample's label in the next vote. A pseudo-label is as clean as its share of the last vote, and the
cleanest 60 % of each class are used. Ties, which are common (all k agree), go to the higher probability. The authors'
contrastive term over a second, strongly augmented view is left out.

Shapes: N target samples, K classes, D features, k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.selection import best_of_each_class
from usfan.adaptation.terms.term import Context
from usfan.compute.loop import Batch
from usfan.config_checks import at_least, between
from usfan.posterior.predictive import certainty_weights
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy
from usfan.scoring.outputs import Outputs

TEMPERATURE = 5.0
"""Of the votes."""


@dataclass
class CleanLabels(PseudoLabels):
    """Nearest-centroid pseudo-labels, of which neighbours choose the clean ones."""

    pseudo_label_weight: float | None = 0.3
    """β, weight of the pseudo-label loss."""
    voters: int = 4
    """Nearest neighbours that vote on a pseudo-label."""
    votes: int = 2
    """How many times they vote, each time with the labels that won before."""
    clean_share: float = 0.6
    """Share of each class whose pseudo-labels are used."""
    certain: bool = False
    """Multiply the share of the vote by the certainty of the posterior predictive."""

    def __post_init__(self) -> None:
        at_least("voters", self.voters, 1)
        at_least("votes", self.votes, 1)
        between("clean_share", self.clean_share, 0, 1)

    def start(self, context: Context) -> None:
        super().start(context)
        self.clean = context.source.probs.new_zeros(context.count)

    def refresh(self, outputs: Outputs) -> None:
        super().refresh(outputs)
        near, similarity = nearest_neighbours(outputs.features, self.voters)
        scores = vote_share(self.labels, near, similarity, outputs.probs.shape[1], self.votes)
        if self.certain:
            scores = scores * certainty_weights(outputs.posterior_probs)
        scores = scores.double().round(decimals=5) + 1e-6 * outputs.probs.gather(1, self.labels[:, None])[:, 0]
        self.clean.copy_(best_of_each_class(scores, self.labels, outputs.probs.shape[1], self.clean_share))

    def __call__(self, batch: Batch) -> Tensor:
        each = smoothed_cross_entropy(batch.logits, self.labels[batch.samples], 0.0)
        loss = global_mean(each, self.total, (self.clean * self.guide.known)[batch.samples])
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss


def vote_share(labels: Tensor, near: Tensor, similarity: Tensor, classes: int, votes: int) -> Tensor:
    """N: the share of the last vote that each sample's label gets, from neighbours N×k and their similarities."""
    strength = normalize((similarity / TEMPERATURE).exp(), p=1, dim=1)
    current, table = labels, strength.new_zeros(len(labels), classes)
    for _ in range(votes):
        table = torch.zeros_like(table).scatter_add_(1, current[near], strength)
        current = table.argmax(dim=1)
    return table.gather(1, labels[:, None])[:, 0]
