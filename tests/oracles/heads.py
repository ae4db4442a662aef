"""A few heads written out one by one, in float64: their mean prediction, dropout over every mask there is, and the
optimum of a weighted, regularised head by Newton's method with the whole Hessian."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian


def mean_prediction(
    z: Tensor, heads: list[tuple[Tensor, Tensor]], shares: list[float], tau: float
) -> tuple:
    """p̂ of one sample (K values), and its mutual information, for heads (W, b) that count with these shares."""
    predictions = [
        (((weight @ z + bias) / tau).softmax(dim=0), share)
        for (weight, bias), share in zip(heads, shares, strict=True)
    ]
    mean = sum(share * p for p, share in predictions)
    each = sum(share * own_entropy(p) for p, share in predictions)
    return mean, own_entropy(mean) - each


def own_entropy(p: Tensor) -> float:
    return -sum(float(v) * math.log(float(v)) for v in p if float(v) > 0)


def all_dropped(
    weight: Tensor, bias: Tensor, rate: float
) -> tuple[list[tuple[Tensor, Tensor]], list[float]]:
    """The 2^D heads that dropout can make, and their probabilities."""
    heads = []
    shares = []
    for kept in itertools.product((0.0, 1.0), repeat=weight.shape[1]):
        mask = torch.tensor(kept, dtype=torch.float64)
        heads.append((weight.double() * mask / (1 - rate), bias.double()))
        shares.append((1 - rate) ** sum(kept) * rate ** (len(kept) - sum(kept)))
    return heads, shares


def best_head(
    z: Tensor, labels: Tensor, counts: Tensor, classes: int, precision: float, smoothing: float
) -> Tensor:
    """θ = [W, b], K × (D + 1), that minimises Σ c CE_α + ½ δ ‖θ‖²: Newton's method from zero."""
    phis = torch.cat([z.double(), torch.ones(len(z), 1, dtype=torch.float64)], dim=1)
    target = torch.full((len(z), classes), smoothing / classes, dtype=torch.float64)
    target[torch.arange(len(z)), labels] += 1 - smoothing

    def loss(theta: Tensor) -> Tensor:
        log_p = (phis @ theta.view(classes, -1).T).log_softmax(dim=1)
        return (
            -(counts * (target * log_p).sum(dim=1)).sum()
            + 0.5 * precision * theta.square().sum()
        )

    theta = torch.zeros(classes * phis.shape[1], dtype=torch.float64)
    for _ in range(30):
        theta = theta - torch.linalg.solve(hessian(loss, theta), jacobian(loss, theta))
    assert float(jacobian(loss, theta).abs().max()) < 1e-9
    return theta.view(classes, -1)
