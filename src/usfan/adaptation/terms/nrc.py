"""NRC, neighbourhood reciprocity clustering: reciprocal neighbours count more, and their neighbours a little.

    E[−Σ_j a_j w_j p·p_j − r Σ_j Σ_m p·p_m]     j: the k nearest rows of the bank, m: the k' nearest rows of each j

a_j is 1 if the sample is itself among the k' nearest of j, else r = 0.1; w_j is 1, or the certainty of row j. The
authors train the head too; here it is frozen, because the posterior belongs to it. Their L_div is a term of its own
(`terms.information` at γ = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.neighbours import nearest_in_bank


@dataclass
class Reciprocity(Bank):
    """Predicted as the neighbours are, most of all as the reciprocal ones."""

    neighbours: int = 2
    """Nearest samples, by cosine of the features, with which a prediction is compared."""
    further_neighbours: int = 3
    """Neighbours of each neighbour: they decide who is reciprocal, and are compared with too."""
    weak_affinity: float = 0.1
    """r, affinity of neighbours that are not reciprocal, and of neighbours' neighbours."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("further_neighbours", self.further_neighbours, 1)
        at_least("weak_affinity", self.weak_affinity, 0)

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        further = self.further(near)
        strength = affinity(batch.samples, further, self.weak_affinity) * self.certainty[near]
        each = (strength * agreement(batch.probs, self.probs[near])).sum(dim=1)
        beyond = agreement(batch.probs, self.probs[further.flatten(1)]).sum(dim=1)
        return self.mean(-each - self.weak_affinity * beyond, batch)

    def further(self, near: Tensor) -> Tensor:
        """Positions B×k×k' of the neighbours of the neighbours B×k."""
        rows = near.flatten()
        found = nearest_in_bank(self.features[rows], self.features, self.further_neighbours, rows)
        return found.reshape(*near.shape, found.shape[1])


def affinity(samples: Tensor, further: Tensor, weak: float) -> Tensor:
    """a B×k: 1 if the sample is among the neighbours B×k×k' of its neighbour, else `weak`."""
    reciprocal = (further == samples[:, None, None]).any(dim=-1)
    return torch.where(reciprocal, 1.0, weak)
