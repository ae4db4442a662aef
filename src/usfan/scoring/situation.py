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

L_one has a single Gaussian. One of K classes is about 1/K of the structure. If three quarters of that are unexplained,

    explained < 1 − ¾ / K

there are new classes. What is unexplained is the geometric mean over two views of the images (the witness's features
and the source model's own; the model's own and the pixels, if no pretrained network fits): names that fit badly leave
structure unexplained in one view, new classes in both. The names must follow half of the structure in both (κ ≥ ½,
`scoring.structure`), or the views show something else than classes. Without a witness κ must be 3/5: the source
model's features and pixels show more than classes.

The search uses half as many dimensions as known classes occur, at least 4 and at most 10: classes differ most in the
first of them, and further ones show structure within classes. If fewer than eight classes occur even these do, so the
names must follow more (κ ≥ 3/5); with fewer than five, new ones are not looked for. At most 1,000 images are looked at,
or 20 per class: with hundreds of each, structure within classes is found too. If there are new classes, the shares are
those of the named clusters in the fit with further ones: in a fit without them, new classes fill known ones that are
missing.

*Names that follow little.* If the names fit less than half of the structure (κ < ½), they distort the shares, and only
clearly unequal ones count (under 5/6 of K). New classes are not looked for: a strong shift leaves as much unexplained
as they do, and a false alarm can leave the model worse than before.

Shapes: N images, K classes, C clusters without a name, D dimensions of the witness space, k neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from usfan.scoring.mixture import UNEVEN_PRIOR, Mixture, fit_mixture, fit_witness_space, log_joint, log_normal
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.objectives import sample_entropy
from usfan.scoring.structure import MOST, NEIGHBOURS, evenly_spaced, kappa

EVEN = 8 / 9
"""Effective share of the classes from which they count as evenly present."""
CLEAR = 5 / 6
"""The same if the names follow less than half of the structure."""
UNEXPLAINED = 3 / 4
"""Of the structure of one class: from here on, what named clusters leave unexplained is a new one."""
FOLLOWED, TRUSTED = 0.5, 0.6
"""κ from which the names say something about the structure, and structure that they do not explain may be new classes:
with a witness and eight classes or more, and otherwise."""
RARE = 0.05
"""Of an equal share; a class with fewer images is taken for an error of the names."""
SCARCE = 0.5
"""The same beside new classes: some of their images land in clusters of missing ones."""
SHARPNESS = 3.0
"""Exponent of the names in label shift; fitted values of λ are near it."""
SEARCHED = 1_000
"""Images that the search looks at, unless 20 per class are more."""
ENOUGH = 8
"""Images per class from which clusters without a name are looked for."""
FEWEST, SEVERAL = 5, 8
"""Classes that occur from which they are looked for, and from which κ ≥ ½ suffices."""
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
    """exp(H) / K of the shares, begun with label shift or with the plain names: the larger. Beside new classes, of the
    named clusters."""
    explained: float | None
    """Share of the structure that named clusters explain, over both views. None if new classes were not looked for."""
    followed: float
    """κ of the names."""
    views: int = 2
    """Views of the images that show the classes; new ones are looked for in two."""
    known: float = 1.0
    """Estimated share of the images that are of known classes."""
    trusted: float = FOLLOWED
    """κ from which new classes were looked for."""

    @property
    def occurs(self) -> Tensor:
        """K booleans."""
        return occurring(self.counts, SCARCE if self.setting in ("open", "universal") else RARE)

    @property
    def reason(self) -> str:
        uneven = is_uneven(self.effective, self.followed)
        if self.followed < FOLLOWED and not uneven:
            return f"the model's predictions follow {self.followed:.0%} of the target's structure: too little to tell"
        classes = len(self.shares)
        found = int(self.occurs.sum())
        even = "in unequal shares" if uneven else "in about equal shares"
        if self.explained is None:
            why = "too few images"
            if occurring_classes(self.shares, self.effective) < FEWEST:
                why = "too few classes"
            elif self.views < 2:
                why = "no second view that shows the classes"
            elif self.followed < self.trusted:
                why = f"the predictions follow too little of the structure ({self.followed:.0%})"
            return (
                f"about {found} of {classes} known classes occur, {even}; {why} to look for new ones (give --setting"
                " open or universal if you know of some)"
            )
        new = "so there is nothing new"
        if self.setting in ("open", "universal"):
            new = f"so there are new ones too, about {1 - self.known:.0%} of the images"
        return (
            f"about {found} of {classes} known classes occur, {even}; known classes explain"
            f" {math.floor(100 * min(self.explained, 1))}% of the clusters, {new}"
        )

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "setting": self.setting,
            "reason": self.reason,
            "effective_classes": round(self.effective * len(self.shares), 2),
            "explained": None if self.explained is None else round(self.explained, 4),
            "followed": round(self.followed, 4),
            "known": round(self.known, 4),
            "shares": [round(value, 5) for value in self.shares.tolist()],
        }


