"""Labels of a few target images move the source model's names, and say how far to trust the clusters.

*Head.* Of an image i we have the source's log-names ℓ_i (an offset) and the witness's features x_i:

    p(y_i) = softmax(σ ℓ_i + V x_i),   V ~ N(0, 1/α),   σ ~ N(1, 1)

V lies in the span of the L labelled rows X, V = aᵀX, so that everything is L × L. The Hessian of the likelihood is at
most ½ (I − 11ᵀ/K) ⊗ XXᵀ (Böhning, 1992), which does not depend on V: one eigendecomposition serves every step, none of
which lowers the posterior, and every α. The names are averaged over α, weighted by Laplace's evidence

    log p(y | α) ≈ max_{V,σ} [Σ_i log p(y_i) − ½α‖V‖² − ½(σ − 1)²] − ½ Σ_k log|I + W_k^½ XXᵀ W_k^½ / α|

with W_k = diag(p_k (1 − p_k)) of the labelled images: the blocks of the Hessian that belong to one class each.

*Pool.* E experts say p_e of an image. Labels that they were not fitted to weigh them:

    p ∝ Π_e p_e^{w_e},   w = argmax_{w ≥ 0} Σ_i log p(y_i) − ½‖w − c‖²

Shapes: N images, K classes, W witness features, L labelled images, P precisions, E experts. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.maths.user_labels import UserLabels

PRECISIONS = tuple(2.0**power for power in range(2, -7, -1))
"""Prior precisions α, times the mean square of the features, over which the names are averaged."""
EVIDENCE_LABELS = 300
"""Labels that weigh the precisions: with more, the weights hardly change and cost L³."""
NEGLIGIBLE = 1e-4
"""Weight below which a precision is left out."""
FLOOR = 1e-6
"""Least probability of a class."""
HEAD_STEPS = 60


@dataclass(frozen=True, eq=False)
class LabelHead:
    """The head that the labels moved, one for each precision."""

    scales: Tensor
    """σ, P."""
    weights: Tensor
    """V, P × K × W."""
    log_evidence: Tensor
    """P."""

    def probs(self, log_names: Tensor, features: Tensor) -> Tensor:
        """N × K, averaged over the precisions."""
        total = torch.zeros_like(log_names)
        shares = self.log_evidence.softmax(0)
        for scale, weight, share in zip(self.scales, self.weights, shares, strict=True):
            if float(share) > NEGLIGIBLE:
                total += share * (scale * log_names + features @ weight.T).softmax(1)
        return total / total.sum(1, keepdim=True)


@dataclass(frozen=True, eq=False)
class HeadData:
    """The labelled images as the fit of a head sees them."""

    offset: Tensor
    """ℓ, L × K."""
    target: Tensor
    """One-hot labels, L × K."""
    gram: Tensor
    """XXᵀ, L × L."""
    values: Tensor
    vectors: Tensor
    """Eigenvalues and eigenvectors of the gram matrix."""


def fit_label_head(log_names: Tensor, features: Tensor, labels: UserLabels) -> LabelHead:
    """From log-names N × K, features N × W and at least one label."""
    x = features[labels.rows]
    gram = x @ x.T
    values, vectors = torch.linalg.eigh(gram)
    target = one_hot(labels.labels, log_names.shape[1]).to(log_names)
    data = HeadData(log_names[labels.rows], target, gram, values.clamp_min(0), vectors)
    unit = float(features.square().sum(1).mean())
    dual = torch.zeros_like(data.offset)
    scale = 1.0
    scales = []
    weights = []
    evidence = []
    for relative in PRECISIONS:  # from the strongest prior: each fit begins with the one before
        precision = relative * unit
        dual, scale, value = fit_precision(data, precision, dual, scale)
        scales.append(scale)
        weights.append(dual.T @ x)
        logits = scale * data.offset + gram @ dual
        evidence.append(value - half_log_determinant(logits, gram, precision))
    return LabelHead(
        torch.tensor(scales).to(log_names),
        torch.stack(weights),
        torch.tensor(evidence).to(log_names),
    )


def fit_precision(
    data: HeadData, precision: float, dual: Tensor, scale: float
) -> tuple[Tensor, float, float]:
    """a (L × K), σ and the log-posterior at its maximum, by Böhning's steps on V and Newton's on σ. Both raise it."""
    inverse = data.vectors @ torch.diag(1 / (0.5 * data.values + precision)) @ data.vectors.T
    value = -math.inf
    for _ in range(HEAD_STEPS):
        logits = scale * data.offset + data.gram @ dual
        probs = logits.softmax(1)
        before = value
        likelihood = float((data.target * logits.log_softmax(1)).sum())
        size = float((dual * (data.gram @ dual)).sum())
        value = likelihood - 0.5 * precision * size - 0.5 * (scale - 1) ** 2
        if value - before < 1e-4:
            break
        dual = dual + inverse @ (data.target - probs - precision * dual)
        probs = (scale * data.offset + data.gram @ dual).softmax(1)
        mean = (probs * data.offset).sum(1, keepdim=True)
        slope = float(((data.target - probs) * data.offset).sum()) - (scale - 1)
        curvature = float((probs * (data.offset - mean).square()).sum()) + 1
        scale = max(0.0, scale + slope / curvature)
    return dual, scale, value


def half_log_determinant(logits: Tensor, gram: Tensor, precision: float) -> float:
    """½ Σ_k log|I + W_k^½ XXᵀ W_k^½ / α|, from at most `EVIDENCE_LABELS` labels, for all of them."""
    few = min(len(logits), EVIDENCE_LABELS)
    probs = logits[:few].softmax(1)
    roots = (probs * (1 - probs)).sqrt()
    eye = torch.eye(few).to(gram)
    total = 0.0
    for root in roots.T:
        inner = eye + root[:, None] * gram[:few, :few] * root / precision
        total += float(torch.linalg.cholesky(inner).diagonal().log().sum())
    return total * len(logits) / few


def pool_weights(held_out: Tensor, labels: Tensor, centre: Sequence[float]) -> Tensor:
    """w, E, from what each expert says of labelled images that it was not fitted to (E × L × K probabilities).
    Projected Newton steps on the free weights never lower the concave objective."""
    logs = held_out.clamp_min(FLOOR).log()
    start = torch.tensor(centre).to(logs)
    rows = torch.arange(len(labels), device=labels.device)

    def objective(weights: Tensor) -> float:
        fitted = torch.einsum("e,elk->lk", weights, logs).log_softmax(1)[rows, labels].sum()
        return float(fitted - 0.5 * (weights - start).square().sum())

    weights = start
    for _ in range(30):
        probs = torch.einsum("e,elk->lk", weights, logs).softmax(1)
        rest = logs - torch.einsum("lk,elk->el", probs, logs)[:, :, None]
        gradient = rest[:, rows, labels].sum(1) - (weights - start)
        free = (weights > 0) | (gradient > 0)
        hessian = torch.einsum("lk,elk,flk->ef", probs, rest, rest)
        hessian = hessian + torch.eye(len(start)).to(hessian)
        step = torch.zeros_like(weights)
        step[free] = torch.linalg.solve(hessian[free][:, free], gradient[free])
        length = 1.0
        moved = (weights + step).clamp_min(0)
        while length > 1e-6 and objective(moved) < objective(weights):
            length /= 2
            moved = (weights + length * step).clamp_min(0)
        if objective(moved) - objective(weights) < 1e-9:
            break
        weights = moved
    return weights


def pool(experts: Tensor, weights: Tensor) -> Tensor:
    """N × K probabilities, from E × N × K of the experts."""
    logs = experts.clamp_min(FLOOR).log()
    return torch.einsum("e,enk->nk", weights, logs).softmax(1)
