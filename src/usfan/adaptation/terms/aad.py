"""AaD, attracting and dispersing: like the neighbours, unlike the rest of the batch.

    E[−Σ_j p·p_j + α Σ_m p·p_m],   α = (1 + 10 t)^−β        j: the k nearest rows of the bank
                                                            m: the other samples of the batch

t is the share of the steps done. β is 1 for Office-31 and 5 for VisDA-C; 0 keeps α = 1, as for Office-Home. The authors
train the head too; here it is frozen, because the posterior belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.adaptation.terms.term import Batch, Context
from usfan.config import number


@dataclass
class AttractDisperse(Bank):
    """Predictions agree with the neighbours, and differ from the rest of the batch."""

    dispersion_decay: float = number(1.0)
    """β, how fast the weight of the dispersing part decays; 0 keeps it at 1."""

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        similarity = agreement(batch.probs, self.probs[near])
        attracted = self.mean(-similarity.sum(dim=1), batch)
        dispersed = dispersion(self.context, batch.probs, self.context.known(batch))
        batch.notes["loss_dispersion"] = dispersed
        return attracted + decay(batch, self.dispersion_decay) * dispersed


def decay(batch: Batch, power: float) -> Tensor:
    """α = (1 + 10 t)^−β."""
    return (1 + 10 * batch.done) ** -power


def dispersion(
    context: Context,
    probs: Tensor,
    known: Tensor,
) -> Tensor:
    """E[Σ_m p·p_m] over the known samples, m the other ones: (‖Σ p‖² − Σ ‖p‖²) / B, without B×B products."""
    probs = known[:, None] * probs
    total = context.sum(probs)
    squares = context.sum(probs.square().sum(dim=1))
    count = context.sum(known).clamp_min(1)
    return (total.square().sum() - squares) / count
