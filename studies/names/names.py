"""Names of clusters as random variables: starts, doubt, user labels and questions around one cluster mixture.

The mixture is that of `usfan.maths.cluster_mixture`: clusters N(μ_k, Σ) in the witness's features u, and a gate
softmax(λ ℓ_ik + b_k) of the names ℓ. Labelled images have r_i = one-hot(y_i), and add −log g_iy p(u_i | y) to F.

Naming.  A cluster c with responsibilities r_ic has the votes  f_ck = Σ_i r_ic p_ik / Σ_i r_ic.  A naming π gives every
cluster one class, and no class to two clusters:

    log P(π) = Σ_c s_cπ(c) + const,     s_ck = η log f_ck + Σ_{i labelled} r_ic log P(y_i | name k)

η is the number of independent witnesses that a cluster's images are worth; P(y | k) = 1 − ε if y = k, else ε/(K − 1).
The score is blind to class shares (adding a constant to a column of s changes no naming). Names averaged over namings,
A_ck = P(π(c) = k), are the marginals of that distribution.

Head.  Labels move the names before they move the clusters. With witness features x_i (L labelled rows X), offset ℓ and

    p(y_i) = softmax(σ ℓ_i + V x_i),   V ~ N(0, 1/α),   σ ~ N(1, 1)

V lies in the span of the labelled rows, V = aᵀX. Böhning's bound of the Hessian, ½ (I − 11ᵀ/K) ⊗ XXᵀ, does not depend
on V, so that one L × L eigendecomposition serves every step and every α. Names are averaged over α by the evidence
(Laplace)

    log p(y | α) ≈ max_V,σ [Σ_i log p(y_i) − ½α‖V‖² − ½(σ − 1)²] − ½ Σ_k log|I + W_k^½ XXᵀ W_k^½ / α|

with W_k = diag(p_k (1 − p_k)) of the labelled images.

Pool.  Labels also say how far the clusters can be trusted. The mixture's labels q, the head's and those of a head
without source are pooled, softmax(Σ_e w_e log p_e), with weights that fit labels held out in folds.

Shapes: N images, K classes, D dimensions of the mixture, W witness features, L labelled images, M draws, n neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.maths.cluster_mixture import (
    EVEN_PRIOR,
    Mixture,
    log_joint,
    prior_energy,
    update_clusters,
    update_gate,
)

FLOOR = 1e-6
"""Least share of the votes that a class has in a cluster."""
WITNESSES = 4.0
"""η: independent witnesses that the source's votes in a cluster are worth."""
WRONG_ANSWER = 0.1
"""ε: share of a cluster's images that are of another class than its name."""
NEIGHBOUR_STRENGTH = 5.0
NAME_WEIGHT = 0.3
"""Of the smoothed start: nats that agreement of all neighbours is worth, and the weight of an image's own name."""
DOUBT_FLOOR = 0.1
"""Weight of an image without doubt among those to ask about."""
FOLDS = 5
"""Parts of the labels, each held out once."""
PRECISIONS = tuple(2.0**power for power in range(-6, 3))
"""Prior precisions α of the head, times the mean square of the features, over which it is averaged."""
NEGLIGIBLE = 1e-4
"""Weight below which a precision is left out."""


@dataclass(frozen=True, eq=False)
class PinnedLabels:
    """Labels of a few images."""

    rows: Tensor
    """L row numbers."""
    labels: Tensor
    """L classes."""

    @classmethod
    def none(cls) -> PinnedLabels:
        empty = torch.zeros(0, dtype=torch.long)
        return cls(empty, empty)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class NamedFit:
    """A fitted mixture."""

    start: str
    """Name of the start that it came from."""
    mixture: Mixture
    responsibilities: Tensor
    """r, N × K, float64; labelled images one-hot."""
    free_energy: float
    """F / N."""
    energies: Tensor
    """N: the share of each image in F, priors apart."""


def balance(log_names: Tensor, rounds: int = 30) -> Tensor:
    """N × K probabilities softmax(ℓ + b), b such that all classes have the same mean probability."""
    bias = torch.zeros(log_names.shape[1], dtype=log_names.dtype)
    for _ in range(rounds):
        shares = (log_names + bias).softmax(1).mean(0)
        bias = bias - (shares * len(shares)).clamp_min(1e-12).log()
    return (log_names + bias).softmax(1)


