"""The objectives (Eqs. 1, 2, 3 and 7 of the paper).

    L_ce  = −Σ_k q_k log p_k,  q = (1 − α) y + α/K                    Eq. 1, label smoothing α
    L_ent = E[H(p)],  H(p) = −Σ_k p_k log p_k                          Eq. 2
    L_div = KL(p̂ ‖ 1/K) − log K = Σ_k p̂_k log p̂_k,  p̂ = E[p]          Eq. 3
    L_ent^ug = E[w H(p)]                                               Eq. 7
    L = (1 − γ) L_ent^ug + γ L_div

With class shares π instead of uniform ones, L_div is KL(p̂ ‖ π) − log K, which is Eq. 3 at π = 1/K.

Expectations are over the batch. Over several processes they are over the global batch: `total` sums a tensor over the
processes, each process differentiates its part, and the gradients are then summed.
The entropy of the loss has the recipe's log(p + 1e-5). w carries no gradient.

Shapes: … any leading dimensions (the toy stacks its seeds), B batch, K classes; logits …×B×K, weights …×B.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from usfan.errors import UsfanError

EPSILON = 1e-5
Total = Callable[[Tensor], Tensor]


def alone(values: Tensor) -> Tensor:
    """The sum over one process: identity."""
    return values


def global_sum(values: Tensor, total: Total) -> Tensor:
    """The sum over the global batch, differentiable in this process's part."""
    part = values.sum(dim=0)
    if total is alone:
        return part
    return part + (total(part.detach()) - part.detach())


def global_mean(
    values: Tensor,
    total: Total,
    mask: Tensor | None = None,
) -> Tensor:
    """The mean over the global batch, weighted by `mask` if there is one; 0 if the mask is all 0."""
    if mask is None:
        mask = values.new_ones(len(values))
    weights = mask.view(-1, *[1] * (values.ndim - 1))
    count = total(mask.sum().detach())
    return global_sum(values * weights, total) / count.clamp_min(1)


def entropy(probs: Tensor) -> Tensor:
    """H(p) in nats of probabilities …×K; 0 log 0 = 0."""
    return -torch.xlogy(probs, probs).sum(dim=-1)


def certainty_weights(probs: Tensor) -> Tensor:
    """w = exp(−H) of Algorithm 1: 1 for a one-hot prediction, 1/K for a uniform one."""
    return torch.exp(-entropy(probs))


def recipe_entropy(probs: Tensor) -> Tensor:
    """H(p) as the loss takes it, with the recipe's log(p + 1e-5): the gradient is finite at p = 0."""
    return -(probs * torch.log(probs + EPSILON)).sum(dim=-1)


def diversity(mean_probs: Tensor, shares: Tensor | None = None) -> Tensor:
    """L_div of p̂ …×K: Eq. 3, or relative to the class shares π."""
    value = -recipe_entropy(mean_probs)
    if shares is None:
        return value
    cross = (mean_probs * torch.log(shares + EPSILON)).sum(dim=-1)
    return value - cross - math.log(mean_probs.shape[-1])


def information_maximization(
    logits: Tensor,
    weights: Tensor | None = None,
    gamma: float = 0.5,
) -> Tensor:
    """(1 − γ) L_ent^ug + γ L_div of one batch: Eqs. 2, 3, 7. Without weights and at γ = ½ it is half of SHOT-IM's.

    A run takes the same objective over several processes, known samples and the whole target
    (`adaptation.terms.information`).
    """
    check_objective(logits, weights, gamma)
    probs = logits.softmax(dim=-1)
    entropies = recipe_entropy(probs)
    if weights is not None:
        entropies = weights.detach() * entropies
    mean_entropy = entropies.mean(dim=-1)
    divergence = diversity(probs.mean(dim=-2))
    return (1 - gamma) * mean_entropy + gamma * divergence


def check_objective(
    logits: Tensor,
    weights: Tensor | None,
    gamma: float,
) -> None:
    if logits.ndim < 2 or logits.shape[-1] < 2 or 0 in logits.shape:
        raise UsfanError(
            f"logits must be B×K with at least one sample and two classes; got {tuple(logits.shape)}"
        )
    if weights is not None and weights.shape != logits.shape[:-1]:
        raise UsfanError(
            f"weights must hold one number per sample ({logits.shape[-2]}); got shape {tuple(weights.shape)}"
        )
    if not 0 <= gamma <= 1:
        raise UsfanError(f"gamma must lie between 0 and 1; got {gamma}")


def smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    smoothing: float = 0.1,
) -> Tensor:
    """Eq. 1 per sample, B."""
    return torch.nn.functional.cross_entropy(
        logits,
        labels,
        label_smoothing=smoothing,
        reduction="none",
    )


def contrastive_loss(
    first: Tensor, second: Tensor, alike: Tensor, temperature: float
) -> Tensor:
    """The supervised contrastive loss of two views B×K of each sample, with positive pairs `alike`, B×B; B values.

    The positives of a view are the sample's other view and both views of its partners. 0 for a sample without partner.
    """
    B = len(first)
    each = torch.eye(B, dtype=torch.bool, device=first.device)
    itself = torch.eye(2 * B, dtype=torch.bool, device=first.device)
    views = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    logits = views @ views.T / temperature
    others = logits.masked_fill(itself, -torch.inf).logsumexp(dim=1, keepdim=True)
    positives = ((alike | each).repeat(2, 2) & ~itself).to(logits)
    losses = -((logits - others) * positives).sum(dim=1) / positives.sum(dim=1).clamp_min(1)
    return losses.view(2, B).mean(dim=0) * (alike & ~each).any(dim=1)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k q_k log p_k per sample, for soft targets B×K."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1)
