"""The losses of the authors' programs, one sample at a time, in float64 and differentiable: SHOT, U-SFAN, LSC, NRC,
AaD, UPA, CoWA, SHOT++, TENT. Transcribed from their formulas; what a program does to its tables happens here too.

Shapes: N target samples, B batch, K classes, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPSILON = 1e-5
Network = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pictures to features and logits."""


def entropies(p: Tensor) -> Tensor:
    """B×K: the summands of H(p)."""
    return -p * torch.log(p + EPSILON)


def information(logits: Tensor, weights: Tensor) -> Tensor:
    """SHOT-IM, and with weights U-SFAN's program for CIFAR: mean_i w_i H(p_i) − H(p̄)."""
    p = logits.softmax(dim=1)
    each = torch.stack([(w * h).sum() for w, h in zip(weights, entropies(p), strict=True)])
    return each.mean() - entropies(p.mean(dim=0)).sum()


def toy_information(logits: Tensor, weights: Tensor) -> Tensor:
    """U-SFAN's program for the toy: N entropies times N × 1 weights are N × N products; all are averaged."""
    p = logits.softmax(dim=1)
    each = entropies(p).sum(dim=1)
    products = torch.stack([torch.stack([w * h for h in each]) for w in weights])
    return products.mean() - entropies(p.mean(dim=0)).sum()


def centroid_labels(features: Tensor, probs: Tensor, threshold: int = 0) -> list[int]:
    """SHOT's pseudo-labels in a partial set: each round counts the classes again."""
    rows = torch.cat([features, torch.ones(len(features), 1).to(features)], dim=1)
    rows = torch.stack([row / row.norm() for row in rows])
    classes = probs.shape[1]
    labels = probs.argmax(dim=1).tolist()
    share = probs
    for _ in range(2):
        present = [k for k in range(classes) if labels.count(k) > threshold]
        centres = {
            k: sum(share[i, k] * rows[i] for i in range(len(rows))) / share[:, k].sum()
            for k in present
        }
        labels = [
            max(centres, key=lambda k, row=row: float(row @ centres[k] / centres[k].norm()))
            for row in rows
        ]
        share = torch.eye(classes).to(probs)[labels]
    return labels


def diversity(logits: Tensor) -> Tensor:
    """The third term of LSC and NRC."""
    return -entropies(logits.softmax(dim=1).mean(dim=0)).sum()


class Bank:
    """N unit features and N predictions."""

    def __init__(self, features: Tensor, probs: Tensor) -> None:
        self.features = torch.stack([row / row.norm() for row in features])
        self.probs = probs.clone()

    def write(self, samples: Sequence[int], features: Tensor, probs: Tensor) -> None:
        for row, sample in enumerate(samples):
            self.features[sample] = features[row].detach() / features[row].detach().norm()
            self.probs[sample] = probs[row].detach()

    def row(self, sample: int) -> Tensor:
        return self.probs[sample].clone()

    def nearest(self, row: Tensor, k: int, without: int | None = None) -> list[int]:
        similar = (self.features @ (row.detach() / row.detach().norm())).tolist()
        others = [j for j in range(len(similar)) if j != without]
        return sorted(others, key=lambda j: -similar[j])[:k]


def lsc(bank: Bank, samples: Sequence[int], features: Tensor, logits: Tensor, k: int) -> Tensor:
    """−Σ_j log p·p_j, with the bank as it was before the step; a sample's own row is one of the nearest."""
    p = logits.softmax(dim=1)
    losses = [
        -sum(torch.log(p[i] @ bank.row(j)) for j in bank.nearest(features[i], k))
        for i in range(len(samples))
    ]
    bank.write(samples, features, p)
    return torch.stack(losses).mean()


def nrc(
    bank: Bank,
    samples: Sequence[int],
    features: Tensor,
    logits: Tensor,
    near: int,
    further: int,
    weak: float,
) -> Tensor:
    """Their KL(p_j ‖ ·) of unlogged predictions is −p·p_j and a constant, which is left out."""
    p = logits.softmax(dim=1)
    bank.write(samples, features, p)
    losses = []
    for i, sample in enumerate(samples):
        loss = torch.zeros((), dtype=p.dtype)
        for j in bank.nearest(features[i], near, sample):
            beyond = bank.nearest(bank.features[j], further, j)
            loss = loss - (1.0 if sample in beyond else weak) * (p[i] @ bank.row(j))
            for m in beyond:
                loss = loss - weak * (p[i] @ bank.row(m))
        losses.append(loss)
    return torch.stack(losses).mean()