def smooth(log_names: Tensor, near: Tensor, strength: float, rounds: int = 30) -> Tensor:
    """N × K: names that agree with those of the n nearest images, classes in equal shares.

    Mean field of a Potts model: p_i ∝ exp(strength · mean_{j ∈ near(i)} p_j + ℓ_i + b).
    """
    probs = balance(log_names)
    for _ in range(rounds):
        probs = balance(strength * probs[near].mean(1) + log_names, 10)
    return probs


def fit_named(
    points: Tensor,
    log_names: Tensor,
    begin: Tensor,
    pinned: PinnedLabels,
    *,
    start: str = "",
    rounds: int = 40,
    tolerance: float = 1e-4,
    prior: float = EVEN_PRIOR,
) -> NamedFit:
    """EM from responsibilities `begin` (N × K), labelled images pinned. F / N never rises."""
    points = points.double()
    spread = max(float(points.square().mean()), 1e-12)
    r = pin(begin.double(), pinned)
    reliability = 1.0
    bias = torch.zeros(log_names.shape[1], dtype=torch.float64)
    last = math.inf
    for _ in range(rounds):
        means, covariance = update_clusters(points, r, spread)
        reliability, bias = update_gate(log_names, r, reliability, bias, prior)
        mixture = Mixture(means, torch.linalg.cholesky(covariance), reliability, bias)
        joint = log_joint(mixture, points, log_names)
        each = joint.logsumexp(1)
        each[pinned.rows] = joint[pinned.rows, pinned.labels]
        energy = (prior_energy(mixture, spread, prior) - float(each.sum())) / len(points)
        r = pin(joint.softmax(1), pinned)
        if last - energy < tolerance:
            break
        last = energy
    return NamedFit(start, mixture, r, energy, -each)


def pin(table: Tensor, pinned: PinnedLabels) -> Tensor:
    """The table N × K with one-hot rows of the labelled images."""
    table = table.clone()
    table[pinned.rows] = one_hot(pinned.labels, table.shape[1]).to(table)
    return table


def votes(responsibilities: Tensor, probs: Tensor) -> Tensor:
    """f, C × K: mean probabilities of each cluster's images, from N × C and N × K."""
    mass = responsibilities.sum(0)[:, None]
    return (responsibilities.T @ probs + FLOOR / probs.shape[1]) / (mass + FLOOR)


def naming_scores(
    responsibilities: Tensor,
    probs: Tensor,
    pinned: PinnedLabels,
    witnesses: float,
    error: float,
) -> Tensor:
    """s, C × K: `witnesses` is η, `error` is ε. `responsibilities` are those without pinned labels."""
    classes = probs.shape[1]
    scores = witnesses * votes(responsibilities, probs).clamp_min(FLOOR).log()
    gain = math.log((1 - error) * (classes - 1) / error)
    answers = one_hot(pinned.labels, classes).to(scores)
    return scores + gain * responsibilities[pinned.rows].T @ answers


def best_naming(scores: Tensor) -> Tensor:
    """C class numbers: the naming of largest score (C × K, C ≤ K)."""
    _, names = linear_sum_assignment(-scores.numpy())
    return torch.from_numpy(names).long()


def renamed(responsibilities: Tensor, names: Tensor) -> Tensor:
    """N × K with cluster c in the column names[c]."""
    table = torch.zeros_like(responsibilities)
    table[:, names] = responsibilities
    return table


def naming_marginals(scores: Tensor, rounds: int = 200) -> Tensor:
    """A, … × C × K: P(cluster c is named k), C = K, by Sinkhorn's iteration: the doubly stochastic table nearest to
    exp(scores), which is the marginals' mean-field value."""
    log_table = scores
    for _ in range(rounds):
        log_table = log_table - log_table.logsumexp(-2, keepdim=True)
        log_table = log_table - log_table.logsumexp(-1, keepdim=True)
    return log_table.exp()


@dataclass(frozen=True, eq=False)
class LabelHead:
    """The head that the labels moved, one for each precision α of the grid."""

    scales: Tensor
    """σ of the source's log-probabilities, P."""
    weights: Tensor
    """V, P × K × W."""
    log_evidence: Tensor
    """P."""

    def log_names(self, log_names: Tensor, features: Tensor) -> Tensor:
        """N × K log-probabilities, averaged over α by the evidence."""
        mixed = torch.zeros_like(log_names)
        for scale, weight, share in zip(
            self.scales, self.weights, self.log_evidence.softmax(0), strict=True
        ):
            if float(share) > NEGLIGIBLE:
                mixed += share * (scale * log_names + features @ weight.T).softmax(1)
        return (mixed / mixed.sum(1, keepdim=True)).log()


