"""LSC, the local structure clustering of G-SFDA: neighbours in feature space should be predicted alike.

    E[−Σ_j w_j log(p·p_j)]        over the k nearest rows j of the bank; w_j = 1, or the certainty of row j

The authors train the head too; here it is frozen, because the posterior belongs to it. Their L_div is a term of its own
(`terms.information` at γ = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.compute.loop import Batch
from usfan.scoring.objectives import EPSILON


@dataclass
class LocalStructure(Bank):
    """Predicted as the nearest neighbours are."""

    neighbours: int = 2
    """Nearest samples, by cosine of the features, with which a prediction is compared."""

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        return self.mean(local_structure(batch.probs, self.probs[near], self.certainty[near]), batch)


def local_structure(probs: Tensor, near: Tensor, strength: Tensor) -> Tensor:
    """−Σ_j w_j log(p·p_j) per sample: probs B×K, near B×k×K, strength B×k."""
    return -(strength * torch.log(agreement(probs, near) + EPSILON)).sum(dim=1)