def aad(
    bank: Bank, samples: Sequence[int], features: Tensor, logits: Tensor, k: int, alpha: float
) -> Tensor:
    p = logits.softmax(dim=1)
    bank.write(samples, features, p)
    losses = []
    for i, sample in enumerate(samples):
        pulled = sum(p[i] @ bank.row(j) for j in bank.nearest(features[i], k, sample))
        pushed = sum(p[i] @ p[m] for m in range(len(samples)) if m != i)
        losses.append(alpha * pushed - pulled)
    return torch.stack(losses).mean()


def upa_clean(
    features: Tensor, labels: Sequence[int], classes: int, voters: int, votes: int, share: float
) -> list[bool]:
    """Features have a 1 appended for their length alone. Ties go to the sample that comes first."""
    rows = [row / torch.cat([row, torch.ones(1).to(row)]).norm() for row in features]
    current = list(labels)
    for _ in range(votes):
        after = []
        shares = []
        for i, row in enumerate(rows):
            similar = {j: float(row @ rows[j]) for j in range(len(rows)) if j != i}
            near = sorted(similar, key=lambda j: -similar[j])[:voters]
            votes_for = torch.zeros(classes, dtype=torch.float64)
            for j in near:
                votes_for[current[j]] += torch.tensor(similar[j] / 5).double().exp()
            votes_for = votes_for / votes_for.sum()
            shares.append(min(max(float(votes_for[labels[i]]), 1e-4), 1 - 1e-4))
            after.append(int(votes_for.argmax()))
        current = after
    clean = [False] * len(rows)
    for k in range(classes):
        members = [i for i, label in enumerate(labels) if label == k]
        best = sorted(members, key=lambda i: (-round(shares[i], 6), i))
        for i in best[: int(share * len(members) + 1e-6)]:
            clean[i] = True
    return clean


def upa_contrast(
    first: Tensor, second: Tensor, labels: Sequence[int], clean: Sequence[bool], t: float
) -> Tensor:
    """Anchors are both views of the samples that have a partner: a clean sample of their label, if they are clean."""
    views = [row / row.norm() for row in (*first, *second)]
    B = len(first)
    total = torch.zeros((), dtype=first.dtype)
    for i in range(B):
        partners = [
            j for j in range(B) if j != i and clean[i] and clean[j] and labels[i] == labels[j]
        ]
        if not partners:
            continue
        for anchor, twin in ((i, i + B), (i + B, i)):
            others = [m for m in range(2 * B) if m != anchor]
            below = torch.stack([torch.exp(views[anchor] @ views[m] / t) for m in others]).sum()
            positives = [twin, *partners, *(j + B for j in partners)]
            logs = [views[anchor] @ views[m] / t - torch.log(below) for m in positives]
            total = total - torch.stack(logs).mean() / 2
    return total / B