def fit_label_head(log_names: Tensor, features: Tensor, pinned: PinnedLabels) -> LabelHead:
    """From log-names N × K, features N × W and the labels."""
    x = features[pinned.rows].double()
    offset = log_names[pinned.rows].double()
    target = one_hot(pinned.labels, log_names.shape[1]).double()
    gram = x @ x.T
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp_min(0)
    unit = float(features.double().square().sum(1).mean())
    dual = torch.zeros_like(offset)
    scale = 1.0
    scales = []
    weights = []
    evidence = []
    for relative in reversed(PRECISIONS):
        precision = relative * unit
        dual, scale, value = head_map(
            offset, target, gram, values, vectors, precision, dual, scale
        )
        scales.append(scale)
        weights.append((x.T @ dual).T)
        evidence.append(value - log_volume(scale * offset + gram @ dual, gram, precision))
    return LabelHead(
        torch.tensor(scales, dtype=torch.float64),
        torch.stack(weights),
        torch.tensor(evidence, dtype=torch.float64),
    )


def log_volume(logits: Tensor, gram: Tensor, precision: float) -> float:
    """½ log|I + H/α| of Laplace's method, with the K blocks of the Hessian that belong to one class each."""
    probs = logits.softmax(1)
    total = 0.0
    eye = torch.eye(len(gram), dtype=gram.dtype)
    for k in range(logits.shape[1]):
        root = (probs[:, k] * (1 - probs[:, k])).sqrt()
        inner = eye + root[:, None] * gram * root / precision
        total += float(torch.linalg.cholesky(inner).diagonal().log().sum())
    return total


def head_map(
    offset: Tensor,
    target: Tensor,
    gram: Tensor,
    values: Tensor,
    vectors: Tensor,
    precision: float,
    dual: Tensor,
    scale: float,
    steps: int = 60,
) -> tuple[Tensor, float, float]:
    """The dual weights (L × K, V = dualᵀ X), σ and the log-posterior at their maximum, by Böhning's steps on V and
    Newton's on σ. Both raise it."""
    inverse = vectors @ torch.diag(1 / (0.5 * values + precision)) @ vectors.T
    last = -math.inf
    value = last
    for _ in range(steps):
        logits = scale * offset + gram @ dual
        probs = logits.softmax(1)
        value = float(
            (target * logits.log_softmax(1)).sum()
            - 0.5 * precision * (dual * (gram @ dual)).sum()
            - 0.5 * (scale - 1) ** 2
        )
        if value - last < 1e-4:
            break
        last = value
        dual = dual + inverse @ (target - probs - precision * dual)
        probs = (scale * offset + gram @ dual).softmax(1)
        mean = (probs * offset).sum(1, keepdim=True)
        slope = float(((target - probs) * offset).sum()) - (scale - 1)
        curvature = float((probs * (offset - mean).square()).sum()) + 1
        scale = max(0.0, scale + slope / curvature)
    return dual, scale, value


def choose(fits: Sequence[NamedFit]) -> NamedFit:
    """The fit of least free energy, if it is more than a standard error (of the images' differences) below the first;
    else the first, which trusts the names most."""
    first = fits[0]
    best = first
    for fit in fits[1:]:
        difference = first.energies - fit.energies
        error = float(difference.std()) / math.sqrt(len(difference))
        if first.free_energy - fit.free_energy > error and fit.free_energy < best.free_energy:
            best = fit
    return best


def label_evidence(responsibilities: Tensor, probs: Tensor, pinned: PinnedLabels) -> float:
    """log P(labels | clusters), each label predicted from those before it: the naming averages over what is not known
    yet. `responsibilities` (N × K) come from a fit without labels."""
    classes = probs.shape[1]
    answer = torch.full((classes, classes), WRONG_ANSWER / (classes - 1), dtype=torch.float64)
    answer.fill_diagonal_(1 - WRONG_ANSWER)
    scores = naming_scores(
        responsibilities, probs, PinnedLabels.none(), WITNESSES, WRONG_ANSWER
    )
    gain = math.log((1 - WRONG_ANSWER) * (classes - 1) / WRONG_ANSWER)
    total = 0.0
    for row, label in zip(pinned.rows.tolist(), pinned.labels.tolist(), strict=True):
        member = responsibilities[row]
        named = member @ naming_marginals(scores, 30)
        total += math.log(float(named @ answer[:, label]) + FLOOR)
        scores[:, label] += gain * member
    return total


