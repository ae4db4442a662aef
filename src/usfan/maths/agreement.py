"""How well predictions explain the structure of the target, in the features of a network that the training did not use.

    a = share of the k nearest neighbours that are predicted alike
    c = Σ_k q_k²                                     the same by chance, for predicted shares q
    κ = (a − c) / (1 − c)                            0: no better than chance; 1: neighbours always agree

A model that calls everything one class agrees with itself perfectly, but c is 1 then, and κ is 0. The evidence for
predictions is the mean of κ and of m, the mean probability of the predicted classes in a mixture whose clusters the
source model named. Two models are compared on the same images: the interval of the difference comes from a bootstrap
over images.

Shapes: N images, K classes, k neighbours, R resamples.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

NEIGHBOURS = 5
RESAMPLES = 200
MOST_IMAGES = 2_000
"""Largest number of images used; more cost time and hardly change the interval."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Tensor) -> Interval:
        ends = torch.tensor([0.05, 0.95], dtype=torch.float64)
        low, high = torch.quantile(draws.double(), ends).tolist()
        return cls(value, low, high)


def kappa(
    predicted: Tensor,
    neighbours: Tensor,
    classes: int,
    counts: Tensor | None = None,
) -> Tensor:
    """κ of N predicted classes with N×k neighbours; with R×N counts of a bootstrap R values. An image that is drawn
    twice counts twice, also as a neighbour."""
    if counts is None:
        counts = torch.ones(1, len(predicted), device=predicted.device)
    weights = counts.double()
    weights = weights / weights.sum(dim=1, keepdim=True)
    alike = torch.zeros_like(weights)
    pairs = torch.zeros_like(weights)
    for near in neighbours.T:
        drawn = weights[:, near]
        alike += drawn * (predicted[near] == predicted)
        pairs += drawn
    pair_weight = (weights * pairs).sum(dim=1)
    agreement = (weights * alike).sum(dim=1) / pair_weight.clamp_min(1e-12)
    hot = one_hot(predicted.long(), classes).double()
    chance = (weights @ hot).square().sum(dim=1)
    value = (agreement - chance) / (1 - chance).clamp_min(1e-12)
    return value.masked_fill(1 - chance < 1e-9, 0.0)


def bootstrap_counts(
    count: int,
    resamples: int = RESAMPLES,
    seed: int = 2022,
) -> Tensor:
    """R × N: how often each image is drawn in each resample."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    counts = torch.zeros(resamples, count)
    return counts.scatter_add_(1, drawn, torch.ones_like(counts))


@dataclass(frozen=True)
class Evidence:
    """How much supports N predictions."""

    structure: float
    """κ."""
    fit: float
    """m."""
    value: float
    """e = (κ − |κ| u/2 + m) / 2."""


class Comparison:
    """The evidence for N source predictions, to compare other predictions of the same images with. `fits`, N × K: the
    probability of each class for each image, given the structure around it."""

    def __init__(
        self,
        before: Tensor,
        neighbours: Tensor,
        classes: int,
        fits: Tensor,
    ) -> None:
        self.neighbours = neighbours
        self.classes = classes
        self.fits = fits.double()
        self.source_predictions = before
        self.no_doubts = torch.zeros_like(before, dtype=torch.bool)
        self.before = self.evidence(before, self.no_doubts)

    def evidence(self, predicted: Tensor, doubted: Tensor) -> Evidence:
        """`doubted`: N booleans, u is their share."""
        structure = float(kappa(predicted, self.neighbours, self.classes))
        fit = float(self.predicted_fits(predicted).mean())
        share = float(doubted.double().mean())
        value = (structure - abs(structure) * share / 2 + fit) / 2
        return Evidence(structure, fit, value)

    def predicted_fits(self, predicted: Tensor) -> Tensor:
        """N: the fit of the predicted class."""
        columns = predicted.long()[:, None]
        return self.fits.gather(1, columns).flatten()

    def draws(self, predicted: Tensor, doubted: Tensor) -> Tensor:
        """R values of e, from a bootstrap over images."""
        structure = kappa(predicted, self.neighbours, self.classes, self.counts)
        fits = self.predicted_fits(predicted)
        both = torch.stack([doubted.double(), fits], dim=1)
        share, fit = (self.counts.double() @ both / len(both)).T
        values: Tensor = structure - structure.abs() * share / 2 + fit
        return (values / 2).cpu()

    @functools.cached_property
    def counts(self) -> Tensor:
        return bootstrap_counts(len(self.fits)).to(self.fits.device)

    @functools.cached_property
    def source_draws(self) -> Tensor:
        return self.draws(self.source_predictions, self.no_doubts)

    def gain(self, after: Tensor, doubted: Tensor) -> Interval:
        """The evidence for other predictions, minus that for the source model's."""
        value = self.evidence(after, doubted).value - self.before.value
        draws = self.draws(after, doubted) - self.source_draws
        return Interval.of(value, draws)


def sample_rows(count: int, most: int = MOST_IMAGES, seed: int = 2022) -> Tensor:
    """Positions of at most `most` of `count` images, drawn at random, in their order: the same whether the images are
    sorted by class or shuffled."""
    if count <= most:
        return torch.arange(count)
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:most].sort().values
