"""Loss terms and ways to weight samples that were tried and are not part of the library.

Each changes one thing about a term or about `Certainty`; `variants.py` puts them into the rows of methods.

Shapes: N target samples, B batch, K classes, D features.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from studies.labels import nearest_gaussian, neighbour_targets, propagate
from torch import Tensor

from usfan.adaptation.centroids import centroids, nearest_centroid
from usfan.adaptation.certainty import Certainty, divide_by_mean
from usfan.adaptation.facts import Facts
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.term import Context, Term
from usfan.compute.loop import Batch
from usfan.data.views import keyed_uniform
from usfan.models.classifier import Classifier
from usfan.posterior.fit import append_one
from usfan.posterior.predictive import certainty_weights, draw_logits
from usfan.scoring.neighbours import nearest_neighbours, unit_features
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy
from usfan.scoring.outputs import Outputs

GRAPH = 10
"""Neighbours per sample in the graph that predictions spread over."""
DRAWS = 64
"""Of the posterior objective."""


@dataclass
class PosteriorInformation(InformationMaximization):
    """Information maximisation of the posterior predictive itself, with gradient: moves features to where the head is
    certain."""

    def __call__(self, batch: Batch) -> Tensor:
        posterior = self.context.uncertainty
        phi = append_one(batch.features) if posterior.bias is not None else batch.features
        variance = (phi @ posterior.feature_vectors).square() @ posterior.variance_table
        coefficients = variance.clamp_min(1e-12).sqrt() @ posterior.basis.T
        draws = draw_logits(batch.logits, coefficients, posterior.noise(DRAWS), 1.0)
        probs = draws.softmax(dim=-1).mean(dim=1)
        return super().__call__(dataclasses.replace(batch, logits=probs.log()))  # its softmax gives probs back


@dataclass
class PlainEntropy(InformationMaximization):
    """The entropy term counts every sample alike; weights are for other terms."""

    def weights(self, batch: Batch) -> Tensor:
        return torch.ones_like(self.guide.weights[batch.samples])


@dataclass
class WeightedDiversity(InformationMaximization):
    """Certain samples count more in the mean prediction of L_div too."""

    def refresh(self, outputs: Outputs) -> None:
        self.guide.diverse.mul_(self.guide.weights)
        super().refresh(outputs)


@dataclass(frozen=True)
class SquaredCertainty(Certainty):
    """exp(−2 H)."""

    def raw(self, outputs: Outputs) -> Tensor:
        return super().raw(outputs).square()


@dataclass(frozen=True)
class EpistemicCertainty(Certainty):
    """exp(−mutual information): only uncertainty that more source data would remove lowers the weight."""

    def raw(self, outputs: Outputs) -> Tensor:
        return torch.exp(-outputs.mutual_information)


@dataclass(frozen=True)
class SmoothCertainty(Certainty):
    """Certainty of the mean posterior predictive of a sample and its ten nearest neighbours."""

    def raw(self, outputs: Outputs) -> Tensor:
        places, similar = nearest_neighbours(outputs.features, GRAPH)
        around = neighbour_targets(places, similar, outputs.posterior_probs, torch.ones_like(outputs.probs[:, 0]))
        return certainty_weights((outputs.posterior_probs + GRAPH * around) / (GRAPH + 1))


@dataclass(frozen=True)
class SpreadCertainty(Certainty):
    """Certainty of the posterior predictive after it spread over the graph of neighbours."""

    def raw(self, outputs: Outputs) -> Tensor:
        places, similar = nearest_neighbours(outputs.features, GRAPH)
        own = certainty_weights(outputs.posterior_probs)
        return certainty_weights(propagate(places, similar, outputs.posterior_probs, own))


@dataclass
class PropagatedLabels(PseudoLabels):
    """Labels spread over the graph of neighbours from the certain samples."""

    def find(self, outputs: Outputs) -> Tensor:
        places, similar = nearest_neighbours(outputs.features, GRAPH)
        strength = self.guide.certainty.raw(outputs) * self.guide.known
        return propagate(places, similar, outputs.probs, strength).argmax(dim=1)


@dataclass
class PosteriorCentroids(PseudoLabels):
    """Centroids from the posterior predictive."""

    def find(self, outputs: Outputs) -> Tensor:
        return super().find(dataclasses.replace(outputs, probs=outputs.posterior_probs))


@dataclass
class GaussianLabels(PseudoLabels):
    """A mixture of Gaussians with one covariance, by EM from the nearest centroids."""

    def find(self, outputs: Outputs) -> Tensor:
        return nearest_gaussian(
            outputs.features, super().find(outputs), outputs.probs.shape[1], mask=self.guide.known_mask
        )


@dataclass
class CertainCentroids(PseudoLabels):
    """Each sample counts in its centroid with its certainty."""

    def find(self, outputs: Outputs) -> Tensor:
        return nearest_centroid(outputs.features, outputs.probs, mask=self.guide.certainty.raw(outputs))


@dataclass
class BalancedLabels(PseudoLabels):
    """Soft nearest centroids whose class shares are moved half-way to equal ones."""

    def find(self, outputs: Outputs) -> Tensor:
        phi = unit_features(outputs.features)
        hard = torch.nn.functional.one_hot(super().find(outputs), outputs.probs.shape[1]).float()
        share = (phi @ centroids(phi, hard).T / 0.05).softmax(dim=1)
        for _ in range(5):
            share = share / share.mean(dim=0).clamp_min(1e-8).sqrt()
            share = share / share.sum(dim=1, keepdim=True)
        return share.argmax(dim=1)


@dataclass
class LastingLabels(PseudoLabels):
    """Labels from the running mean of the predictions: a new prediction counts two fifths."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.mean: Tensor | None = None

    def find(self, outputs: Outputs) -> Tensor:
        self.mean = outputs.probs if self.mean is None else 0.6 * self.mean + 0.4 * outputs.probs
        return nearest_centroid(outputs.features, self.mean)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.mean = tensors["mean"].to(self.labels.device) if tensors else None