@dataclass(frozen=True, eq=False)
class Naming:
    """Clusters, their names and the doubt about them."""

    fit: NamedFit
    """The chosen fit; cluster c has the name c."""
    fits: tuple[NamedFit, ...]
    """All starts, each after EM."""
    marginals: Tensor
    """A, K × K: P(cluster c is named k)."""
    log_names: Tensor
    """N × K: the names after the labels moved them."""
    head: LabelHead | None
    """None without labels."""
    rival_doubt: float
    """Share of images in doubt under the clusters that owe nothing to the names, if these fit the images better."""

    @property
    def doubt(self) -> Tensor:
        """K: probability that a cluster's name is wrong."""
        return 1 - self.marginals.diagonal()

    @property
    def share_in_doubt(self) -> float:
        """Expected share of images whose cluster has a wrong name."""
        own = float((self.fit.responsibilities @ self.doubt).mean())
        return max(own, self.rival_doubt)

    def soft_labels(self, pinned: PinnedLabels) -> Tensor:
        """N × K: responsibilities averaged over namings, q_ik = Σ_c r_ic A_ck."""
        return pin(self.fit.responsibilities @ self.marginals, pinned)


def name_clusters(
    points: Tensor,
    witness: Tensor,
    near: Tensor,
    log_names: Tensor,
    pinned: PinnedLabels,
    kmeans: Tensor,
    *,
    only: str | None = None,
) -> Naming:
    """The whole model: points N × D, witness features N × W, neighbours N × n, log-names N × K of the source, labels,
    and a partition of the images into K clusters (N × K, one-hot). `only`: the one start to use.

    Starts from the names are compared by the free energy. Clusters that owe nothing to the names are taken only if they
    fit the images better and the labels agree; without labels they only add to the doubt.
    """
    head = None
    source_names = log_names
    if len(pinned):
        log_names = balance(log_names).clamp_min(FLOOR).log()
        head = fit_label_head(log_names, witness, pinned)
        log_names = head.log_names(log_names, witness)
    log_names = log_names.clamp_min(math.log(FLOOR))
    fits = {}
    for start, begin in begins(log_names, near, pinned, kmeans).items():
        if only is None or start == only:
            fits[start] = fit_named(points, log_names, begin, pinned, start=start)
    if only is None:
        best = choose([fits["names"], fits["smooth"]])
        rival = fits["clusters"]
        fits_better = len(pinned) > 0 and choose([best, rival]) is rival
        if fits_better and prefers_rival(
            points, near, source_names, pinned, kmeans, best.start
        ):
            best = rival
    else:
        best = fits[only]
        rival = best
    probs = log_names.exp()
    scores = naming_scores(best.responsibilities, probs, pinned, WITNESSES, WRONG_ANSWER)
    rival_doubt = 0.0
    if choose([best, rival]) is rival:
        own = naming_scores(rival.responsibilities, probs, pinned, WITNESSES, WRONG_ANSWER)
        doubt = 1 - naming_marginals(own).diagonal()
        rival_doubt = float((rival.responsibilities @ doubt).mean())
    return Naming(
        best, tuple(fits.values()), naming_marginals(scores), log_names, head, rival_doubt
    )


def begins(
    log_names: Tensor, near: Tensor, pinned: PinnedLabels, kmeans: Tensor
) -> dict[str, Tensor]:
    """Responsibilities, N × K, that EM starts from."""
    names = pin(log_names.exp(), pinned)
    smoothed = smooth(NAME_WEIGHT * names.clamp_min(FLOOR).log(), near, NEIGHBOUR_STRENGTH)
    scores = naming_scores(kmeans, balance(log_names), pinned, WITNESSES, WRONG_ANSWER)
    return {
        "names": names,
        "smooth": smoothed,
        "clusters": renamed(kmeans, best_naming(scores)),
    }


def prefers_rival(
    points: Tensor,
    near: Tensor,
    log_names: Tensor,
    pinned: PinnedLabels,
    kmeans: Tensor,
    start: str,
) -> bool:
    """Whether the labels are more probable under clusters that owe nothing to the names than under those of `start`."""
    log_names = log_names.clamp_min(math.log(FLOOR))
    none = PinnedLabels.none()
    table = begins(log_names, near, none, kmeans)
    evidence = []
    for name in (start, "clusters"):
        fit = fit_named(points, log_names, table[name], none, start=name)
        evidence.append(label_evidence(fit.responsibilities, log_names.exp(), pinned))
    return evidence[1] > evidence[0]


