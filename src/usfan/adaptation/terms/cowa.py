"""CoWA-JMDS: cross-entropy on mixup, each sample weighted by how sure the data and the model are of its label.

A Gaussian per class, fitted to the unit features by two rounds of EM from the model's predictions, gives the labels
ŷ = argmax_k log π_k N(z̄; μ_k, Σ_k). In the first round every sample counts alike in the covariances. With γ_k the
posterior log-probabilities of the classes,

    LPG  = (γ_first − γ_second) / max over the target        how clear the structure of the data is
    JMDS = LPG · p_ŷ                                          p_ŷ: the model's probability of that label
    L    = −E[w̃ Σ_k ỹ_k log(p_k(x̃) + 1e-6)]                   x̃, ỹ, w̃: mixup of images, labels and JMDS

Shapes: N target samples, B batch, K classes, D features. Memory: N × (D + K); covariances are made one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from usfan.adaptation.terms.mixup import Mixup
from usfan.adaptation.terms.term import Batch, Context, Outputs

RIDGE = 1e-6
"""Added to the diagonal of each covariance: `--epsilon` of the authors' image_target_CoWA.py (Jhyun17/CoWA-JMDS), which
adds a hundred times as much if a covariance cannot be inverted in float32. Here float64 takes care of that."""
EPSILON = 1e-6
"""Added to the probabilities in the logarithm: `--epsilon2` there."""


@dataclass
class WeightedMixup(Mixup):
    """Cross-entropy on mixup, weighted by JMDS."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.targets = torch.zeros_like(context.source.probs)
        self.scores = context.source.probs.new_zeros(context.count)

    def refresh(self, outputs: Outputs) -> None:
        known = self.guidance.known
        labels, scores = jmds(outputs.features, outputs.probs, known)
        self.targets.copy_(one_hot(labels, outputs.probs.shape[1]))
        self.scores.copy_(scores * known)

    def __call__(self, batch: Batch) -> Tensor:
        samples = batch.samples
        images, targets, weights = self.mixed(
            batch,
            self.shares[samples],
            batch.images,
            self.targets[samples],
            self.scores[samples],
        )
        _, logits = batch.forward(images)
        each = -(targets * torch.log(logits.softmax(dim=1) + EPSILON)).sum(dim=1)
        loss = self.context.mean(weights * each)
        batch.notes["loss_mixup"] = loss
        return loss


def jmds(
    features: Tensor,
    probs: Tensor,
    known: Tensor,
) -> tuple[Tensor, Tensor]:
    """Labels N and scores N in [0, 1]; samples that are not known (N) have no part in the Gaussians."""
    phi = normalize(features, dim=1)
    shares = probs
    spread = torch.ones_like(probs)
    for _ in range(2):
        logs = class_log_probs(phi, shares * known[:, None], spread * known[:, None])
        shares = logs.exp()
        spread = shares
    top = logs.topk(2, dim=1)
    gap = top.values[:, 0] - top.values[:, 1]
    labels = top.indices[:, 0]
    label_probs = probs.gather(1, labels[:, None])[:, 0]
    return labels, gap / gap.max().clamp_min(1e-12) * label_probs


def class_log_probs(
    phi: Tensor,
    shares: Tensor,
    spread: Tensor,
) -> Tensor:
    """log P(k | φ), N×K, of Gaussians with means and weights by `shares` N×K, and covariances by `spread` N×K. D×D
    matrices are inverted in float64: a class may have fewer samples than features, and only the ridge for the rest."""
    sizes = shares.sum(dim=0).clamp_min(1e-12)
    means = shares.T @ phi / sizes[:, None]
    unit = torch.eye(phi.shape[1], dtype=torch.float64, device=phi.device)
    columns = []
    for mean, size, part in zip(means, sizes, spread.T, strict=True):
        away = phi - mean
        part = part.double()
        # in float32, with TF32 above all, the covariance can be indefinite
        weighted = away.double() * part.sqrt()[:, None]
        covariance = weighted.T @ weighted / part.sum().clamp_min(1e-12)
        root = torch.linalg.cholesky(covariance + RIDGE * unit)
        whiten = torch.linalg.solve_triangular(root, unit, upper=False).to(phi)
        distance = (away @ whiten.T).square().sum(dim=1)
        log_determinant = root.diagonal().log().sum().to(phi)
        columns.append(size.log() - log_determinant - distance / 2)
    return torch.stack(columns, dim=1).log_softmax(dim=1)
