"""AaD, attracting and dispersing: like the neighbours, unlike the rest of the batch.

    E[−Σ_j w_j p·p_j + α Σ_m p·p_m],   α = (1 + 10 t)^−β        j: the k nearest rows of the bank; w_j = 1, or the
                                                                certainty of row j; m: the other samples of the batch

t is the share of the steps done. β is 1 for Office-31 and 5 for VisDA-C; 0 keeps α = 1, as for Office-Home. The authors
train the head too; here it is frozen, because the posterior belongs to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from usfan.adaptation.terms.bank import Bank, agreement
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.objectives import Total, global_sum


@dataclass
class AttractDisperse(Bank):
    """Predicted as the neighbours are, and apart from the rest of the batch."""

    dispersion_decay: float = 1.0
    """β, how fast the weight of the dispersing part decays; 0 keeps it at 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("dispersion_decay", self.dispersion_decay, 0)

    def __call__(self, batch: Batch) -> Tensor:
        near = self.look(batch)
        attracted = self.mean(-(self.certainty[near] * agreement(batch.probs, self.probs[near])).sum(dim=1), batch)
        dispersed = dispersion(batch.probs, self.guide.known[batch.samples], self.total)
        batch.notes["loss_dispersion"] = dispersed
        return attracted + (1 + 10 * batch.done) ** -self.dispersion_decay * dispersed


def dispersion(probs: Tensor, known: Tensor, total: Total) -> Tensor:
    """E[Σ_m p·p_m] over the known samples, m the other ones: (‖Σ p‖² − Σ ‖p‖²) / B, without B×B products."""
    kept = known[:, None] * probs
    whole, own = global_sum(kept, total), global_sum(kept.square().sum(dim=1), total)
    return (whole.square().sum() - own) / total(known.sum()).clamp_min(1)
