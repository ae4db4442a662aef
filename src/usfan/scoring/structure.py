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

NEIGHBOURS = 5
RESAMPLES = 200
MOST = 2_000
"""Largest number of images used; more cost time and hardly change the interval."""


@dataclass(frozen=True)
class Interval:
    """An estimate with a 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Tensor) -> Interval:
        low, high = torch.quantile(draws.double(), torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
        return cls(value, low, high)


def kappa(predicted: Tensor, neighbours: Tensor, classes: int, weights: Tensor | None = None) -> Tensor:
    """κ of N predicted classes with N×k neighbours; with weights R×N (counts of a bootstrap) R values. An image that is
    drawn twice counts twice, also as a neighbour."""
    if weights is None:
        weights = torch.ones(1, len(predicted), dtype=torch.float64, device=predicted.device)
    weights = weights.double() / weights.sum(dim=1, keepdim=True)
    hot = torch.nn.functional.one_hot(predicted.long(), classes).double()
    alike, pairs = torch.zeros_like(weights), torch.zeros_like(weights)
    for near in neighbours.T:
        drawn = weights[:, near]
        alike += drawn * (predicted[near] == predicted)
        pairs += drawn
    a = (weights * alike).sum(dim=1) / (weights * pairs).sum(dim=1).clamp_min(1e-12)
    chance = (weights @ hot).square().sum(dim=1)
    value = (a - chance) / (1 - chance).clamp_min(1e-12)
    return torch.where(1 - chance < 1e-9, torch.zeros_like(value), value)


def bootstrap_counts(count: int, resamples: int = RESAMPLES, seed: int = 2022) -> Tensor:
    """R × N: how often each image is drawn in each resample."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(count, (resamples, count), generator=generator)
    return torch.zeros(resamples, count).scatter_add_(1, drawn, torch.ones(resamples, count))


@dataclass(frozen=True)
class Evidence:
    """What speaks for N predictions."""

    structure: float
    """κ."""
    fit: float
    """m."""
    value: float
    """e = (κ − |κ| u/2 + m) / 2."""


class Comparison:
    """The evidence for N source predictions, to compare other predictions of the same images with. `fits`, N × K: the
    probability of each class for each image, given the structure around it."""

    def __init__(self, before: Tensor, neighbours: Tensor, classes: int, fits: Tensor) -> None:
        self.neighbours, self.classes, self.fits = neighbours, classes, fits.double()
        self.first = before, torch.zeros_like(before, dtype=torch.bool)
        self.before = self.evidence(*self.first)

    def evidence(self, predicted: Tensor, doubted: Tensor) -> Evidence:
        """`doubted`: N booleans, u is their share."""
        structure, fit = float(kappa(predicted, self.neighbours, self.classes)), float(self.own_fits(predicted).mean())
        value = (structure - abs(structure) * float(doubted.double().mean()) / 2 + fit) / 2
        return Evidence(structure, fit, value)

    def own_fits(self, predicted: Tensor) -> Tensor:
        return self.fits.gather(1, predicted.long()[:, None]).flatten()

    def draws(self, predicted: Tensor, doubted: Tensor) -> Tensor:
        """R values of e, from a bootstrap over images."""
        structure = kappa(predicted, self.neighbours, self.classes, self.counts)
        both = torch.stack([doubted.double(), self.own_fits(predicted)], dim=1)
        share, fit = (self.counts.double() @ both / len(both)).T
        values: Tensor = (structure - structure.abs() * share / 2 + fit) / 2
        return values.cpu()

    @functools.cached_property
    def counts(self) -> Tensor:
        return bootstrap_counts(len(self.fits)).to(self.fits.device)

    @functools.cached_property
    def first_draws(self) -> Tensor:
        return self.draws(*self.first)

    def gain(self, after: Tensor, doubted: Tensor) -> Interval:
        """By how much more speaks for other predictions."""
        value = self.evidence(after, doubted).value - self.before.value
        return Interval.of(value, self.draws(after, doubted) - self.first_draws)


def evenly_spaced(count: int, most: int = MOST) -> Tensor:
    """Positions of at most `most` of `count` images, evenly spaced in their order."""
    return torch.arange(min(count, most)) * count // min(count, most)
