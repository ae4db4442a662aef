"""Stage 2 on the toy: the methods of the table, for S networks at once.

    L = 2·[(1 − γ) L_ent^ug + γ L_div] + β·CE        Eqs. 2, 3, 7 and the recipe's pseudo-labels, γ = ½, β = 0.3

Everything but the weights and the pseudo-labels is the same for every method. Weights are taken once, from the source
model in test mode, and divided by their mean. The prior precision is the training's weight decay, 3e-3, not times N:
so the paper sets it. "u-sfan (evidence)" has the prior that the evidence prefers, about 1. "u-sfan (paper)" is
Algorithm 1 to the letter: weights from the features of each step, BatchNorm in training mode, not divided by their
mean, and L without the factor 2.

Shapes: S seeds, N samples, K classes, D features, M draws; samples last, as in `toy_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.information import InformationMaximization
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.separation import Separation
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.posterior.predictive import certainty_weights, noise_table, sobol_normal
from usfan.reproduce.toy.model import LEARNING_RATE, TARGET_STEPS, WEIGHT_DECAY, StackedMLP, sgd
from usfan.scoring.objectives import information_maximization

TEMPERATURE = 0.4
PSEUDO_LABEL_WEIGHT = 0.3
PSEUDO_LABEL_REFRESHES = 10
"""How often in a run the pseudo-labels are recomputed."""
FLIPPED = 50.0
"""Per cent: a run that ends below has swapped classes."""


@dataclass(frozen=True)
class Variant:
    """A line of the table: a method, and how its weights are made."""

    method: str
    prior: float | str = WEIGHT_DECAY
    every_step: bool = False
    """Weights at each step from its own features (Algorithm 1), not once from the source model in test mode."""
    normalise: bool = True
    scale: float = 2.0
    """Multiplies the objective; 2 makes SHOT-IM the recipe's."""
    samples: int = 128


TERMS = (InformationMaximization, PseudoLabels, Separation)
"""The terms that the stack computes (separation is for open set, and does nothing here)."""
TOY_METHODS = tuple(
    name for name, row in METHODS.items() if not row.settles and all(type(t) in TERMS for t in row.terms)
)
VARIANTS: dict[str, Variant] = {
    **{name: Variant(name) for name in TOY_METHODS},
    "u-sfan (evidence)": Variant("u-sfan", prior="evidence"),
    "u-sfan (paper)": Variant("u-sfan", every_step=True, normalise=False, scale=1.0, samples=64),
}


@dataclass(frozen=True)
class StackedPosterior:
    """The posteriors of S last layers, without bias. With K = 3, classes first and samples last is much the faster."""

    weight: Tensor
    """S×K×D."""
    feature_vectors: Tensor
    """Q_A, S×D×D."""
    variances: Tensor
    """R, S×D×K."""
    noise: Tensor
    """S×(K·M)×K: what a unit of deviation along each column of Q_B adds to each logit in each draw."""

    @classmethod
    def fit(cls, network: StackedMLP, points: Tensor, prior: float | str, samples: int = 128) -> StackedPosterior:
        features, logits = network.outputs(points)
        heads = network.head.detach()
        fits = [
            KroneckerPosterior.fit(z.T, f.T, w, None, prior) for z, f, w in zip(features, logits, heads, strict=True)
        ]
        draws = sobol_normal(samples, heads.shape[1]).roll(1, dims=1).to(heads)
        every = torch.eye(heads.shape[1]).to(heads)
        noise = [noise_table(every, post.class_vectors, draws).permute(2, 1, 0).flatten(0, 1) for post in fits]
        return cls(
            heads.clone(),
            torch.stack([post.feature_vectors for post in fits]),
            torch.stack([post.variance_table for post in fits]),
            torch.stack(noise),
        )

    @torch.no_grad()
    def predictive(self, features: Tensor, temperature: float = TEMPERATURE) -> Tensor:
        """Eq. 6, S×K×N, as `KroneckerPosterior.predictive`; network by network, so that the draws stay in cache."""
        mean = torch.bmm(self.weight, features) / temperature
        along = torch.bmm(self.feature_vectors.mT, features).square()
        deviation = torch.bmm(self.variances.mT, along).sqrt() / temperature
        classes, count = mean.shape[1:]
        probs = [
            (noise @ d).view(classes, -1, count).add_(m[:, None]).softmax(dim=0).mean(dim=1)
            for noise, d, m in zip(self.noise, deviation, mean, strict=True)
        ]
        return torch.stack(probs)

    def pick(self, index: int) -> StackedPosterior:
        """One of the posteriors, as a stack of one."""
        one = slice(index, index + 1)
        return StackedPosterior(self.weight[one], self.feature_vectors[one], self.variances[one], self.noise[one])


def stacked_weights(
    kind: str, features: Tensor, logits: Tensor, posterior: StackedPosterior, normalise: bool
) -> Tensor:
    """w = exp(−H), S×N, of the point estimate or the posterior predictive; divided by each seed's mean if asked."""
    if kind == "none":
        return torch.ones_like(logits[:, 0])
    probs = (
        (logits.detach() / TEMPERATURE).softmax(dim=1) if kind == "point" else posterior.predictive(features.detach())
    )
    weights = certainty_weights(probs.mT)
    return weights / weights.mean(dim=1, keepdim=True) if normalise else weights


def stacked_pseudo_labels(network: StackedMLP, points: Tensor) -> Tensor:
    """S×N."""
    features, logits = network.outputs(points)
    return torch.stack([nearest_centroid(z.T, f.T.softmax(dim=1)) for z, f in zip(features, logits, strict=True)])


def adapt_stack(
    source: StackedMLP,
    posterior: StackedPosterior,
    points: Tensor,
    variant: Variant,
    *,
    steps: int = TARGET_STEPS,
    learning_rate: float = LEARNING_RATE,
    advance: Callable[[int], None] = lambda steps: None,
    look: Callable[[int, StackedMLP], None] = lambda steps, network: None,
) -> StackedMLP:
    """Stage 2 of S networks: full batch, the head frozen, BatchNorm in training mode.

    `look` sees the networks after each step.
    """
    method = METHODS[variant.method]
    labelled = method.has(PseudoLabels)
    network = copy.deepcopy(source)
    if not method.adapts:
        return network
    network.head.requires_grad_(False)
    optimiser = sgd(network.extractor.parameters(), learning_rate)
    weights = stacked_weights(method.certainty.weights, *source.outputs(points), posterior, variant.normalise)
    network.train()
    for step in range(steps):
        if labelled and step % max(1, steps // PSEUDO_LABEL_REFRESHES) == 0:
            labels = stacked_pseudo_labels(network, points)
        features, logits = network(points)
        if variant.every_step:
            weights = stacked_weights(method.certainty.weights, features, logits, posterior, variant.normalise)
        loss = variant.scale * information_maximization(logits.mT, weights).sum()
        if labelled:
            entropy = functional.cross_entropy(logits, labels, reduction="sum") / labels.shape[1]
            loss = loss + PSEUDO_LABEL_WEIGHT * entropy
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        advance(len(points))
        look(step + 1, network)
    return network.eval()
