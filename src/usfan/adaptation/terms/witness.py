"""Terms of the witness: labels from its clusters, and attraction between its neighbours.

Labels: those of the naming of the target (`adaptation.naming`): a mixture in the witness's features, whose clusters are
named by the source model's posterior predictive and by the user's labels, if there are any. After each epoch the
network names the clusters again, and EM continues from the last gate. If classes may be missing, L_div asks for the
shares that the mixture finds. If there may be new classes, images in clusters without a name count as unknown.

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

from usfan.adaptation.terms.aad import decay, dispersion
from usfan.adaptation.terms.bank import agreement
from usfan.adaptation.terms.term import Batch, Context, Outputs, Term
from usfan.adaptation.thresholds import WITNESS_LATER_ROUNDS
from usfan.config import number
from usfan.maths.cluster_mixture import (
    EVEN_PRIOR,
    UNEVEN_PRIOR,
    Fit,
    Mixture,
    centred_features,
    expectation,
    fit_mixture,
)
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.objectives import soft_cross_entropy


@dataclass
class WitnessLabels(Term):
    """Cross-entropy with the labels of the mixture."""

    needs_witness = True

    label_weight: float = number(0.3)
    """Weight of the cross-entropy with the witness's labels."""

    def start(self, context: Context) -> None:
        assert context.naming is not None
        self.points = context.naming.view.points
        self.mixture: Mixture | None = None
        self.labels = torch.full(
            (context.count, context.classes),
            1 / context.classes,
            device=context.device,
        )

    def refresh(self, outputs: Outputs) -> None:
        """First the labels of the naming; later the network names the clusters again, and EM continues."""
        naming = self.context.naming
        assert naming is not None
        if self.mixture is None:
            fit = naming.clusters.fit
            known = naming.clusters.known
            labels = naming.clusters.known_labels
        else:
            fit = self.continued(outputs.probs)
            named = fit.responsibilities[:, : self.context.classes].double()
            known = named.sum(dim=1)
            labels = named / known[:, None].clamp_min(1e-12)
        self.mixture = fit.mixture
        self.labels.copy_(naming.pooled(labels))
        guidance = self.guidance
        if guidance.rejects or guidance.uneven:
            sure = (known > 0.5).float()
            shares = None
            if guidance.uneven:
                mass = (labels * (known * sure)[:, None]).sum(dim=0)
                shares = (mass / mass.sum().clamp_min(1e-12)).float()
            guidance.set_known(sure, shares)

    def continued(self, probs: Tensor) -> Fit:
        """The mixture under the names of the network, N × K."""
        assert self.mixture is not None
        guidance = self.guidance
        labels = self.context.user_labels
        if labels is not None:
            probs = labels.pinned(probs)
        names = probs.clamp_min(1e-12).log()
        begin = None
        if guidance.rejects:
            begin = expectation(self.mixture, self.points, names, labels)[0]
        return fit_mixture(
            self.points,
            names,
            start=self.mixture,
            begin=begin,
            labels=labels,
            prior=UNEVEN_PRIOR if guidance.uneven or guidance.rejects else EVEN_PRIOR,
            rounds=WITNESS_LATER_ROUNDS,
        )

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
        if not self.guidance.uneven:
            known = context.known(batch)
            scale = 2 * context.classes / context.sum(known).clamp_min(1)
            weight = decay(batch, self.dispersion_decay) * scale
            loss = loss + weight * dispersion(context, probs, known)
        batch.notes["loss_attraction"] = loss
        return self.attraction * loss
