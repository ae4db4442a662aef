"""NRC, neighbourhood reciprocity clustering: reciprocal neighbours count more, and their neighbours a little.

    E[−Σ_j a_j p·p_j − r Σ_j Σ_m p·p_m]     j: the k nearest rows of the bank, m: the k' nearest rows of each j

a_j is 1 if the sample is itself among the k' nearest of j, else r = 0.1. The authors train the head too; here it is
frozen, because the posterior belongs to it. Their L_div is a separate term (`terms.information` at γ = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.adaptation.terms.term import Batch
from usfan.config import number
from usfan.maths.neighbours import nearest_in_bank


@dataclass
class Reciprocity(Bank):
    """Predictions agree with the neighbours, most of all with the reciprocal ones."""

    neighbours: int = number(2, 1)
    """Nearest samples, by cosine of the features, with which a prediction is compared."""
    further_neighbours: int = number(3, 1)
    """Neighbours of each neighbour: they decide who is reciprocal, and are compared with too."""
    weak_affinity: float = number(0.1)
    """r, affinity of neighbours that are not reciprocal, and of neighbours' neighbours."""

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        further = self.further(near)
        strength = affinity(batch.samples, further, self.weak_affinity)
        each = (strength * agreement(batch.probs, self.probs[near])).sum(dim=1)
        beyond = agreement(batch.probs, self.probs[further.flatten(1)]).sum(dim=1)
        return self.mean(-each - self.weak_affinity * beyond, batch)

    def further(self, near: Tensor) -> Tensor:
        """Positions B×k×k' of the neighbours of the neighbours B×k."""
        rows = near.flatten()
        queries = self.features[rows]
        positions = nearest_in_bank(queries, self.features, self.further_neighbours, rows)
        return positions.reshape(*near.shape, positions.shape[1])


def affinity(
    samples: Tensor,
    further: Tensor,
    weak: float,
) -> Tensor:
    """a B×k: 1 if the sample is among the neighbours B×k×k' of its neighbour, else `weak`."""
    reciprocal = (further == samples[:, None, None]).any(dim=-1)
    return torch.where(reciprocal, 1.0, weak)