@dataclass
class LateLabels(PseudoLabels):
    """Labels start after the first third of the run: before, features have hardly moved, and more labels are wrong."""

    def decide(self, facts: Facts) -> PseudoLabels:
        return dataclasses.replace(super().decide(facts), pseudo_label_warmup=facts.epochs // 3)


@dataclass
class WeightedLabels(PseudoLabels):
    """The pseudo-label loss weighted as the entropy term is."""

    def strength(self, batch: Batch) -> Tensor:
        return self.guide.batch_weights(batch)

    def __call__(self, batch: Batch) -> Tensor:
        each = smoothed_cross_entropy(batch.logits, self.labels[batch.samples], 0.0) * self.strength(batch)
        loss = global_mean(each, self.total, self.guide.known[batch.samples])
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss


@dataclass
class AgreementLabels(WeightedLabels):
    """The pseudo-label loss weighted by the posterior predictive's probability of the pseudo-label."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.agreed = torch.ones(context.count, device=context.device)

    def refresh(self, outputs: Outputs) -> None:
        super().refresh(outputs)
        agreed = outputs.posterior_probs.gather(1, self.labels[:, None])[:, 0]
        self.agreed.copy_(divide_by_mean(agreed, torch.ones_like(agreed)))

    def strength(self, batch: Batch) -> Tensor:
        return self.agreed[batch.samples]


@dataclass
class MixedLabels(PseudoLabels):
    """The pseudo-label loss on mixtures of two views, with the mixture of their labels as target; twice the work."""

    needs_pixels = True

    def start(self, context: Context) -> None:
        super().start(context)
        self.epoch = torch.zeros((), dtype=torch.long, device=context.device)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.epoch.fill_(epoch)

    def __call__(self, batch: Batch) -> Tensor:
        share = 0.5 + 0.5 * keyed_uniform(self.context.seed, self.epoch, batch.samples, 9)
        part = share[:, None, None, None]
        _, logits = batch.forward(part * batch.images + (1 - part) * batch.images.roll(1, 0))
        logs, labels = logits.log_softmax(dim=1), self.labels[batch.samples]
        own, other = (-logs.gather(1, places[:, None])[:, 0] for places in (labels, labels.roll(1, 0)))
        loss = (share * own + (1 - share) * other).mean()
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss


class AveragedWeights(Term):
    """Adds nothing to the loss; keeps the mean of the weights after each epoch of the second half."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}
        """Of the last run: the running term is a copy that shares it."""

    def start(self, context: Context) -> None:
        self.mean.clear()
        self.count = 0

    def end_epoch(self, epoch: int, classifier: Classifier) -> None:
        if 2 * (epoch + 1) <= self.context.epochs:
            return
        self.count += 1
        for name, value in classifier.state_dict().items():
            if value.is_floating_point():
                mean = self.mean.setdefault(name, torch.zeros_like(value))
                mean += (value - mean) / self.count

    def __call__(self, batch: Batch) -> Tensor:
        return batch.logits.new_zeros(())
