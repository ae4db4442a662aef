"""The objectives (Eqs. 1, 2, 3 and 7 of the paper).

    L_ce  = −Σ_k q_k log p_k,  q = (1 − α) y + α/K                    Eq. 1, label smoothing α
    L_ent = E[H(p)],  H(p) = −Σ_k p_k log p_k                          Eq. 2
    L_div = KL(p̂ ‖ 1/K) − log K = Σ_k p̂_k log p̂_k,  p̂ = E[p]          Eq. 3
    L_ent^ug = E[w H(p)]                                               Eq. 7
    L = (1 − γ) L_ent^ug + γ L_div

Expectations are over the batch. Over several processes they are over the global batch: `total` sums a tensor over the
processes; each process differentiates its own part, and the gradients are then summed.
The logarithm is log(p + 1e-5), as in the recipe. w carries no gradient.

Shapes: B batch, K classes; logits B×K, weights B.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from usfan.errors import UsfanError

EPSILON = 1e-5
Total = Callable[[Tensor], Tensor]


def alone(values: Tensor) -> Tensor:
    """The sum over one process."""
    return values


def global_sum(values: Tensor, total: Total) -> Tensor:
    """The sum over the global batch, differentiable in this process's part."""
    own = values.sum(dim=0)
    return own + (total(own.detach()) - own.detach()) if total is not alone else own


def global_mean(values: Tensor, total: Total, mask: Tensor | None = None) -> Tensor:
    """The mean over the global batch, or over its samples where mask is 1 (weighted by it, else); 0 where none are."""
    if mask is None:
        mask = values.new_ones(len(values))
    shaped = mask.view(-1, *[1] * (values.ndim - 1))
    return global_sum(values * shaped, total) / total(mask.sum().detach()).clamp_min(1)


def sample_entropy(probs: Tensor) -> Tensor:
    """H(p) per sample."""
    return -(probs * torch.log(probs + EPSILON)).sum(dim=-1)


def diversity(mean_probs: Tensor) -> Tensor:
    """L_div of p̂, Eq. 3."""
    return (mean_probs * torch.log(mean_probs + EPSILON)).sum(dim=-1)


def information_maximization(logits: Tensor, weights: Tensor | None = None, gamma: float = 0.5) -> Tensor:
    """(1 − γ) L_ent^ug + γ L_div of one batch: Eqs. 2, 3, 7. Without weights and at γ = ½ it is half of SHOT-IM's."""
    if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) == 0:
        raise UsfanError(f"logits must be B×K with at least one sample and two classes; got {tuple(logits.shape)}")
    if weights is not None and weights.shape != logits.shape[:1]:
        raise UsfanError(f"weights must hold one number per sample ({len(logits)}); got shape {tuple(weights.shape)}")
    if not 0 <= gamma <= 1:
        raise UsfanError(f"gamma must lie between 0 and 1; got {gamma}")
    probs = logits.softmax(dim=1)
    entropies = sample_entropy(probs)
    if weights is not None:
        entropies = weights.detach() * entropies
    return (1 - gamma) * entropies.mean() + gamma * diversity(probs.mean(dim=0))


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
    """Eq. 1 per sample, B."""
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k q_k log p_k per sample, for soft targets B×K."""
    return -(targets * logits.log_softmax(dim=1)).sum(dim=1)