def pool_weights(held_out: Sequence[Tensor], labels: Tensor, centre: Sequence[float]) -> Tensor:
    """E weights w ≥ 0 of experts, from what each says of the labelled images when it was fitted without them (L × K).

    Maximises Σ_i log softmax(Σ_e w_e log p_e)[y_i] − ½‖w − centre‖², which is concave, by projected Newton steps.
    """
    logs = torch.stack([probs.clamp_min(FLOOR).log() for probs in held_out])
    start = torch.tensor(centre, dtype=torch.float64)
    rows = torch.arange(len(labels))

    def value(weights: Tensor) -> float:
        fitted = torch.einsum("e,elk->lk", weights, logs).log_softmax(1)[rows, labels].sum()
        return float(fitted - 0.5 * (weights - start).square().sum())

    weights = start
    for _ in range(30):
        probs = torch.einsum("e,elk->lk", weights, logs).softmax(1)
        mean = torch.einsum("lk,elk->el", probs, logs)
        rest = logs - mean[:, :, None]
        gradient = rest[:, rows, labels].sum(1) - (weights - start)
        hessian = torch.einsum("lk,elk,flk->ef", probs, rest, rest)
        hessian = hessian + torch.eye(len(start), dtype=torch.float64)
        step = torch.linalg.solve(hessian, gradient)
        length = 1.0
        moved = (weights + step).clamp_min(0)
        while length > 1e-3 and value(moved) < value(weights):
            length = length / 2
            moved = (weights + length * step).clamp_min(0)
        if value(moved) - value(weights) < 1e-6:
            break
        weights = moved
    return weights


def pooled_labels(
    points: Tensor,
    witness: Tensor,
    near: Tensor,
    log_names: Tensor,
    pinned: PinnedLabels,
    kmeans: Tensor,
    naming: Naming,
) -> tuple[Tensor, Tensor]:
    """N × K probabilities of mixture, head and a head of the labels alone, pooled, and the three weights: labels decide
    how far the clusters are to be trusted. Held-out answers come from FOLDS fits, each without a part of the labels."""
    blank = torch.zeros_like(log_names)
    count = len(pinned)
    held_out = torch.zeros(3, count, log_names.shape[1], dtype=torch.float64)
    for fold in range(min(FOLDS, count)):
        held = torch.arange(count) % FOLDS == fold
        kept = PinnedLabels(pinned.rows[~held], pinned.labels[~held])
        rows = pinned.rows[held]
        refit = name_clusters(
            points, witness, near, log_names, kept, kmeans, only=naming.fit.start
        )
        alone = fit_label_head(blank, witness, kept)
        held_out[0, held] = refit.soft_labels(kept)[rows]
        held_out[1, held] = refit.log_names[rows].exp()
        held_out[2, held] = alone.log_names(blank, witness)[rows].exp()
    weights = pool_weights(list(held_out), pinned.labels, (1.0, 0.0, 0.0))
    alone = fit_label_head(blank, witness, pinned)
    experts = (
        naming.soft_labels(pinned).clamp_min(FLOOR).log(),
        naming.log_names,
        alone.log_names(blank, witness).clamp_min(math.log(FLOOR)),
    )
    pooled = sum(weight * table for weight, table in zip(weights, experts, strict=True))
    return pin(pooled.softmax(1), pinned), weights


def questions(
    points: Tensor, soft_labels: Tensor, labelled: Tensor, count: int, seed: int = 0
) -> Tensor:
    """Row numbers of the `count` images to ask about.

    k-means of the witness's points into as many groups as there will be labels, images weighted by the entropy of their
    soft labels, which holds the doubt of the names. Groups without a label are asked about, heaviest first, each by the
    image nearest to its middle.
    """
    entropy = -torch.xlogy(soft_labels, soft_labels).sum(1)
    weight = entropy + DOUBT_FLOOR
    groups = min(len(labelled) + count, len(points))
    model = KMeans(groups, n_init=1, random_state=seed).fit(
        points.numpy(), sample_weight=weight.numpy()
    )
    member = torch.from_numpy(model.labels_).long()
    distance = (points - torch.from_numpy(model.cluster_centers_)[member]).square().sum(1)
    distance[labelled] = math.inf
    mass = torch.zeros(groups, dtype=torch.float64).index_add_(0, member, weight)
    mass[member[labelled]] = 0
    chosen = []
    for group in mass.argsort(descending=True)[:count].tolist():
        own = (member == group).nonzero().flatten()
        middle = own[distance[own].argmin()]
        if math.isfinite(float(distance[middle])):
            chosen.append(int(middle))
            distance[middle] = math.inf
    rest = weight.clone()
    rest[~distance.isfinite()] = -1
    missing = count - len(chosen)
    return torch.tensor(chosen + rest.argsort(descending=True)[:missing].tolist())
