"""LSC, the local structure clustering of G-SFDA: neighbours in feature space should be predicted alike.

    E[−Σ_j log(p·p_j)]        over the k nearest rows j of the bank

The neighbours are looked up before the batch is written into the bank. A sample's own old row is one of them: the
authors' program means to leave it out, but marks a copy. They train the head too; here it is frozen, because the
posterior belongs to it. Their L_div is a separate term (`terms.information` at γ = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.adaptation.terms.term import Batch
from usfan.config import number
from usfan.maths.neighbours import nearest_in_bank


@dataclass
class LocalStructure(Bank):
    """Predictions agree with the nearest neighbours."""

    neighbours: int = number(2, 1)
    """Nearest samples, by cosine of the features, with which a prediction is compared."""

    @torch.no_grad()
    def look(self, batch: Batch) -> Tensor:
        """B×k×K predictions of the nearest rows, as they are before the batch is written."""
        features = normalize(batch.features, dim=1)
        near = self.probs[nearest_in_bank(features, self.features, self.neighbours)]
        self.write(batch, features)
        return near

    def __call__(self, batch: Batch) -> Tensor:
        logs = torch.log(agreement(batch.probs, self.look(batch)).clamp_min(1e-12))
        return self.mean(-logs.sum(dim=1), batch)
