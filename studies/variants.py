"""What was tried to make the posterior earn its place (docs/results.md): one change each, on top of a method.

Variants that are a setting of the library are that setting. The others live here, as small changes of the loop, until
one of them proves itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.adapt import Adaptation
from usfan.adaptation.loss import Objective
from usfan.adaptation.neighbours import nearest_neighbours, neighbour_targets, propagate
from usfan.adaptation.pseudo_labels import centroids, nearest_centroid, unit_features
from usfan.adaptation.weights import divide_by_mean
from usfan.config import AdaptConfig
from usfan.data.cache import PixelStore
from usfan.data.views import keyed_uniform
from usfan.engine import forward
from usfan.models.classifier import Classifier
from usfan.models.model import Outputs, SourceModel
from usfan.posterior.fit import append_one
from usfan.posterior.predictive import certainty_weights, draw_logits, sobol_normal


class PosteriorProbs(Objective):
    def probs(self, features: Tensor, logits: Tensor) -> Tensor:
        posterior = self.posterior
        phi = append_one(features) if posterior.bias is not None else features
        variance = (phi @ posterior.feature_vectors).square() @ posterior.variance_table
        coefficients = variance.clamp_min(1e-12).sqrt() @ posterior.basis.T
        return draw_logits(logits, coefficients, posterior.noise(64), 1.0).softmax(dim=-1).mean(dim=1)


class PosteriorObjective(Adaptation):
    """Information maximisation of the posterior predictive itself, with gradient: moves features to where the head
    is certain."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.objective = PosteriorProbs(**vars(self.objective))


class SmoothCertainty(Adaptation):
    """Certainty of the mean posterior predictive of a sample and its ten nearest neighbours."""

    def outputs(self, source: Classifier | None = None) -> Outputs:
        found = super().outputs(source)
        places, similar = nearest_neighbours(found.features, 10)
        around = neighbour_targets(places, similar, found.posterior_probs, torch.ones_like(found.probs[:, 0]))
        return dataclasses.replace(found, posterior_probs=(found.posterior_probs + 10 * around) / 11)


class SpreadCertainty(Adaptation):
    """Certainty of the posterior predictive after it spread over the graph of neighbours."""

    def outputs(self, source: Classifier | None = None) -> Outputs:
        found = super().outputs(source)
        places, similar = nearest_neighbours(found.features, 10)
        spread = propagate(places, similar, found.posterior_probs, certainty_weights(found.posterior_probs))
        return dataclasses.replace(found, posterior_probs=spread)


class Averaged(Adaptation):
    """Judges, beside the last iterate, the mean of the weights after each epoch of the second half."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.averaged: list[Outputs] = []
        self.mean: dict[str, Tensor] = {}
        self.count = 0

    def refresh(self, epoch: int) -> Outputs:
        outputs = super().refresh(epoch)
        if 2 * epoch > self.epochs:
            self.count += 1
            for name, value in self.classifier.state_dict().items():
                if value.is_floating_point():
                    mean = self.mean.setdefault(name, torch.zeros_like(value))
                    mean += (value - mean) / self.count
        if epoch == self.epochs:
            last = {name: value.clone() for name, value in self.classifier.state_dict().items()}
            self.classifier.load_state_dict({**last, **self.mean})
            self.averaged.append(self.outputs())
            self.classifier.load_state_dict(last)
        return outputs


class AgreementWeights(Averaged):
    """The pseudo-label loss weighted by the posterior predictive's probability of the pseudo-label."""

    def refresh(self, epoch: int) -> Outputs:
        outputs = super().refresh(epoch)
        agreed = outputs.posterior_probs.gather(1, self.guidance.pseudo_labels[:, None])[:, 0]
        self.guidance.weights.copy_(divide_by_mean(agreed))
        return outputs


class BalancedLabels(Averaged):
    """Pseudo-labels by soft nearest centroids whose class shares are moved half-way to equal ones."""

    def refresh(self, epoch: int) -> Outputs:
        outputs = super().refresh(epoch)
        phi = unit_features(outputs.features)
        hard = torch.nn.functional.one_hot(self.guidance.pseudo_labels, outputs.probs.shape[1]).float()
        share = (phi @ centroids(phi, hard).T / 0.05).softmax(dim=1)
        for _ in range(5):
            share = share / share.mean(dim=0).clamp_min(1e-8).sqrt()
            share = share / share.sum(dim=1, keepdim=True)
        self.guidance.pseudo_labels.copy_(share.argmax(dim=1))
        return outputs


class CertainCentroids(Adaptation):
    """A sample pulls at its centroid with the strength of its certainty."""

    def refresh(self, epoch: int) -> Outputs:
        outputs = super().refresh(epoch)
        found = nearest_centroid(outputs.features, outputs.probs, mask=self.guidance.certainty)
        self.guidance.pseudo_labels.copy_(found)
        return outputs


class LastingLabels(Adaptation):
    """Pseudo-labels from the running mean of the predictions: one epoch's change of mind counts two fifths."""

    mean: Tensor | None = None

    def refresh(self, epoch: int) -> Outputs:
        outputs = super().refresh(epoch)
        self.mean = outputs.probs if self.mean is None else 0.6 * self.mean + 0.4 * outputs.probs
        self.guidance.pseudo_labels.copy_(nearest_centroid(outputs.features, self.mean))
        return outputs


class SettledFirst(Adaptation):
    """BatchNorm takes the target's statistics before the first look at it."""

    def refresh(self, epoch: int) -> Outputs:
        if epoch == 0:
            self.settle_statistics()
        return super().refresh(epoch)


class LateLabels(Adaptation):
    """Pseudo-labels from the second third of the run on: before, features have hardly moved, and more are wrong."""

    def __init__(self, source: SourceModel, store: PixelStore, config: AdaptConfig, *given: Any) -> None:
        late = dataclasses.replace(config, pseudo_label_warmup=config.epochs // 3)
        super().__init__(source, store, late, *given)


class SettledLate(LateLabels, SettledFirst):
    """Both."""


class MixedViews(Adaptation):
    """The pseudo-label loss on mixtures of two views, the mixture of their labels as the target; twice the work."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.beta = self.objective.pseudo_label_weight
        self.without_labels = dataclasses.replace(self.objective, pseudo_label_weight=torch.zeros_like(self.beta))

    def step(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        view = self.feeder.view(samples, staged)
        features, logits = forward(self.classifier, view, self.runtime)
        loss, figures = self.without_labels(samples, features, logits)
        share = 0.5 + 0.5 * keyed_uniform(self.config.seed, self.feeder.epoch, samples, 9)
        mixed = share[:, None, None, None] * view + (1 - share)[:, None, None, None] * view.roll(1, 0)
        labels = self.guidance.pseudo_labels[samples]
        logs = forward(self.classifier, mixed, self.runtime)[1].log_softmax(dim=1)
        own, other = (-logs.gather(1, places[:, None])[:, 0] for places in (labels, labels.roll(1, 0)))
        self.optimiser.update(loss + self.beta * (share * own + (1 - share) * other).mean())
        return figures


@dataclass
class FullPosterior:
    """The exact last-layer GGN, no Kronecker factors, under the prior that the evidence of the factors chose."""

    covariance: Tensor
    """D' × K × D' × K."""
    prior_precision: float
    has_bias: bool
    head: Any

    @classmethod
    def fit(cls, features: Tensor, logits: Tensor, posterior: Any) -> FullPosterior:
        phi = (append_one(features) if posterior.bias is not None else features).double()
        p = logits.double().softmax(dim=1)
        curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        D, K = phi.shape[1], p.shape[1]
        outer = (phi[:, :, None] * phi[:, None, :]).flatten(1)
        total = (outer.T @ curvature.flatten(1)).view(D, D, K, K).permute(0, 2, 1, 3).reshape(D * K, D * K)
        total.diagonal().add_(posterior.prior_precision)
        covariance = torch.cholesky_inverse(torch.linalg.cholesky(total)).float().view(D, K, D, K)
        return cls(covariance, posterior.prior_precision, posterior.bias is not None, posterior)

    def to(self, device: Any) -> FullPosterior:
        return self

    def moments(self, features: Tensor, temperature: float, samples: int) -> tuple[Tensor, Tensor]:
        mean = self.head.logits(features)
        draws = sobol_normal(samples, mean.shape[1]).to(mean)
        phi = append_one(features) if self.has_bias else features
        D, K = phi.shape[1], mean.shape[1]
        table = self.covariance.permute(0, 2, 1, 3).reshape(D * D, K * K)
        probs, entropies = [], []
        for rows in range(0, len(phi), 256):
            z, f = phi[rows : rows + 256], mean[rows : rows + 256]
            variance = ((z[:, :, None] * z[:, None, :]).flatten(1) @ table).view(-1, K, K)
            values, vectors = torch.linalg.eigh(variance)
            root = vectors * values.clamp_min(0).sqrt()[:, None, :]
            logits = (f[:, None, :] + torch.einsum("mk,blk->bml", draws, root)) / temperature
            p = logits.softmax(dim=-1)
            probs.append(p.mean(dim=1))
            entropies.append(-torch.xlogy(p, p).sum(dim=-1).mean(dim=1))
        p = torch.cat(probs)
        return p, (-torch.xlogy(p, p).sum(dim=1) - torch.cat(entropies)).clamp_min(0)


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    loop: type[Adaptation] = Adaptation
    full: bool = False


DEFAULT = {"balance": True, "diversity_memory": 0.9}
ANNEALED = {**DEFAULT, "anneal": True}
OWN = {"balance": None, "diversity_memory": None}
OWN_ANNEALED = {**OWN, "anneal": True}
CROPS = {**DEFAULT, "augment": "resized-crop-flip"}
CE_ONLY = {**DEFAULT, "weigh_entropy": False, "weigh_pseudo_labels": True}
VARIANTS = (
    Variant("shot-im", "shot-im", "no weights"),
    Variant("u-sfan", "u-sfan", "weights per epoch, mean 1, evidence prior, τ 0.4"),
    Variant("u-sfan memory", "u-sfan", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan posterior objective", "u-sfan", "IM of the posterior predictive", {}, PosteriorObjective),
    Variant("shot", "shot", "centroid pseudo-labels"),
    Variant("u-sfan+", "u-sfan+", "centroid pseudo-labels"),
    Variant("u-sfan+ propagation", "u-sfan+", "labels spread over neighbours", {"pseudo_label_source": "propagation"}),
    Variant("u-sfan+ memory", "u-sfan+", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot-im memory", "shot-im", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan weighted L_div", "u-sfan", "weights inside L_div", {"weigh_diversity": True}),
    Variant("u-sfan smooth", "u-sfan", "certainty of the neighbourhood", {}, SmoothCertainty),
    Variant("u-sfan balanced", "u-sfan", "mean 1 within each predicted class", {"balance": True}),
    Variant("u-sfan epistemic", "u-sfan", "exp(−mutual information)", {"certainty": "epistemic"}),
    Variant("u-sfan power 2", "u-sfan", "squared weights", {"weight_power": 2.0}),
    Variant("u-sfan annealed", "u-sfan", "power 2 to 0 over the run", {"anneal": True}),
    Variant("u-sfan full GGN", "u-sfan", "no Kronecker factors", {}, Adaptation, full=True),
    Variant("u-sfan+ weighted CE", "u-sfan+", "certainty on the pseudo-label loss", {"weigh_pseudo_labels": True}),
    Variant(
        "u-sfan+ posterior centroid",
        "u-sfan+",
        "centroids from the posterior predictive",
        {"pseudo_label_source": "posterior-centroid"},
    ),
    Variant(
        "u-sfan+ propagation β 1",
        "u-sfan+",
        "labels spread over neighbours, β 1",
        {"pseudo_label_source": "propagation", "pseudo_label_weight": 1.0},
    ),
    Variant("u-sfan spread", "u-sfan", "certainty after spreading over neighbours", {}, SpreadCertainty),
    Variant("u-sfan τ 1", "u-sfan", "temperature 1", {"temperature": 1.0}),
    Variant(
        "u-sfan+ balanced CE only",
        "u-sfan+",
        "class-balanced certainty on the pseudo-label loss alone",
        {"balance": True, "weigh_entropy": False, "weigh_pseudo_labels": True},
    ),
    Variant(
        "u-sfan+ balanced CE only memory",
        "u-sfan+",
        "the same, L_div over the whole target",
        {"balance": True, "weigh_entropy": False, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
    ),
    Variant(
        "u-sfan+ balanced both memory",
        "u-sfan+",
        "class-balanced certainty on both losses, L_div over the whole target",
        {"balance": True, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
    ),
    Variant("shot memory", "shot", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot averaged", "shot", "the recipe, its weights averaged too", {}, Averaged),
    Variant("u-sfan default", "u-sfan", "balanced, memory", DEFAULT, Averaged),
    Variant("u-sfan+ default", "u-sfan+", "balanced, memory", DEFAULT, Averaged),
    Variant("u-sfan+ resized crops", "u-sfan+", "balanced, memory, stronger views", CROPS, Averaged),
    Variant("shot-im crops", "shot-im", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("shot crops", "shot", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("u-sfan crops", "u-sfan", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ crops", "u-sfan+", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ certain centroids", "u-sfan+", "centroids of the certain", DEFAULT, CertainCentroids),
    Variant("u-sfan+ lasting labels", "u-sfan+", "labels from the running mean", DEFAULT, LastingLabels),
    Variant("u-sfan+ settled", "u-sfan+", "BatchNorm settled first", DEFAULT, SettledFirst),
    Variant("u-sfan+ settled crops", "u-sfan+", "the same, stronger views", CROPS, SettledFirst),
    Variant("u-sfan+ mixed views", "u-sfan+", "pseudo-label loss on mixtures", DEFAULT, MixedViews),
    Variant("u-sfan settled", "u-sfan", "balanced, memory, BatchNorm settled first", DEFAULT, SettledFirst),
    Variant("u-sfan default annealed", "u-sfan", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan+ default annealed", "u-sfan+", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan settled annealed", "u-sfan", "balanced, memory, settled, power 2 to 0", ANNEALED, SettledFirst),
    Variant("u-sfan+ settled annealed", "u-sfan+", "balanced, memory, settled, power 2 to 0", ANNEALED, SettledFirst),
    Variant("u-sfan+ late labels", "u-sfan+", "balanced, memory, pseudo-labels after a third", DEFAULT, LateLabels),
    Variant("u-sfan+ settled late", "u-sfan+", "balanced, memory, settled, the same", DEFAULT, SettledLate),
    Variant("shot late labels", "shot", "pseudo-labels after a third", {}, LateLabels),
    Variant("u-sfan own annealed", "u-sfan", "power 2 to 0", OWN_ANNEALED),
    Variant("u-sfan own settled", "u-sfan", "BatchNorm settled first", OWN, SettledFirst),
    Variant("u-sfan own settled annealed", "u-sfan", "both", OWN_ANNEALED, SettledFirst),
    Variant("u-sfan+ own settled", "u-sfan+", "BatchNorm settled first", OWN, SettledFirst),
    Variant("u-sfan+ own late labels", "u-sfan+", "pseudo-labels after a third", OWN, LateLabels),
    Variant("u-sfan+ own settled late", "u-sfan+", "both", OWN, SettledLate),
    Variant("u-sfan default full GGN", "u-sfan", "balanced, memory, no Kronecker factors", DEFAULT, full=True),
    Variant("u-sfan default τ 1", "u-sfan", "balanced, memory, temperature 1", {**DEFAULT, "temperature": 1.0}),
    Variant("u-sfan default epistemic", "u-sfan", "exp(−mutual information)", {**DEFAULT, "certainty": "epistemic"}),
    Variant("u-sfan+ default weighted CE", "u-sfan+", "both losses", {**DEFAULT, "weigh_pseudo_labels": True}),
    Variant(
        "u-sfan+ default posterior centroid",
        "u-sfan+",
        "balanced, memory, centroids from the posterior predictive",
        {**DEFAULT, "pseudo_label_source": "posterior-centroid"},
    ),
    Variant("u-sfan own", "u-sfan", "what the program chooses", OWN),
    Variant("u-sfan+ own", "u-sfan+", "what the program chooses", OWN),
    Variant("u-sfan+ balanced", "u-sfan+", "mean 1 within each predicted class", {"balance": True}),
    Variant("shot-im-entropy default", "shot-im-entropy", "point estimate, balanced, memory", DEFAULT),
    Variant("u-sfan+ balanced labels", "u-sfan+", "balanced, memory, labels of even shares", DEFAULT, BalancedLabels),
    Variant(
        "u-sfan+ agreement",
        "u-sfan+",
        "memory, pseudo-label loss weighted by the posterior's word on the label",
        {"weigh_entropy": False, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
        AgreementWeights,
    ),
    Variant("u-sfan+ CE memory", "u-sfan+", "balanced certainty on CE alone, memory", CE_ONLY, Averaged),
    Variant("u-sfan+ CE memory β 1", "u-sfan+", "the same, β 1", {**CE_ONLY, "pseudo_label_weight": 1.0}, Averaged),
    Variant("shot propagation", "shot", "labels spread over neighbours", {"pseudo_label_source": "propagation"}),
    Variant("shot-im-entropy", "shot-im-entropy", "weights of the point estimate"),
    Variant("u-sfan step", "u-sfan", "weights every step, training mode", {"refresh": "step"}),
    Variant("u-sfan frozen BatchNorm", "u-sfan", "the source's statistics", {"batch_norm": "frozen"}),
    Variant("u-sfan prior 5e-4", "u-sfan", "the paper's literal prior", {"prior": 5e-4, "normalise_weights": False}),
)
