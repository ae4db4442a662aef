"""Namings of clusters by enumeration, and the head of a few labels by autograd, in float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def exact_marginals(scores: Tensor) -> Tensor:
    """P(cluster c is named k), K × K, by all K! namings."""
    size = len(scores)
    rows = torch.arange(size)
    namings = torch.tensor(list(itertools.permutations(range(size))))
    weights = scores[rows, namings].sum(1).softmax(0)
    table = torch.zeros_like(scores)
    for weight, naming in zip(weights, namings, strict=True):
        table[rows, naming] += weight
    return table


def head_log_posterior(
    offset: Tensor, features: Tensor, labels: Tensor, precision: float, theta: Tensor
) -> Tensor:
    """log p(y, V, σ) up to a constant; theta holds V (K × W, by rows) and σ."""
    classes = offset.shape[1]
    weight = theta[:-1].view(classes, -1)
    logits = theta[-1] * offset + features @ weight.T
    likelihood = logits.log_softmax(1)[torch.arange(len(labels)), labels].sum()
    prior = 0.5 * precision * weight.square().sum() + 0.5 * (theta[-1] - 1) ** 2
    return likelihood - prior


def block_log_determinant(
    offset: Tensor, features: Tensor, labels: Tensor, precision: float, theta: Tensor
) -> float:
    """½ Σ_k log|I + H_kk/α|, H_kk the block of the dense Hessian of the likelihood that belongs to class k."""
    classes = offset.shape[1]
    width = features.shape[1]

    def likelihood(flat: Tensor) -> Tensor:
        logits = theta[-1] * offset + features @ flat.view(classes, width).T
        return logits.log_softmax(1)[torch.arange(len(labels)), labels].sum()

    hessian = -torch.autograd.functional.hessian(likelihood, theta[:-1])
    total = 0.0
    for k in range(classes):
        part = slice(k * width, (k + 1) * width)
        block = hessian[part, part]
        total += 0.5 * float(torch.logdet(torch.eye(width).double() + block / precision))
    return total
