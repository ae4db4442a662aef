"""Loops of the search that are no settings of the library: small changes of `Adaptation`, until one proves itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from usfan.adaptation.loss import Objective
from usfan.adaptation.weights import divide_by_mean

from usfan.adaptation.adapt import Adaptation
from usfan.adaptation.centroids import centroids, nearest_centroid, unit_features
from usfan.artifacts.model import SourceModel
from usfan.compute.passes import forward
from usfan.config import AdaptConfig
from usfan.data.cache import PixelStore
from usfan.data.views import keyed_uniform
from usfan.models.classifier import Classifier
from usfan.posterior.fit import append_one
from usfan.posterior.predictive import certainty_weights, draw_logits, sobol_normal
from usfan.scoring.neighbours import nearest_neighbours, neighbour_targets, propagate
from usfan.scoring.outputs import Outputs


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
            self.guard.see_source(self.outputs())
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
