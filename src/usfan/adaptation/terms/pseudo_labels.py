"""Cross-entropy with pseudo-labels that are refreshed every epoch: β · E[CE(p, label)], over the samples judged known.

The labels are SHOT's nearest centroids (`adaptation.centroids`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.facts import Facts
from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy
from usfan.scoring.outputs import Outputs

SHORT = 4
"""A run of fewer epochs does not wait for its pseudo-labels."""


@dataclass
class PseudoLabels(Term):
    """Nearest-centroid pseudo-labels."""

    pseudo_label_weight: float | None = None
    """β, weight of the pseudo-label loss; by default 0.3, or 0.1 for a network trained from scratch (SHOT's values for
    objects and for digits)."""
    pseudo_label_warmup: int | None = 0
    """Epochs before the pseudo-label loss begins."""

    def __post_init__(self) -> None:
        at_least("pseudo_label_weight", self.pseudo_label_weight or 0.0, 0)
        at_least("pseudo_label_warmup", self.pseudo_label_warmup or 0, 0)

    def decide(self, facts: Facts) -> PseudoLabels:
        weight, wait = self.pseudo_label_weight, self.pseudo_label_warmup
        if weight is None:
            weight = 0.3 if facts.pretrained else 0.1
        if wait is None:  # the first labels of a network from scratch come from features under foreign statistics
            late = not facts.pretrained and facts.setting == "closed" and facts.epochs >= SHORT
            wait = int(late)
        return dataclasses.replace(self, pseudo_label_weight=weight, pseudo_label_warmup=wait)

    def start(self, context: Context) -> None:
        self.guide, self.total, self.given = context.guide, context.runtime.total_or_alone, context.given
        self.labels = torch.zeros(context.count, dtype=torch.long, device=context.device)
        self.weight = torch.zeros((), device=context.device)

    def begin_epoch(self, epoch: int) -> None:
        waiting = epoch < (self.pseudo_label_warmup or 0)
        self.weight.fill_(0.0 if waiting else self.pseudo_label_weight or 0.0)

    def refresh(self, outputs: Outputs) -> None:
        self.labels.copy_(self.find(outputs))
        if self.given is not None:
            self.given.pin(self.labels)

    def find(self, outputs: Outputs) -> Tensor:
        """N labels; the term of another method may find them elsewhere."""
        guide = self.guide
        return nearest_centroid(outputs.features, outputs.probs, threshold=guide.rare, mask=guide.known_mask)

    def __call__(self, batch: Batch) -> Tensor:
        each = smoothed_cross_entropy(batch.logits, self.labels[batch.samples], 0.0)
        loss = global_mean(each, self.total, self.guide.known[batch.samples])
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss
