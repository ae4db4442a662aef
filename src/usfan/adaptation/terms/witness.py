"""Terms of the witness: labels from its clusters, and attraction between its neighbours.

Labels: a mixture in the witness's features, whose clusters are named by the source model's posterior predictive
(`maths.cluster_mixture`). In each epoch the network names them again, and EM continues from the last gate. If classes
may be missing, EM begins with label shift, and L_div asks for the shares that the mixture finds. If there may be new
classes, the mixture has as many further clusters without a name, and images in them count as unknown
(`adaptation.target_classes`).

    label_weight · mean_i −Σ_k r_ik log p_ik                              r: responsibilities, N×K

Attraction (after AaD, with the witness's neighbours, found once): predictions of near images are drawn together, those
of the other images of a batch apart. Dispersion is scaled by 2K/B: equal predictions then have the same cost for any
number of classes (with K = 31 and B = 64 the scale is about 1, as in AaD). It asks for equal shares, so there is none
if classes may be missing.

    attraction · mean_i [−Σ_{j ∈ near(i)} p_i·P_j + α (2K/B) Σ_{m ≠ i} p_i·p_m],   α = (1 + 10 t)^−β,   P: a bank, N×K

Shapes: N target samples, B batch, K classes, n neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.target_classes import label_shift, unknown_score, with_unnamed
from usfan.adaptation.terms.aad import decay, dispersion
from usfan.adaptation.terms.bank import agreement
from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.adaptation.thresholds import (
    SMOOTHING_NEIGHBOURS,
    WITNESS_FIRST_ROUNDS,
    WITNESS_LATER_ROUNDS,
)
from usfan.config import number
from usfan.maths.cluster_mixture import (
    EVEN_PRIOR,
    UNEVEN_PRIOR,
    Mixture,
    centred_features,
    expectation,
    fit_mixture,
    fit_witness_space,
)
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.objectives import soft_cross_entropy


@dataclass
class WitnessLabels(Term):
    """Cross-entropy with the labels of the mixture."""

    needs_witness = True

    label_weight: float = number(0.3)
    """Weight of the cross-entropy with the witness's labels."""
    witness_dimensions: int = number(64, 1)
    """Principal directions of the witness's features that the mixture sees."""

    def start(self, context: Context) -> None:
        assert context.witness is not None
        space = fit_witness_space(context.witness, self.witness_dimensions)
        self.points = space.project(context.witness)
        self.near: Tensor | None = None
        if context.guide.rejects:
            centred = space.centred(context.witness)
            self.near = nearest_neighbours(centred, SMOOTHING_NEIGHBOURS)[0]
        self.labels = torch.full(
            (context.count, context.classes),
            1 / context.classes,
            device=context.device,
        )
        self.mixture: Mixture | None = None

    def refresh(self, outputs: Outputs) -> None:
        guide = self.guide
        names = self.names(outputs)
        classes = names.shape[1]
        fit = fit_mixture(
            self.points,
            names,
            start=self.mixture,
            begin=self.beginning(names),
            prior=UNEVEN_PRIOR if guide.uneven or guide.rejects else EVEN_PRIOR,
            rounds=WITNESS_FIRST_ROUNDS if self.mixture is None else WITNESS_LATER_ROUNDS,
        )
        self.mixture = fit.mixture
        named = fit.responsibilities[:, :classes]
        known = named.sum(dim=1)
        self.labels.copy_(named / known[:, None].clamp_min(1e-12))
        self.context.pin(self.labels)
        if not (guide.rejects or guide.uneven):
            return
        sure = (known > 0.5).float()
        shares = None
        if guide.uneven:
            mass = (named * sure[:, None]).sum(dim=0)
            shares = mass / mass.sum().clamp_min(1e-12)
        guide.set_known(sure, shares)

    def names(self, outputs: Outputs) -> Tensor:
        """ℓ, N×K: first of the source model's predictive, later of the network. The user's labels are certain."""
        probs = outputs.probs
        if self.mixture is None:
            assert self.context.uncertainty is not None
            probs = self.context.uncertainty.predictive(outputs.features, 1.0)
        if self.context.user_labels is not None:
            probs = probs.clone()
            self.context.pin(probs)
        return probs.clamp_min(1e-12).log()

    def beginning(self, names: Tensor) -> Tensor | None:
        """Responsibilities that EM begins with; None: those of the gate."""
        if self.mixture is not None:
            if self.near is None:
                return None
            return expectation(self.mixture, self.points, names)[0]
        if self.near is not None:
            score = unknown_score(names, self.near)
            return with_unnamed(self.points, names, score, names.shape[1])
        return label_shift(names) if self.guide.uneven else None

    def tensors(self) -> dict[str, Tensor]:
        """The gate, from which the next refresh continues and recomputes the clusters."""
        mixture = self.mixture
        if mixture is None:
            return {}
        return {
            "means": mixture.means,
            "cholesky": mixture.cholesky,
            "reliability": mixture.gate[:1],
            "bias": mixture.gate[1:],
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        device = self.points.device
        gate = torch.cat([tensors["reliability"], tensors["bias"]])
        self.mixture = Mixture(
            tensors["means"].to(device),
            tensors["cholesky"].to(device),
            gate.to(device),
        )

    def __call__(self, batch: Batch) -> Tensor:
        each = soft_cross_entropy(batch.logits, self.labels[batch.samples])
        loss = self.context.mean(each, batch)
        batch.notes["loss_pseudo"] = loss
        return self.label_weight * loss


@dataclass
class WitnessAttraction(Term):
    """Attraction between neighbours in the witness's features, dispersion in the batch."""

    needs_witness = True

    attraction: float = number(1.0)
    """Weight of attraction and dispersion."""
    attracted: int = number(3, 1)
    """Number of nearest neighbours that attract an image."""
    dispersion_decay: float = number(1.0)
    """β, how fast the weight of the dispersion decays; 0 keeps it at 1."""

    def start(self, context: Context) -> None:
        assert context.witness is not None
        features, _ = centred_features(context.witness)
        self.near, _ = nearest_neighbours(features, self.attracted)
        self.bank = context.source.probs.clone()

    def refresh(self, outputs: Outputs) -> None:
        self.bank.copy_(outputs.probs)

    def __call__(self, batch: Batch) -> Tensor:
        context = self.context
        probs = batch.probs
        with torch.no_grad():
            self.bank.index_copy_(0, context.gather(batch.samples), context.gather(probs))
            context.pin(self.bank)
        together = agreement(probs, self.bank[self.near[batch.samples]]).sum(dim=1)
        loss = -context.mean(together, batch)
        if not self.guide.uneven:
            known = context.known(batch)
            scale = 2 * context.classes / context.sum(known).clamp_min(1)
            weight = decay(batch, self.dispersion_decay) * scale
            loss = loss + weight * dispersion(context, probs, known)
        batch.notes["loss_attraction"] = loss
        return self.attraction * loss