@torch.no_grad()
def assess(
    seen: Tensor, log_names: Tensor, second: Callable[[Tensor], Tensor] | None = None, *, witnessed: bool = True
) -> Situation:
    """From N × F features and N × K names. `second` gives another view of the images at some positions. `witnessed`:
    whether the features are those of a pretrained witness."""
    space = fit_witness_space(seen)
    rows = evenly_spaced(len(seen), max(MOST, 20 * log_names.shape[1])).to(seen.device)
    points, centred, names = space.project(seen[rows]), space.centred(seen[rows]), log_names[rows]
    classes = names.shape[1]
    near = nearest_neighbours(centred, NEIGHBOURS)[0]
    followed = float(kappa(names.argmax(dim=1), near, classes))
    fit = fit_mixture(points, names, begin=label_shift(names), prior=UNEVEN_PRIOR, rounds=ROUNDS)
    shares = fit.shares
    plain = fit_mixture(points, names, rounds=ROUNDS).shares
    effective = max(effective_share(shares), effective_share(plain))
    explained, views, share = None, 1 if second is None else 2, 1.0
    several = occurring_classes(shares, effective)
    least = 1 - UNEXPLAINED / several
    trusted = FOLLOWED if witnessed and several >= SEVERAL else TRUSTED
    enough = several >= FEWEST and len(points) >= ENOUGH * classes
    if followed >= trusted and enough and second is not None:
        dimensions = min(max(int(occurring(shares * len(points)).sum()) // 2, 4), 10)
        few = rows[evenly_spaced(len(rows), max(SEARCHED, 20 * classes)).to(rows.device)]
        looks = [search(view, log_names[few], dimensions) for view in (seen[few], second(few).float())]
        if min(look.followed for look in looks) < trusted:
            views = 1  # a view shows something else than classes
        else:
            explained = 1 - math.sqrt(math.prod(1 - look.explained for look in looks))
        if explained is not None and explained < least:
            shares = fit_mixture(
                looks[0].points, log_names[few], begin=looks[0].begin, prior=UNEVEN_PRIOR, rounds=ROUNDS
            ).shares[:classes]
            share = float(shares.sum())
            shares = shares / shares.sum().clamp_min(1e-12)
            effective = effective_share(shares)
    uneven, new = is_uneven(effective, followed), explained is not None and explained < least
    setting = {(0, 0): "closed", (1, 0): "partial", (0, 1): "open", (1, 1): "universal"}[int(uneven), int(new)]
    counts = shares * share * len(log_names)
    return Situation(setting, shares, counts, effective, explained, followed, views, share, trusted)


class Search(NamedTuple):
    """What one view of n images says about new classes."""

    followed: float
    """κ of the names."""
    explained: float
    """Share of the structure that named clusters explain."""
    points: Tensor
    """n × D."""
    begin: Tensor
    """n × 2K responsibilities that a fit with clusters without a name begins with."""


def search(features: Tensor, log_names: Tensor, dimensions: int) -> Search:
    """From n × F features and n × K names."""
    classes = log_names.shape[1]
    space = fit_witness_space(features)
    near = nearest_neighbours(space.centred(features), SMOOTHED)[0]
    points, score = space.project(features)[:, :dimensions], unknown_score(log_names, near)
    followed = float(kappa(log_names.argmax(dim=1), near[:, :NEIGHBOURS], classes))
    explained, begin = named_share(points, log_names, score), with_unnamed(points, log_names, score, classes)
    return Search(followed, explained, points, begin)


def label_shift(log_names: Tensor, rounds: int = 100) -> Tensor:
    """N × K: the sharpened names under the class shares that fit them best."""
    probs = (SHARPNESS * log_names.double()).softmax(dim=1)
    shares = torch.full_like(probs[0], 1 / probs.shape[1])
    for _ in range(rounds):
        r = probs * shares
        r /= r.sum(dim=1, keepdim=True)
        shares = r.mean(dim=0)
    return r.float()


def occurring(counts: Tensor, least: float = RARE) -> Tensor:
    """K booleans: at least one image, and this part of what an equal share of the effective number of classes would
    be."""
    counts = counts.double()
    shares = counts / counts.sum().clamp_min(1e-12)
    usual = float(counts.sum()) / (effective_share(shares) * len(shares))
    return counts >= max(1.0, least * usual)


def is_uneven(effective: float, followed: float) -> bool:
    """Whether some classes are missing or rare."""
    return effective < (EVEN if followed >= FOLLOWED else CLEAR)


def occurring_classes(shares: Tensor, effective: float) -> float:
    """All of them if the shares are about equal, else their effective number."""
    return len(shares) * (1.0 if effective >= EVEN else effective_share(shares))


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
    high = score.argsort(stable=True)[len(score) - len(score) // 2 :].sort().values
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
