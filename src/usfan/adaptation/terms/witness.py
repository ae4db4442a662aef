"""Terms of the witness: labels from its clusters, and attraction between its neighbours.

Labels: a mixture in the witness's features, whose clusters are named by the source model's posterior predictive
(`scoring.mixture`). In each epoch the network names them again, and EM continues from the last gate. If classes may be
missing, EM begins with label shift, and L_div asks for the shares that the mixture finds. If there may be new classes,
the mixture has as many further clusters without a name, and images in them count as unknown (`scoring.situation`).

    label_weight · mean_i −Σ_k r_ik log p_ik                              r: responsibilities, N×K

Attraction (after AaD, with the witness's neighbours, found once): predictions of near images are drawn together, those
of the other images of a batch apart. Dispersion is scaled by 2K/B: equal predictions then have the same cost for any
number of classes (with K = 31 and B = 64 the scale is about 1, AaD's own). It asks for equal shares, so there is none
if classes may be missing.

    attraction · mean_i [−Σ_{j ∈ near(i)} p_i·P_j + α (2K/B) Σ_{m ≠ i} p_i·p_m],   α = (1 + 10 t)^−β,   P: a bank, N×K

Shapes: N target samples, B batch, K classes, n neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.terms.aad import dispersion
from usfan.adaptation.terms.bank import agreement
from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.config_checks import at_least
from usfan.scoring.mixture import (
    EVEN_PRIOR,
    UNEVEN_PRIOR,
    Mixture,
    centred_features,
    fit_mixture,
    fit_witness_space,
    responsibilities,
)
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import global_mean, soft_cross_entropy
from usfan.scoring.outputs import Outputs
from usfan.scoring.situation import SMOOTHED, label_shift, unknown_score, with_unnamed

FIRST_ROUNDS, LATER_ROUNDS = 20, 6
"""Rounds of EM at the first refresh, and at later ones, which continue from the last."""


@dataclass
class WitnessLabels(Term):
    """Cross-entropy with the labels of the mixture."""

    needs_witness = True

    label_weight: float = 0.3
    """Weight of the cross-entropy with the witness's labels."""
    witness_dimensions: int = 64
    """Principal directions of the witness's features that the mixture sees."""

    def __post_init__(self) -> None:
        at_least("label_weight", self.label_weight, 0)
        at_least("witness_dimensions", self.witness_dimensions, 1)

    def start(self, context: Context) -> None:
        assert context.witness is not None
        self.guide, self.total, self.uncertainty = context.guide, context.runtime.total_or_alone, context.uncertainty
        space = fit_witness_space(context.witness, self.witness_dimensions)
        self.points = space.project(context.witness)
        self.near = nearest_neighbours(space.centred(context.witness), SMOOTHED)[0] if self.guide.rejects else None
        self.given = context.given
        self.labels = torch.full((context.count, context.classes), 1 / context.classes, device=context.device)
        self.mixture: Mixture | None = None

    def refresh(self, outputs: Outputs) -> None:
        first = self.mixture is None
        probs = self.uncertainty.predictive(outputs.features, 1.0) if first else outputs.probs
        if self.given is not None:  # clusters are named by these images for certain
            probs = probs.clone()
            self.given.pin(probs)
        names = probs.clamp_min(1e-12).log()
        guide, classes = self.guide, names.shape[1]
        prior = UNEVEN_PRIOR if guide.uneven or guide.rejects else EVEN_PRIOR
        rounds = FIRST_ROUNDS if first else LATER_ROUNDS
        begin = self.beginning(names)
        fit = fit_mixture(self.points, names, start=self.mixture, begin=begin, prior=prior, rounds=rounds)
        self.mixture = fit.mixture
        named = fit.responsibilities[:, :classes]
        known = named.sum(dim=1)
        self.labels.copy_(named / known[:, None].clamp_min(1e-12))
        if self.given is not None:
            self.given.pin(self.labels)
        if guide.rejects or guide.uneven:
            sure = (known > 0.5).float()
            mass = (named * sure[:, None]).sum(dim=0)
            guide.told(sure, mass / mass.sum().clamp_min(1e-12) if guide.uneven else None)

    def beginning(self, names: Tensor) -> Tensor | None:
        """Responsibilities that EM begins with; None: those of the gate."""
        if self.mixture is None:
            if self.near is not None:
                return with_unnamed(self.points, names, unknown_score(names, self.near), names.shape[1])
            return label_shift(names) if self.guide.uneven else None
        return None if self.near is None else responsibilities(self.mixture, self.points, names)

    def tensors(self) -> dict[str, Tensor]:
        """The gate, from which the next refresh continues and recomputes the clusters."""
        if self.mixture is None:
            return {}
        m = self.mixture
        reliability = torch.tensor([m.reliability], dtype=torch.float64)
        return {"means": m.means, "cholesky": m.cholesky, "reliability": reliability, "bias": m.bias}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if tensors:
            own = {name: value.to(self.points.device) for name, value in tensors.items()}
            reliability = float(own.pop("reliability"))
            self.mixture = Mixture(own["means"], own["cholesky"], reliability, own["bias"])

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
    """Number of nearest neighbours that attract an image."""
    dispersion_decay: float = 1.0
    """β, how fast the weight of the dispersion decays; 0 keeps it at 1."""

    def __post_init__(self) -> None:
        at_least("attraction", self.attraction, 0)
        at_least("attracted", self.attracted, 1)
        at_least("dispersion_decay", self.dispersion_decay, 0)

    def start(self, context: Context) -> None:
        assert context.witness is not None
        self.near = nearest_neighbours(centred_features(context.witness)[0], self.attracted)[0]
        self.bank, self.given = context.source.probs.clone(), context.given
        self.guide, self.runtime, self.total = context.guide, context.runtime, context.runtime.total_or_alone

    def refresh(self, outputs: Outputs) -> None:
        self.bank.copy_(outputs.probs)

    def __call__(self, batch: Batch) -> Tensor:
        probs, known = batch.probs, self.guide.known[batch.samples]
        with torch.no_grad():
            self.bank.index_copy_(0, self.runtime.gathered(batch.samples), self.runtime.gathered(probs))
            if self.given is not None:
                self.given.pin(self.bank)
        together = agreement(probs, self.bank[self.near[batch.samples]]).sum(dim=1)
        attracted = -global_mean(together, self.total, known)
        loss = attracted
        if not self.guide.uneven:
            scale = 2 * probs.shape[1] / self.total(known.sum().detach()).clamp_min(1)
            decay = (1 + 10 * batch.done) ** -self.dispersion_decay
            loss = attracted + decay * scale * dispersion(probs, known, self.total)
        batch.notes["loss_attraction"] = loss
        return self.attraction * loss
