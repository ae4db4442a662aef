"""Cross-entropy with pseudo-labels that are refreshed every epoch: β · E[CE(p, label)], over the samples judged known.

The labels are SHOT's nearest centroids (`adaptation.centroids`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.run_facts import RunFacts
from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.adaptation.thresholds import SHORT_RUN
from usfan.config import number
from usfan.maths.objectives import smoothed_cross_entropy


@dataclass
class PseudoLabels(Term):
    """Nearest-centroid pseudo-labels."""

    pseudo_label_weight: float | None = number(None)
    """β, weight of the pseudo-label loss; by default 0.3, or 0.1 for a network trained from scratch (SHOT's values for
    objects and for digits)."""
    pseudo_label_warmup: int | None = number(0)
    """Epochs before the pseudo-label loss begins."""

    def decide(self, facts: RunFacts) -> PseudoLabels:
        weight = self.pseudo_label_weight
        if weight is None:
            weight = 0.3 if facts.pretrained else 0.1
        warmup = self.pseudo_label_warmup
        if warmup is None:
            # the first labels of a network from scratch come from features under foreign statistics
            long_run = facts.epochs >= SHORT_RUN
            warmup = int(not facts.pretrained and facts.setting == "closed" and long_run)
        return dataclasses.replace(self, pseudo_label_weight=weight, pseudo_label_warmup=warmup)

    def start(self, context: Context) -> None:
        self.labels = torch.zeros(context.count, dtype=torch.long, device=context.device)
        self.weight = torch.zeros((), device=context.device)

    def begin_epoch(self, epoch: int) -> None:
        waiting = epoch < (self.pseudo_label_warmup or 0)
        self.weight.fill_(0.0 if waiting else self.pseudo_label_weight or 0.0)

    def refresh(self, outputs: Outputs) -> None:
        self.labels.copy_(self.find(outputs))
        self.context.pin(self.labels)

    def find(self, outputs: Outputs) -> Tensor:
        """N labels; the term of another method may find them elsewhere."""
        return nearest_centroid(
            outputs.features,
            outputs.probs,
            threshold=self.guidance.rare,
            mask=self.guidance.known_mask,
        )

    def mask(self, batch: Batch) -> Tensor:
        """B: the weight of each sample in the mean."""
        return self.context.known(batch)

    def __call__(self, batch: Batch) -> Tensor:
        each = smoothed_cross_entropy(batch.logits, self.labels[batch.samples], 0.0)
        loss = self.context.mean(each, mask=self.mask(batch))
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss
