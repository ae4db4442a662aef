"""Names of clusters as random variables, with or without labels of a few images.

*Clusters.* The mixture of `maths.cluster_mixture` finds clusters of the target's images, and names them by the source
model's log-names ℓ. EM depends on where it begins, so it begins twice, with the names and with smoothed names, which
agree with those of the n nearest images (mean field of a Potts model; b makes the class shares equal unless they may
differ):

    p_i ∝ exp(5 · mean_{j ∈ near(i)} p_j + 0.3 ℓ_i + b)

The second fit is taken if its free energy is lower by more than a standard error of the images' differences.

*Namings.* In a cluster c lie the images m_ic by their looks alone, m_ic ∝ N(u_i; μ_c, Σ). (Responsibilities would not
do: the names are in them already.) They vote f_ck = Σ_i m_ic p_ik / Σ_i m_ic for the classes k. A naming π gives every
cluster one class, and no class to two clusters:

    log P(π) = Σ_c s_cπ(c) + const,     s_ck = η log f_ck + Σ_{i labelled} m_ic log P(y_i | name k)

The images of a cluster share its looks and hence the source model's mistake about it: together they are worth η = 4
independent witnesses, not hundreds. A user's label is one witness that errs in ε = 1 of 10 cases: P(y | k) = 1 − ε if
y = k, else ε/(K − 1). A constant added to a column of s changes no naming, so a source model that says "horse"
everywhere still names by differences. The marginals A_ck = P(π(c) = k), by Sinkhorn's iteration, give

    soft labels q_ik = Σ_c r_ic A_ck,     doubt of a cluster 1 − A_cc.

*Labels.* First they move the names (`maths.label_head`: the source model's names, balanced, are an offset), then the
clusters (labelled images belong to theirs), and last they weigh three experts: the soft labels q, the head that moved
the names, and a head that knows the labels alone. Each says what it thinks of labels that it was fitted without, in
five folds; the weights that fit these best pool the experts.

Shapes: N images, K classes, K' = K + C with C clusters without a name, W ≥ D directions of the view, of which the
mixture sees D; L labelled images, n neighbours, E = 3 experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.maths.cluster_mixture import (
    EVEN_PRIOR,
    UNEVEN_PRIOR,
    Fit,
    centred_features,
    fit_mixture,
    fit_witness_space,
    membership,
)
from usfan.maths.label_head import fit_label_head, pool, pool_weights
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.user_labels import UserLabels

FLOOR = 1e-6
"""Least probability of a class."""
WITNESSES = 4.0
"""η."""
WRONG_ANSWER = 0.1
"""ε."""
NEIGHBOURS = 10
NEIGHBOUR_STRENGTH = 5.0
NAME_WEIGHT = 0.3
"""Of smoothed names: nats that agreement of all neighbours is worth, and the weight of an image's own name."""
SMOOTHING_ROUNDS = 30
SINKHORN_ROUNDS = 200
FIRST_ROUNDS = 40
FIRST_TOLERANCE = 1e-4
"""EM from the names: at most so many rounds, until F / N falls by less."""
DIMENSIONS = 64
"""D."""
HEAD_DIMENSIONS = 192
"""W."""
FOLDS = 5
IN_DOUBT = 0.2
"""Share of the images in doubt from which a name is asked for each class; with less doubt, for fewer."""


@dataclass(frozen=True, eq=False)
class View:
    """The target's images as one network sees them."""

    features: Tensor
    """N × W: principal directions, the widest first."""
    near: Tensor
    """N × n neighbours."""
    dimensions: int = DIMENSIONS
    """D."""

    @classmethod
    def of(cls, features: Tensor, dimensions: int = DIMENSIONS) -> View:
        """From N × F features of any kind."""
        space = fit_witness_space(features, max(HEAD_DIMENSIONS, dimensions))
        near, _ = nearest_neighbours(centred_features(features)[0], NEIGHBOURS)
        return cls(space.project(features), near, dimensions)

    @property
    def points(self) -> Tensor:
        """N × D."""
        return self.features[:, : self.dimensions].contiguous()


class Begins(Protocol):
    """N × K' responsibilities that EM may begin with, from N × K probabilities."""

    def __call__(self, view: View, probs: Tensor, /, *, even: bool) -> list[Tensor]: ...


@dataclass(frozen=True, eq=False)
class Naming:
    """Clusters, and the probabilities of their names."""

    fit: Fit
    marginals: Tensor
    """A, K × K."""
    names: Tensor
    """N × K probabilities that voted."""

    @property
    def doubt(self) -> Tensor:
        """K: probability that a cluster's name is wrong."""
        return 1 - self.marginals.diagonal()

    @property
    def share_in_doubt(self) -> float:
        """Expected share of the images in named clusters whose cluster has a wrong name."""
        members = self.fit.responsibilities[:, : len(self.marginals)].double()
        return float((members @ self.doubt).sum() / members.sum().clamp_min(FLOOR))

    @property
    def soft_labels(self) -> Tensor:
        """q, N × K', float64: responsibilities averaged over namings."""
        r = self.fit.responsibilities.double()
        classes = len(self.marginals)
        return torch.cat([r[:, :classes] @ self.marginals, r[:, classes:]], dim=1)

    @property
    def known(self) -> Tensor:
        """N: probability that an image is of a class of the model."""
        return self.soft_labels[:, : len(self.marginals)].sum(dim=1)

    @property
    def known_labels(self) -> Tensor:
        """N × K: soft labels, if the image is of a class of the model."""
        named = self.soft_labels[:, : len(self.marginals)]
        return named / named.sum(dim=1, keepdim=True).clamp_min(1e-12)


@dataclass(frozen=True, eq=False)
class Lesson:
    """Result of learning from labels of a few images."""

    experts: Tensor
    """E − 1 × N × K: the two heads."""
    weights: Tensor
    """E."""
    held_out: Tensor
    """L × K: what the pool says of the labelled images, each expert fitted without them."""

    def pooled(self, known_labels: Tensor, labels: UserLabels) -> Tensor:
        """N × K, from the N × K soft labels of the clusters; labelled images keep their labels."""
        experts = torch.cat([known_labels[None].to(self.experts), self.experts])
        return labels.pinned(pool(experts, self.weights))


@dataclass(frozen=True, eq=False)
class TargetNaming:
    """The view, the naming, and what the user's labels taught."""

    view: View
    source: Tensor
    """N × K probabilities of the source model, which named."""
    setting: str
    clusters: Naming
    labels: UserLabels
    lesson: Lesson | None = None
    """None without labels."""

    @property
    def labels_now(self) -> Tensor:
        """N × K: what names, clusters and labels say together, before anything is trained."""
        return self.pooled(self.clusters.known_labels)

    def pooled(self, known_labels: Tensor) -> Tensor:
        """N × K labels to train with, from the N × K soft labels of the clusters."""
        if self.lesson is None:
            return known_labels
        return self.lesson.pooled(known_labels, self.labels)


def balanced(log_names: Tensor, rounds: int = SMOOTHING_ROUNDS) -> Tensor:
    """N × K probabilities softmax(ℓ + b), b such that all classes have the same mean probability."""
    bias = log_names.new_zeros(log_names.shape[1])
    for _ in range(rounds):
        shares = (log_names + bias).softmax(1).mean(0)
        bias = bias - (shares * len(shares)).clamp_min(1e-12).log()
    return (log_names + bias).softmax(1)


def smoothed(log_names: Tensor, near: Tensor, *, even: bool = True) -> Tensor:
    """N × K: names that agree with those of the n nearest images (N × n). `even`: classes in equal shares."""
    rounds = 10 if even else 0
    names = NAME_WEIGHT * log_names
    probs = balanced(names, rounds)
    for _ in range(SMOOTHING_ROUNDS):
        probs = balanced(NEIGHBOUR_STRENGTH * probs[near].mean(1) + names, rounds)
    return probs


def choose(fits: Sequence[Fit]) -> int:
    """Position of the fit of least free energy, if it is lower than that of the first by more than a standard error of
    the images' differences; else 0, the fit that trusts the names most."""
    first = fits[0]
    best = 0
    for number, fit in enumerate(fits):
        difference = first.energies - fit.energies
        error = float(difference.std()) / math.sqrt(len(difference))
        gain = first.free_energy[-1] - fit.free_energy[-1]
        if gain > error and fit.free_energy[-1] < fits[best].free_energy[-1]:
            best = number
    return best


def votes(members: Tensor, probs: Tensor) -> Tensor:
    """f, C × K: mean probabilities of each cluster's images, from N × C and N × K."""
    mass = members.sum(0)[:, None]
    return (members.T @ probs + FLOOR / probs.shape[1]) / (mass + FLOOR)


def naming_scores(members: Tensor, probs: Tensor, labels: UserLabels) -> Tensor:
    """s, K × K, from m (N × K) and the probabilities that vote (N × K)."""
    classes = probs.shape[1]
    scores = WITNESSES * votes(members, probs).clamp_min(FLOOR).log()
    gain = math.log((1 - WRONG_ANSWER) * (classes - 1) / WRONG_ANSWER)
    answers = one_hot(labels.labels, classes).to(scores)
    return scores + gain * members[labels.rows].T @ answers


def naming_marginals(scores: Tensor) -> Tensor:
    """A, K × K: P(cluster c is named k), the doubly stochastic table nearest to exp(scores)."""
    log_table = scores
    for _ in range(SINKHORN_ROUNDS):
        log_table = log_table - log_table.logsumexp(0, keepdim=True)
        log_table = log_table - log_table.logsumexp(1, keepdim=True)
    return log_table.exp()


def name_clusters(
    view: View,
    probs: Tensor,
    labels: UserLabels,
    begins: Sequence[Tensor],
    *,
    even: bool = True,
) -> tuple[Naming, int]:
    """The naming, and the number of the begin that it came from. N × K probabilities name the clusters; EM begins with
    each of these N × K' responsibilities."""
    names = probs.double().clamp_min(FLOOR)
    points = view.points
    fits = [
        fit_mixture(
            points,
            names.log(),
            begin=begin.float(),
            labels=labels,
            prior=EVEN_PRIOR if even else UNEVEN_PRIOR,
            rounds=FIRST_ROUNDS,
            tolerance=FIRST_TOLERANCE,
        )
        for begin in begins
    ]
    best = choose(fits)
    members = membership(fits[best].mixture, points)[:, : probs.shape[1]]
    marginals = naming_marginals(naming_scores(members, names, labels))
    return Naming(fits[best], marginals, names), best


def both_begins(view: View, probs: Tensor, *, even: bool = True) -> list[Tensor]:
    """The names, and the smoothed names, of N × K probabilities."""
    return [probs, smoothed(probs.clamp_min(FLOOR).log(), view.near, even=even)]


def learn_labels(
    view: View,
    probs: Tensor,
    labels: UserLabels,
    begins: Begins = both_begins,
    *,
    even: bool = True,
) -> tuple[Naming, Lesson]:
    """The naming that follows the labels, and their lesson, from the source model's N × K probabilities."""
    source = probs.double().clamp_min(FLOOR).log()
    naming, start, experts = fit_experts(view, source, labels, begins, even=even)
    held_out = torch.zeros(3, len(labels), probs.shape[1]).to(source)
    fold = torch.arange(len(labels), device=probs.device) % FOLDS
    for number in range(min(FOLDS, len(labels))):
        others = labels.part(fold != number)
        rows = labels.rows[fold == number]
        part, _, part_experts = fit_experts(
            view, source, others, begins, even=even, start=start
        )
        held_out[0, fold == number] = part.known_labels[rows]
        held_out[1:, fold == number] = part_experts[:, rows]
    weights = pool_weights(held_out, labels.labels, (1.0, 0.0, 0.0))
    return naming, Lesson(experts, weights, pool(held_out, weights))


def fit_experts(
    view: View,
    source: Tensor,
    labels: UserLabels,
    begins: Begins,
    *,
    even: bool,
    start: int | None = None,
) -> tuple[Naming, int, Tensor]:
    """The naming, the number of its begin (`start`: the only one to try), and the two heads' 2 × N × K."""
    features = view.features.double()
    blank = torch.zeros_like(source)
    offset = balanced(source).clamp_min(FLOOR).log() if even else source
    moved = offset.exp()
    alone = blank.softmax(1)
    if len(labels):
        moved = fit_label_head(offset, features, labels).probs(offset, features)
        alone = fit_label_head(blank, features, labels).probs(blank, features)
    tables = begins(view, moved, even=even)
    if start is not None:
        tables = [tables[start]]
    naming, best = name_clusters(view, moved, labels, tables, even=even)
    return naming, best if start is None else start, torch.stack([moved, alone])
