"""The objectives (Eqs. 1, 2, 3 and 7 of the paper).

    L_ce  = −Σ_k q_k log p_k,  q = (1 − α) y + α/K                    Eq. 1, label smoothing α
    L_ent = E[H(p)],  H(p) = −Σ_k p_k log p_k                          Eq. 2
    L_div = KL(p̂ ‖ 1/K) − log K = Σ_k p̂_k log p̂_k,  p̂ = E[p]          Eq. 3
    L_ent^ug = E[w H(p)]                                               Eq. 7
    L = (1 − γ) L_ent^ug + γ L_div

With class shares π instead of uniform ones, L_div is KL(p̂ ‖ π) − log K, which is Eq. 3 at π = 1/K.

Expectations are over the batch. Over several processes they are over the global batch: `total` sums a tensor over the
processes; each process differentiates its own part, and the gradients are then summed.
The logarithm is log(p + 1e-5), as in the recipe. w carries no gradient.

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
    own = values.sum(dim=0)
    return own + (total(own.detach()) - own.detach()) if total is not alone else own


def global_mean(values: Tensor, total: Total, mask: Tensor | None = None) -> Tensor:
    """The mean over the global batch, weighted by `mask` if one is given; 0 if the mask is all 0."""
    if mask is None:
        mask = values.new_ones(len(values))
    shaped = mask.view(-1, *[1] * (values.ndim - 1))
    return global_sum(values * shaped, total) / total(mask.sum().detach()).clamp_min(1)


def sample_entropy(probs: Tensor) -> Tensor:
    """H(p) per sample, with the recipe's log(p + 1e-5). The exact entropy is `posterior.predictive.entropy`."""
    return -(probs * torch.log(probs + EPSILON)).sum(dim=-1)


def diversity(mean_probs: Tensor, shares: Tensor | None = None) -> Tensor:
    """L_div of p̂ …×K: Eq. 3, or relative to the class shares π."""
    value = (mean_probs * torch.log(mean_probs + EPSILON)).sum(dim=-1)
    if shares is None:
        return value
    return value - (mean_probs * torch.log(shares + EPSILON)).sum(dim=-1) - math.log(mean_probs.shape[-1])


def information_maximization(
    logits: Tensor,
    weights: Tensor | None = None,
    gamma: float = 0.5,
    *,
    parts: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """(1 − γ) L_ent^ug + γ L_div of one batch: Eqs. 2, 3, 7. Without weights and at γ = ½ it is half of SHOT-IM's.

    `parts(probs, weights)` gives L_ent^ug and L_div if their expectations are not those of this batch alone: the loop
    takes them over several processes, known samples and the whole target (`adaptation.terms.information`).
    """
    if logits.ndim < 2 or logits.shape[-1] < 2 or 0 in logits.shape:
        raise UsfanError(f"logits must be B×K with at least one sample and two classes; got {tuple(logits.shape)}")
    if weights is not None and weights.shape != logits.shape[:-1]:
        expected = "one number per sample"
        raise UsfanError(f"weights must hold {expected} ({logits.shape[-2]}); got shape {tuple(weights.shape)}")
    if not 0 <= gamma <= 1:
        raise UsfanError(f"gamma must lie between 0 and 1; got {gamma}")
    entropy, divergence = (parts or batch_parts)(logits.softmax(dim=-1), weights)
    return (1 - gamma) * entropy + gamma * divergence


def batch_parts(probs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """L_ent^ug and L_div with expectations over this batch."""
    entropies = sample_entropy(probs)
    if weights is not None:
        entropies = weights.detach() * entropies
    return entropies.mean(dim=-1), diversity(probs.mean(dim=-2))


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
    """Eq. 1 per sample, B."""
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k q_k log p_k per sample, for soft targets B×K."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1)