def cross_entropy(logits: Tensor, labels: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The mean over these rows."""
    logs = logits.log_softmax(dim=1)
    return -torch.stack([logs[i, labels[i]] for i in rows]).mean()


def jmds(features: Tensor, probs: Tensor) -> tuple[list[int], list[float]]:
    """CoWA's labels and scores: Gaussians of the unit features, two rounds, the first with equal weights in the
    covariances."""
    rows = torch.stack([row / row.norm() for row in features])
    samples, classes = probs.shape
    width = rows.shape[1]
    means_by = probs
    spread_by = torch.ones_like(probs) / classes
    for _ in range(2):
        logs = torch.zeros_like(probs)
        for k in range(classes):
            size = means_by[:, k].sum()
            mean = sum(means_by[i, k] * rows[i] for i in range(samples)) / size
            away = [row - mean for row in rows]
            spread = torch.zeros(width, width).to(rows)
            for i in range(samples):
                spread = spread + spread_by[i, k] * torch.outer(away[i], away[i])
            spread = spread / spread_by[:, k].sum() + 1e-6 * torch.eye(width).to(rows)
            inverse = torch.linalg.inv(spread)
            constant = width * math.log(2 * math.pi) + torch.logdet(spread)
            for i in range(samples):
                logs[i, k] = size.log() - (constant + away[i] @ inverse @ away[i]) / 2
        logs = logs - torch.logsumexp(logs, dim=1, keepdim=True)
        means_by = spread_by = logs.exp()
    ranked = [sorted(row, reverse=True) for row in logs.tolist()]
    gaps = [row[0] - row[1] for row in ranked]
    labels = logs.argmax(dim=1).tolist()
    return labels, [gaps[i] / max(gaps) * float(probs[i, labels[i]]) for i in range(samples)]


def cowa(
    network: Network,
    images: Tensor,
    labels: Sequence[int],
    scores: Sequence[float],
    partners: Sequence[int],
    shares: Sequence[float],
    classes: int,
) -> Tensor:
    """Mixup of each image with its partner: pixels, one-hot labels and scores."""
    total = torch.zeros((), dtype=images.dtype)
    for i, (j, share) in enumerate(zip(partners, shares, strict=True)):
        _, logits = network((share * images[i] + (1 - share) * images[j])[None])
        p = logits[0].softmax(dim=0)
        weight = share * scores[i] + (1 - share) * scores[j]
        for k in range(classes):
            target = share * (labels[i] == k) + (1 - share) * (labels[j] == k)
            total = total - weight * target * torch.log(p[k] + 1e-6)
    return total / len(images)


def rotation(
    network: Network, images: Tensor, turns: Sequence[int], weight: Tensor, bias: Tensor
) -> Tensor:
    """SHOT++: a linear layer sees a picture, without a gradient, and the turned one."""
    losses = []
    for image, turn in zip(images, turns, strict=True):
        upright, _ = network(image[None])
        turned, _ = network(torch.rot90(image, turn, dims=(1, 2))[None])
        logits = weight @ torch.cat([upright[0].detach(), turned[0]]) + bias
        losses.append(-logits.log_softmax(dim=0)[turn])
    return torch.stack(losses).mean()


def labelled_share(probs: Tensor) -> tuple[list[int], list[bool]]:
    """SHOT++'s split: of each predicted class the same share, the lowest entropies first."""
    each = entropies(probs).sum(dim=1)
    share = int((each < each.mean()).sum()) / len(probs)
    labels = probs.argmax(dim=1).tolist()
    chosen: set[int] = set()
    for k in set(labels):
        members = sorted((i for i, y in enumerate(labels) if y == k), key=lambda i: each[i])
        chosen |= set(members[: int(len(members) * share + 1e-9)])
    return labels, [i in chosen for i in range(len(probs))]


def mixmatch(
    network: Network,
    views: tuple[Tensor, Tensor],
    labels: Sequence[int],
    labelled: Sequence[bool],
    partners: Sequence[int],
    shares: Sequence[float],
    weight: float,
) -> Tensor:
    """Both views of each image, mixed with the same view of its partner."""
    guesses = [network(view)[1].softmax(dim=1).detach() for view in views]
    classes = guesses[0].shape[1]
    targets = []
    for i, label in enumerate(labels):
        p = (guesses[0][i] + guesses[1][i]) / 2
        one_hot = torch.eye(classes).to(p)[label]
        targets.append(one_hot if labelled[i] else p**2 / (p**2).sum())
    supervised: list[Tensor] = []
    apart: list[Tensor] = []
    for view in views:
        for i, j in enumerate(partners):
            share = max(shares[i], 1 - shares[i])
            _, logits = network((share * view[i] + (1 - share) * view[j])[None])
            target = share * targets[i] + (1 - share) * targets[j]
            if labelled[i]:
                supervised.append(-(target * logits[0].log_softmax(dim=0)).sum())
            else:
                apart.append(((logits[0].softmax(dim=0) - target) ** 2).mean())
    return torch.stack(supervised).mean() + weight * torch.stack(apart).mean()


def tent(logits: Tensor) -> Tensor:
    return -(logits.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1).mean()
