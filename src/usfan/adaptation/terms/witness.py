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
from usfan.scoring.mixture import Fit, Mixture, fit_mixture, fit_witness_space, label_shift, match_shares
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import global_mean, soft_cross_entropy
from usfan.scoring.outputs import Outputs

FIRST_ROUNDS, LATER_ROUNDS = 20, 6
"""Rounds of EM at the first refresh, and at later ones, which go on from the last."""


@dataclass
class WitnessLabels(Term):
    """Cross-entropy with the labels of the mixture."""

    needs_witness = True

    label_weight: float = 0.3
    """Weight of the cross-entropy with the witness's labels."""
    witness_dimensions: int = 64
    """Principal directions of the witness's features that the mixture sees."""

    shares: str = "blend"
    """study"""

    def start(self, context: Context) -> None:
        assert context.witness is not None
        self.guide, self.total, self.uncertainty = context.guide, context.runtime.total_or_alone, context.uncertainty
        self.points = fit_witness_space(context.witness, self.witness_dimensions).project(context.witness)
        self.labels = torch.full((context.count, context.classes), 1 / context.classes, device=context.device)
        self.guide.shares = torch.full((context.classes,), 1 / context.classes, device=context.device)
        self.fit: Fit | None = None
        self.rho = 1.0

    def refresh(self, outputs: Outputs) -> None:
        probs = self.uncertainty.predictive(outputs.features, 1.0) if self.fit is None else outputs.probs
        names = probs.clamp_min(1e-12).log()
        K = names.shape[1]
        if self.fit is None:
            self.fit = fit_mixture(self.points, names, rounds=FIRST_ROUNDS)
            pi = self.fit.shares.double()
            self.balanced = float(torch.exp(-(pi * (pi + 1e-12).log()).sum())) / K >= 0.85
            if self.shares.endswith("-s") or (self.shares == "auto" and not self.balanced):
                b = (label_shift(names, 3.0) + 1e-3 / K).log()
                self.rho = 0.01
                m = self.fit.mixture
                begin = Mixture(m.means, m.cholesky, None, 3.0, b - b.mean())
                self.fit = fit_mixture(self.points, names, start=begin, rounds=FIRST_ROUNDS, prior_shares=self.rho)
        else:
            self.fit = fit_mixture(
                self.points, names, start=self.fit.mixture, rounds=LATER_ROUNDS, prior_shares=self.rho
            )
        r = self.fit.responsibilities
        even = torch.full_like(r[0], 1 / K)
        trust = float((r * probs).sum(dim=1).mean())
        kind = self.shares.removesuffix("-s")
        if kind == "auto":
            kind = "match" if self.balanced else "estimated"
        pi = {"uniform": even, "match": even, "estimated": r.mean(0)}.get(kind, trust * r.mean(0) + (1 - trust) * even)
        self.guide.shares.copy_(pi)
        self.labels.copy_(match_shares(r, pi) if kind in ("match", "blend-match") else r)

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
    dispersion: float = 1.0
    """Weight of the dispersion, relative to the attraction."""
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
        others = (probs @ probs.sum(dim=0) - probs.square().sum(dim=1)) * (2 * probs.shape[1] / len(probs))
        alpha = self.dispersion * (1 + 10 * batch.done).pow(-self.dispersion_decay)
        loss = global_mean(alpha * others - together, self.total)
        batch.notes["loss_attraction"] = loss
        return self.attraction * loss
