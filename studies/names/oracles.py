"""Checks of `studies.names.names` against slow, exact computations in float64.

python -m studies.names.oracles
"""

from __future__ import annotations

import itertools

import torch
from studies.names.names import (
    PinnedLabels,
    fit_label_head,
    fit_named,
    naming_marginals,
    pool_weights,
)
from torch import Tensor


def exact_marginals(scores: Tensor) -> Tensor:
    """A by the enumeration of all K! namings."""
    size = len(scores)
    rows = torch.arange(size)
    namings = torch.tensor(list(itertools.permutations(range(size))))
    weights = scores[rows, namings].sum(1).softmax(0)
    table = torch.zeros_like(scores)
    for weight, naming in zip(weights, namings, strict=True):
        table[rows, naming] += weight
    return table


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for spread in (0.5, 1.0, 2.0, 4.0):
        errors = []
        for _ in range(20):
            scores = spread * torch.randn(6, 6, generator=generator, dtype=torch.float64)
            errors.append((naming_marginals(scores) - exact_marginals(scores)).abs().max())
        worst = torch.stack(errors)
        print(
            f"marginals, scores of spread {spread}: largest error {worst.mean():.3f} on average"
        )
    points = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    log_names = torch.randn(60, 4, generator=generator, dtype=torch.float64).log_softmax(1)
    pinned = PinnedLabels(torch.arange(8), torch.arange(8) % 4)
    energies = []
    for rounds in range(1, 15):
        fit = fit_named(
            points, log_names, log_names.exp(), pinned, rounds=rounds, tolerance=-1e9
        )
        energies.append(fit.free_energy)
    rises = max(b - a for a, b in itertools.pairwise(energies))
    print(f"free energy with pinned labels: largest rise in 14 rounds {rises:.1e}")
    head = fit_label_head(log_names, points, pinned)
    weight = head.weights[-1].clone().requires_grad_()
    scale = head.scales[-1].clone().requires_grad_()
    logits = scale * log_names[pinned.rows] + points[pinned.rows] @ weight.T
    fitted = logits.log_softmax(1)[torch.arange(8), pinned.labels].sum()
    precision = 2.0**-6 * float(points.square().sum(1).mean())
    loss = fitted - 0.5 * precision * weight.square().sum() - 0.5 * (scale - 1) ** 2
    slopes = torch.autograd.grad(loss, (weight, scale))
    print(f"head: gradient {slopes[0].abs().max():.1e}, of the scale {slopes[1].abs():.1e}")
    experts = [
        torch.randn(8, 4, generator=generator, dtype=torch.float64).softmax(1) for _ in "abc"
    ]
    weights = pool_weights(experts, pinned.labels, (1.0, 0.0, 0.0)).requires_grad_()
    logs = torch.stack([probs.log() for probs in experts])
    pooled = torch.einsum("e,elk->lk", weights, logs).log_softmax(1)
    value = pooled[torch.arange(8), pinned.labels].sum()
    value = value - 0.5 * (weights - torch.tensor([1.0, 0.0, 0.0])).square().sum()
    slope = torch.autograd.grad(value, weights)[0]
    inside = weights > 0
    print(
        f"pool: gradient of positive weights {slope[inside].abs().max():.1e}, others {slope[~inside]}"
    )


if __name__ == "__main__":
    main()
