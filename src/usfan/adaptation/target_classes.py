"""Which classes occur in a target without labels? Some may be missing, some may be new.

Everything is estimated from the source model's names ℓ_ik = log p(k | i) and from the structure of the images in a
witness's features, by the mixture of `maths.cluster_mixture`.

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

there are new classes. The unexplained part is the geometric mean over two views of the images (the witness's features
and the source model's; the source model's and the pixels, if no pretrained network fits): names that fit badly leave
structure unexplained in one view, new classes in both. The names must follow half of the structure in both (κ ≥ ½,
`maths.agreement`), or the views show something other than classes. Without a witness κ must be 3/5: the source
model's features and pixels show more than classes.

The search uses half as many dimensions as known classes occur, at least 4 and at most 10: classes differ most in the
first of them, and further ones show structure within classes. If fewer than eight classes occur even these do, so the
names must follow more (κ ≥ 3/5); with fewer than five, there is no search. It uses at most 1,000 images, or 20 per
class: with hundreds of each, it would find structure within classes too. If there are new classes, the shares are
those of the named clusters in the fit with further ones: in a fit without them, new classes fill known ones that are
missing.

*Names that follow little.* If the names fit less than half of the structure (κ < ½), they distort the shares, and only
clearly unequal ones count (under 5/6 of K). There is no search for new classes: a strong shift leaves as much
unexplained as they do, and a false alarm can leave the model worse than before.

Shapes: N images, K classes, C clusters without a name, D dimensions of the witness space, k neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from usfan.adaptation.thresholds import (
    CLEARLY_UNEVEN_SHARES,
    EVEN_SHARES,
    FOLLOWED_STRUCTURE,
    FOLLOWED_STRUCTURE_STRICT,
    NAME_SHARPNESS,
    NEW_CLASS_UNEXPLAINED,
    RARE_CLASS,
    RARE_CLASS_BESIDE_NEW,
    SEARCH_FOLDS,
    SEARCH_IMAGES,
    SEARCH_LEAST_CLASSES,
    SEARCH_LEAST_DIMENSIONS,
    SEARCH_LEAST_IMAGES_PER_CLASS,
    SEARCH_MANY_CLASSES,
    SEARCH_MOST_DIMENSIONS,
    SEARCH_ROUNDS,
    SMOOTHING_NEIGHBOURS,
    STRUCTURE_IMAGES_PER_CLASS,
)
from usfan.errors import option
from usfan.maths.agreement import MOST_IMAGES, NEIGHBOURS, kappa, sample_rows
from usfan.maths.cluster_mixture import (
    UNEVEN_PRIOR,
    Fit,
    expectation,
    fit_mixture,
    fit_witness_space,
    log_normal,
    regularised_covariance,
)
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.objectives import entropy, recipe_entropy

View = Callable[[Tensor], Tensor]
"""Features of the images at some positions."""
NO_SECOND_VIEW = "no second view that shows the classes"


@dataclass(frozen=True, eq=False)
class TargetClasses:
    """An estimate of the classes that occur in the target."""

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
    """Share of the structure that named clusters explain, over both views. None if new classes were not searched."""
    followed: float
    """κ of the names."""
    known: float = 1.0
    """Estimated share of the images that are of known classes."""
    no_search: str = ""
    """Why new classes were not searched."""

    @property
    def has_new(self) -> bool:
        return self.setting in ("open", "universal")

    @property
    def occurs(self) -> Tensor:
        """K booleans."""
        return occurring(self.counts, RARE_CLASS_BESIDE_NEW if self.has_new else RARE_CLASS)

    @property
    def reason(self) -> str:
        uneven = is_uneven(self.effective, self.followed)
        if self.followed < FOLLOWED_STRUCTURE and not uneven:
            return f"the model's predictions follow {self.followed:.0%} of the target's structure: too little to tell"
        shares = "unequal" if uneven else "about equal"
        number = int(self.occurs.sum())
        occur = f"about {number} of {len(self.shares)} known classes occur, in {shares} shares"
        if self.explained is None:
            hint = f"(give {option('setting', 'open')} or universal if you know of some)"
            return f"{occur}; {self.no_search} to look for new ones {hint}"
        new = "so there is nothing new"
        if self.has_new:
            new = f"so there are new ones too, about {1 - self.known:.0%} of the images"
        percent = math.floor(100 * min(self.explained, 1))
        return f"{occur}; known classes explain {percent}% of the clusters, {new}"

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
def estimate_target_classes(
    features: Tensor,
    log_names: Tensor,
    second_view: View | None = None,
    *,
    witnessed: bool = True,
) -> TargetClasses:
    """From N × F features and N × K names. `second_view`: other features of the same images. `witnessed`: whether the
    features are those of a pretrained witness."""
    count, classes = log_names.shape
    most = STRUCTURE_IMAGES_PER_CLASS * classes
    rows = sample_rows(count, max(MOST_IMAGES, most)).to(features.device)
    names = log_names[rows]
    space = fit_witness_space(features)
    points = space.project(features[rows])
    near, _ = nearest_neighbours(space.centred(features[rows]), NEIGHBOURS)
    followed = float(kappa(names.argmax(dim=1), near, classes))
    shares = fit_clusters(points, names, label_shift(names)).shares
    plain_shares = fit_mixture(points, names, rounds=SEARCH_ROUNDS).shares
    effective = max(effective_share(shares), effective_share(plain_shares))
    explained = None
    known = 1.0
    new = False
    several = occurring_classes(shares, effective)
    trusted = FOLLOWED_STRUCTURE_STRICT
    if witnessed and several >= SEARCH_MANY_CLASSES:
        trusted = FOLLOWED_STRUCTURE
    no_search = ""
    if several < SEARCH_LEAST_CLASSES:
        no_search = "too few classes"
    elif second_view is None:
        no_search = NO_SECOND_VIEW
    elif followed < trusted:
        no_search = f"the predictions follow too little of the structure ({followed:.0%})"
    elif len(points) < SEARCH_LEAST_IMAGES_PER_CLASS * classes:
        no_search = "too few images"
    else:
        half = int(occurring(shares * len(points)).sum()) // 2
        dimensions = min(max(half, SEARCH_LEAST_DIMENSIONS), SEARCH_MOST_DIMENSIONS)
        few = rows[sample_rows(len(rows), max(SEARCH_IMAGES, most)).to(rows.device)]
        names = log_names[few]
        first = search(features[few], names, dimensions)
        second = search(second_view(few).float(), names, dimensions)
        if min(first.followed, second.followed) < trusted:
            no_search = NO_SECOND_VIEW
        else:
            explained = 1 - math.sqrt((1 - first.explained) * (1 - second.explained))
            new = explained < 1 - NEW_CLASS_UNEXPLAINED / several
        if new:
            shares = fit_clusters(first.points, names, first.begin).shares[:classes]
            known = float(shares.sum())
            shares = shares / shares.sum().clamp_min(1e-12)
            effective = effective_share(shares)
    setting = setting_of(is_uneven(effective, followed), new)
    counts = shares * known * count
    return TargetClasses(
        setting, shares, counts, effective, explained, followed, known, no_search
    )


def setting_of(uneven: bool, new: bool) -> str:
    """The setting if classes may be missing, and if there are new ones."""
    if new:
        return "universal" if uneven else "open"
    return "partial" if uneven else "closed"


class Search(NamedTuple):
    """The evidence for new classes in one view of n images."""

    followed: float
    """κ of the names."""
    explained: float
    """Share of the structure that named clusters explain."""
    points: Tensor
    """n × D."""
    begin: Tensor
    """n × 2K responsibilities that a fit with clusters without a name begins with."""


def search(
    features: Tensor,
    log_names: Tensor,
    dimensions: int,
) -> Search:
    """From n × F features and n × K names."""
    classes = log_names.shape[1]
    space = fit_witness_space(features)
    near, _ = nearest_neighbours(space.centred(features), SMOOTHING_NEIGHBOURS)
    points = space.project(features)[:, :dimensions]
    score = unknown_score(log_names, near)
    followed = float(kappa(log_names.argmax(dim=1), near[:, :NEIGHBOURS], classes))
    explained = named_share(points, log_names, score)
    begin = with_unnamed(points, log_names, score, classes)
    return Search(followed, explained, points, begin)


def fit_clusters(
    points: Tensor,
    log_names: Tensor,
    begin: Tensor,
) -> Fit:
    """The mixture if classes may be rare or missing."""
    return fit_mixture(points, log_names, begin=begin, prior=UNEVEN_PRIOR, rounds=SEARCH_ROUNDS)


def label_shift(log_names: Tensor, rounds: int = 100) -> Tensor:
    """N × K: the sharpened names under the class shares that fit them best."""
    probs = (NAME_SHARPNESS * log_names.double()).softmax(dim=1)
    shares = torch.full_like(probs[0], 1 / probs.shape[1])
    for _ in range(rounds):
        r = probs * shares
        r /= r.sum(dim=1, keepdim=True)
        shares = r.mean(dim=0)
    return r.float()


def occurring(counts: Tensor, least: float = RARE_CLASS) -> Tensor:
    """K booleans: at least one image, and this part of an equal share of the effective number of classes."""
    counts = counts.double()
    total = counts.sum()
    effective = effective_share(counts / total.clamp_min(1e-12)) * len(counts)
    equal_share = float(total) / effective
    return counts >= max(1.0, least * equal_share)


def is_uneven(effective: float, followed: float) -> bool:
    """Whether some classes are missing or rare."""
    if followed >= FOLLOWED_STRUCTURE:
        return effective < EVEN_SHARES
    return effective < CLEARLY_UNEVEN_SHARES


def occurring_classes(shares: Tensor, effective: float) -> float:
    """All of them if the shares are about equal, else their effective number."""
    if effective >= EVEN_SHARES:
        return len(shares)
    return len(shares) * effective_share(shares)


def effective_share(shares: Tensor) -> float:
    """exp(H(π)) / K: 1 if all classes have the same share."""
    return float(entropy(shares.double()).exp()) / len(shares)


def unknown_score(log_names: Tensor, near: Tensor) -> Tensor:
    """N: entropy of the names, averaged over an image and its neighbours (N × k)."""
    entropies = recipe_entropy(log_names.exp())
    total = entropies + entropies[near].sum(dim=1)
    return total / (1 + near.shape[1])


def with_unnamed(
    points: Tensor,
    log_names: Tensor,
    score: Tensor,
    clusters: int,
) -> Tensor:
    """N × (K + C) responsibilities to begin with: the half of the images with the higher score in clusters without a
    name, the others by label shift."""
    half = len(score) // 2
    high = score.argsort(stable=True)[len(score) - half :].sort().values
    clusters = min(clusters, half)
    r = torch.nn.functional.pad(label_shift(log_names), (0, clusters))
    if clusters:
        r[high] = 0
        r[high, log_names.shape[1] + k_means(points[high], clusters)] = 1
    return r


def k_means(
    points: Tensor,
    clusters: int,
    rounds: int = 30,
    seed: int = 0,
) -> Tensor:
    """N cluster numbers; begins with points drawn far from each other (k-means++)."""
    generator = torch.Generator().manual_seed(seed)
    points = points.double()
    first = int(torch.randint(len(points), (), generator=generator))
    centres = [points[first]]
    distance = (points - points[first]).square().sum(dim=1)
    for _ in range(clusters - 1):
        weight = distance.cpu() + 1e-12
        drawn = int(torch.multinomial(weight, 1, generator=generator))
        centres.append(points[drawn])
        distance = torch.minimum(distance, (points - points[drawn]).square().sum(dim=1))
    means = torch.stack(centres)
    for _ in range(rounds):
        nearest = torch.cdist(points, means).argmin(dim=1)
        count = torch.bincount(nearest, minlength=clusters)[:, None]
        total = torch.zeros_like(means).index_add_(0, nearest, points)
        means = torch.where(count > 0, total / count.clamp_min(1), means)
    return nearest


def named_share(
    points: Tensor,
    log_names: Tensor,
    score: Tensor,
) -> float:
    """The share of the structure that clusters with a name explain, on held-out images."""
    classes = log_names.shape[1]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(points), generator=generator).to(points.device)
    one = 0.0
    named = 0.0
    more = 0.0
    for fold in range(SEARCH_FOLDS):
        held_out = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        held_out[order[fold::SEARCH_FOLDS]] = True
        test_points = points[held_out]
        test_names = log_names[held_out]
        points_used = points[~held_out]
        names = log_names[~held_out]
        begin = with_unnamed(points_used, names, score[~held_out], classes)
        named_fit = fit_clusters(points_used, names, label_shift(names))
        more_fit = fit_clusters(points_used, names, begin)
        one += one_gaussian(points_used, test_points)
        named += float(expectation(named_fit.mixture, test_points, test_names)[1].sum())
        more += float(expectation(more_fit.mixture, test_points, test_names)[1].sum())
    if more <= max(one, named):  # clusters without a name explain nothing
        return 1.0
    return max((named - one) / (more - one), 0.0)


def one_gaussian(points: Tensor, test_points: Tensor) -> float:
    """Σ log N(u; mean, covariance of `points`) over the test points, with the mixture's prior on the covariance."""
    points = points.double()
    mean = points.mean(dim=0)
    centred = points - mean
    scatter = centred.T @ centred
    spread = (scatter.trace() / points.numel()).clamp_min(1e-12)
    covariance = regularised_covariance(scatter, spread, len(points))
    cholesky = torch.linalg.cholesky(covariance)
    return float(log_normal(test_points.double(), mean[None], cholesky).sum())
