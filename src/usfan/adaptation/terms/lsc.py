"""LSC, the local structure clustering of G-SFDA: neighbours in feature space should be predicted alike.

    E[−Σ_j log(p·p_j)]        over the k nearest rows j of the bank

The authors train the head too; here it is frozen, because the posterior belongs to it. Their L_div is a separate term
(`terms.information` at γ = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.adaptation.terms.term import Batch
from usfan.config import number
from usfan.maths.objectives import EPSILON


@dataclass
class LocalStructure(Bank):
    """Predictions agree with the nearest neighbours."""

    neighbours: int = number(2, 1)
    """Nearest samples, by cosine of the features, with which a prediction is compared."""

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        logs = torch.log(agreement(batch.probs, self.probs[near]) + EPSILON)
        return self.mean(-logs.sum(dim=1), batch)
