"""Which classes does a target without labels show? Some may be missing, some may be new.

Everything is estimated from the source model's names ℓ_ik = log p(k | i) and from the structure of the images in a
witness's features, by the mixture of `scoring.mixture`.

*Shares.* If some classes are missing, a model that expects all of them spreads the images over all of them. So EM
begins with label shift (Saerens et al. 2002) on sharpened names: π_k ← mean_i of p_ik³ π_k / Σ_j p_ij³ π_j. The
effective number of classes exp(H(π)) then says whether the classes occur in about equal shares: if it is under 8/9 of
K, they do not. A model that prefers one class looks the same, so EM must find the shares unequal from the plain names
too: there the clusters correct a preference, if all classes have clusters.

*New classes.* The mixture is fitted with one cluster per class, and once more with K further clusters that have no
name. Images of new classes form clusters that names do not explain. Both are compared on held-out images:

    explained = (L_named − L_one) / (L_more − L_one)            L: mean log-likelihood of images not used in the fit

L_one has a single Gaussian. If the named clusters explain under 15/16 of the structure, there are new classes. The
search uses half as many dimensions as known classes occur, at least 4 and at most 10: classes differ most in the first
of them, and further ones show structure within classes. If fewer than five classes occur even these do, so new classes
are not looked for.

*Cannot tell.* If the names fit less than half of the structure (κ < ½, `scoring.structure`), neither question has an
answer, and the target is assumed to have the classes of the source.

Shapes: N images, K classes, C clusters without a name, D dimensions of the witness space, k neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.scoring.mixture import UNEVEN_PRIOR, Mixture, fit_mixture, log_joint, log_normal
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import sample_entropy
from usfan.scoring.structure import MOST, NEIGHBOURS, evenly_spaced, kappa

EVEN = 8 / 9
"""Effective share of the classes from which they count as evenly present."""
EXPLAINED = 15 / 16
"""Share of the structure that named clusters must explain if there is nothing new."""
FOLLOWED = 0.5
"""κ from which the names say something about the structure."""
RARE = 0.05
"""Of an equal share; a class with fewer images is taken for an error of the names."""
SHARPNESS = 3.0
"""Exponent of the names in label shift; fitted values of λ are near it."""
ENOUGH = 8
"""Images per class from which clusters without a name are looked for."""
FEWEST = 5
"""Classes that occur from which they are looked for: with 2 to 4 classes of Office-31, 7 of 8 closed sets
seemed to have new ones."""
FOLDS, ROUNDS, SMOOTHED = 5, 12, 10
"""Parts of the images held out in turn; rounds of EM; neighbours that a score is averaged over."""


@dataclass(frozen=True, eq=False)
class Situation:
    """What was found."""

    setting: str
    """closed, partial, open or universal."""
    shares: Tensor
    """K estimated class shares."""
    counts: Tensor
    """K expected numbers of images."""
    effective: float
    """exp(H) / K of the shares, begun with label shift or with the plain names: the larger."""
    explained: float | None
    """Share of the structure that named clusters explain; None if new classes were not looked for."""
    followed: float
    """κ of the names."""

    @property
    def occurs(self) -> Tensor:
        """K booleans."""
        return occurring(self.counts)

    @property
    def reason(self) -> str:
        if self.followed < FOLLOWED:
            return f"the model's predictions follow {self.followed:.0%} of the target's structure: too little to tell"
        classes = len(self.shares)
        found = int(self.occurs.sum())
        even = "in about equal shares" if self.effective >= EVEN else "in unequal shares"
        if self.explained is None:
            few = "images" if several(self.shares, self.effective) else "classes"
            return f"about {found} of {classes} known classes occur, {even}; too few {few} to look for new ones"
        new = "so there are new ones too" if self.explained < EXPLAINED else "so there is nothing new"
        return (
            f"about {found} of {classes} known classes occur, {even}; known classes explain"
            f" {min(self.explained, 1):.0%} of the clusters, {new}"
        )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "setting": self.setting,
            "reason": self.reason,
            "effective_classes": round(self.effective * len(self.shares), 2),
            "explained": None if self.explained is None else round(self.explained, 4),
            "followed": round(self.followed, 4),
            "shares": [round(value, 5) for value in self.shares.tolist()],
        }


@torch.no_grad()
def assess(points: Tensor, centred: Tensor, log_names: Tensor) -> Situation:
    """From N × D points of the witness space, the N × F unit features they come from, and N × K names."""
    rows = evenly_spaced(len(points), max(MOST, 20 * log_names.shape[1])).to(points.device)
    points, centred, names = points[rows], centred[rows], log_names[rows]
    classes = names.shape[1]
    near = nearest_neighbours(centred, SMOOTHED)[0]
    followed = float(kappa(names.argmax(dim=1), near[:, :NEIGHBOURS], classes))
    fit = fit_mixture(points, names, begin=label_shift(names), prior=UNEVEN_PRIOR, rounds=ROUNDS)
    shares = fit.shares
    plain = fit_mixture(points, names, rounds=ROUNDS).shares
    effective = max(effective_share(shares), effective_share(plain))
    explained = None
    if followed >= FOLLOWED and several(shares, effective) and len(points) >= ENOUGH * classes:
        found = int(occurring(shares * len(points)).sum())
        few = points[:, : min(max(found // 2, 4), 10)]
        explained = named_share(few, names, unknown_score(names, near))
    known = followed >= FOLLOWED
    uneven, new = known and effective < EVEN, explained is not None and explained < EXPLAINED
    setting = {(0, 0): "closed", (1, 0): "partial", (0, 1): "open", (1, 1): "universal"}[int(uneven), int(new)]
    return Situation(setting, shares, shares * len(log_names), effective, explained, followed)


def label_shift(log_names: Tensor, rounds: int = 100) -> Tensor:
    """N × K: the sharpened names under the class shares that fit them best."""
    probs = (SHARPNESS * log_names.double()).softmax(dim=1)
    shares = torch.full_like(probs[0], 1 / probs.shape[1])
    for _ in range(rounds):
        r = probs * shares
        r /= r.sum(dim=1, keepdim=True)
        shares = r.mean(dim=0)
    return r.float()


def occurring(counts: Tensor) -> Tensor:
    """K booleans: at least one image, and 5 % of what an equal share of the effective number of classes would be."""
    counts = counts.double()
    shares = counts / counts.sum().clamp_min(1e-12)
    usual = float(counts.sum()) / (effective_share(shares) * len(shares))
    return counts >= max(1.0, RARE * usual)


def several(shares: Tensor, effective: float) -> bool:
    """Whether at least five classes occur: all of them if the shares are about equal, else their effective number."""
    return len(shares) * (1.0 if effective >= EVEN else effective_share(shares)) >= FEWEST


def effective_share(shares: Tensor) -> float:
    """exp(H(π)) / K: 1 if all classes have the same share."""
    return float(torch.special.entr(shares.double()).sum().exp()) / len(shares)


def unknown_score(log_names: Tensor, near: Tensor) -> Tensor:
    """N: entropy of the names, averaged over an image and its neighbours (N × k)."""
    own = sample_entropy(log_names.exp())
    return (own + own[near].sum(dim=1)) / (1 + near.shape[1])


def with_unnamed(points: Tensor, log_names: Tensor, score: Tensor, clusters: int) -> Tensor:
    """N × (K + C) responsibilities to begin with: the half of the images with the higher score in clusters without a
    name, the others by label shift."""
    high = (score > score.median()).nonzero().flatten()
    clusters = min(clusters, len(high))
    r = torch.cat([label_shift(log_names), log_names.new_zeros(len(points), clusters, dtype=torch.float32)], dim=1)
    if clusters:
        r[high] = 0
        r[high, log_names.shape[1] + k_means(points[high], clusters)] = 1
    return r


def k_means(points: Tensor, clusters: int, rounds: int = 30, seed: int = 0) -> Tensor:
    """N cluster numbers; begins with points drawn far from each other (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    points = points.double()
    first = int(torch.randint(len(points), (), generator=generator))
    centres, distance = [points[first]], (points - points[first]).square().sum(dim=1)
    for _ in range(clusters - 1):
        weight = distance.cpu() + 1e-12
        centres.append(points[int(torch.multinomial(weight, 1, generator=generator))])
        distance = torch.minimum(distance, (points - centres[-1]).square().sum(dim=1))
    means = torch.stack(centres)
    for _ in range(rounds):
        own = torch.cdist(points, means).argmin(dim=1)
        count = torch.bincount(own, minlength=clusters)
        total = torch.zeros_like(means).index_add_(0, own, points)
        means = torch.where(count[:, None] > 0, total / count.clamp_min(1)[:, None], means)
    return own


def named_share(points: Tensor, log_names: Tensor, score: Tensor) -> float:
    """The share of the structure that clusters with a name explain, on held-out images."""
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0)).to(points.device)
    sums = torch.zeros(3, dtype=torch.float64)
    for fold in range(FOLDS):
        held = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        held[order[fold::FOLDS]] = True
        seen, names = points[~held], log_names[~held]
        for place, begin in enumerate(
            (label_shift(names), with_unnamed(seen, names, score[~held], log_names.shape[1])), start=1
        ):
            fit = fit_mixture(seen, names, begin=begin, prior=UNEVEN_PRIOR, rounds=ROUNDS)
            sums[place] += likelihood(fit.mixture, points[held], log_names[held])
        sums[0] += one_gaussian(seen, points[held])
    one, named, more = (float(value) for value in sums)
    if more <= max(one, named):  # clusters without a name explain nothing
        return 1.0
    return max((named - one) / (more - one), 0.0)


def likelihood(mixture: Mixture, points: Tensor, log_names: Tensor) -> float:
    """Σ_i log p(u_i | names)."""
    return float(log_joint(mixture, points, log_names).logsumexp(dim=1).sum())


def one_gaussian(seen: Tensor, held: Tensor) -> float:
    """Σ log N(u; mean, covariance of `seen`) over `held`, with the mixture's prior on the covariance."""
    seen, held = seen.double(), held.double()
    count, dimensions = seen.shape
    mean = seen.mean(dim=0)
    scatter = (seen - mean).T @ (seen - mean)
    eye = torch.eye(dimensions, dtype=torch.float64, device=seen.device)
    spread = (scatter.trace() / (count * dimensions)).clamp_min(1e-12)
    covariance = (scatter + dimensions * spread * eye) / (count + dimensions)
    return float(log_normal(held, mean[None], torch.linalg.cholesky(covariance)).sum())
