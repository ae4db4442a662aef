"""What a witness says of the target: labels from its clusters, and attraction between its neighbours.

Labels: a mixture in the witness's features, whose clusters are named by the network's posterior predictive
(`scoring.mixture`). Each epoch the network names them anew; EM goes on from the last gate.

    label_weight · mean_i −Σ_k r_ik log p_ik                              r: responsibilities, N×K

Attraction (AaD, with the neighbours of the witness, found once): predictions of near images are drawn together, those
of other images of the batch apart.

    attraction · mean_i [−Σ_{j ∈ near(i)} p_i·P_j + α Σ_{m ≠ i} p_i·p_m],   α = (1 + 10 t/T)^−β,   P: a bank, N×K

Shapes: N target samples, B batch, K classes, n neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.scoring.mixture import Fit, fit_mixture, fit_witness_space
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import global_mean, soft_cross_entropy
from usfan.scoring.outputs import Outputs

FIRST_ROUNDS, LATER_ROUNDS = 20, 4
"""Rounds of EM at the first refresh, and at later ones, which go on from the last."""


@dataclass
class WitnessLabels(Term):
    """Cross-entropy with the labels of the mixture."""

    needs_witness = True

    label_weight: float = 0.3
    """Weight of the cross-entropy with the witness's labels."""
    witness_dimensions: int = 64
    """Principal directions of the witness's features that the mixture sees."""

    def start(self, context: Context) -> None:
        assert context.witness is not None
        self.guide, self.total, self.uncertainty = context.guide, context.runtime.total_or_alone, context.uncertainty
        self.points = fit_witness_space(context.witness, self.witness_dimensions).project(context.witness)
        self.labels = torch.full((context.count, context.classes), 1 / context.classes, device=context.device)
        self.fit: Fit | None = None

    def refresh(self, outputs: Outputs) -> None:
        names = self.uncertainty.predictive(outputs.features, 1.0).clamp_min(1e-12).log()
        start, rounds = (None, FIRST_ROUNDS) if self.fit is None else (self.fit.mixture, LATER_ROUNDS)
        self.fit = fit_mixture(self.points, names, start=start, rounds=rounds)
        self.labels.copy_(self.fit.responsibilities)

    def __call__(self, batch: Batch) -> Tensor:
        each = soft_cross_entropy(batch.logits, self.labels[batch.samples])
        loss = global_mean(each, self.total, self.guide.known[batch.samples])
        batch.notes["loss_pseudo"] = loss
        return self.label_weight * loss


@dataclass
class WitnessAttraction(Term):
    """Attraction between neighbours in the witness's features, dispersion in the batch."""

    needs_witness = True

    attraction: float = 1.0
    """Weight of attraction and dispersion."""
    attracted: int = 3
    """Neighbours that an image is drawn to."""
    dispersion_decay: float = 1.0
    """β: how fast the dispersion weakens."""

    def start(self, context: Context) -> None:
        assert context.witness is not None
        space = fit_witness_space(context.witness, 1)
        self.near = nearest_neighbours(space.centred(context.witness), self.attracted)[0]
        self.bank = context.source.probs.clone()
        self.total = context.runtime.total_or_alone

    def refresh(self, outputs: Outputs) -> None:
        self.bank.copy_(outputs.probs)

    def __call__(self, batch: Batch) -> Tensor:
        probs, samples = batch.probs, batch.samples
        self.bank.index_copy_(0, samples, probs.detach().to(self.bank.dtype))
        near = self.bank[self.near[samples]].sum(dim=1)
        together = (probs * near).sum(dim=1)
        others = probs @ probs.sum(dim=0) - probs.square().sum(dim=1)
        alpha = (1 + 10 * batch.done).pow(-self.dispersion_decay)
        loss = global_mean(alpha * others - together, self.total)
        batch.notes["loss_attraction"] = loss
        return self.attraction * loss
