"""Label-free validators: what one pass over the target says about a model when nobody has labels.

With p (N×K) the point estimate, z (N×D) the features, H the entropy in nats and p̄ = mean_n p_n:

    entropy                         mean_n H(p_n)
    information_maximization        H(p̄) − mean_n H(p_n)          the objective of Eqs. 2 and 3, read as a validator
    soft_neighbourhood_density      mean_i H(softmax_j≠i(f_iᵀf_j / 0.05)), f = p/‖p‖          (Saito et al., ICCV 2021)
    feature_neighbourhood_density   the same with f = z/‖z‖
    diversity                       H(p̄) / log K
    coverage                        share of the K classes that at least one sample is predicted as
    largest_class                   share of the samples in the most predicted class
    drift                           share of the samples whose argmax is not the source model's
    certain_drift                   the same, each sample weighted by the source model's certainty exp(−H(p̂)) of it
    doubtful_drift                  chance that a sample whose argmax moved was less certain, to the source model, than
                                    one whose argmax stayed (AUROC): ½ where moves have nothing to do with doubt, less
                                    where the most certain samples move; 1 where nothing or everything moved
    source_neighbours               share of the five nearest neighbours, in the source model's features, that are
                                    predicted as the sample itself, averaged over the samples
    certain                         share of the samples with max_k p̂_k > (1 + 1/K)/2, p̂ the posterior predictive: past
                                    half-way from a uniform guess to certainty (0.75 for K = 2, about 0.5 for large K)

`DIRECTION` says which way is better. Diversity, coverage and information maximisation take it that every class occurs
in the target: in a partial set the best value is not the best model. Drift is a warning, not a goal: a model that
never moves has none.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from usfan.errors import DataError
from usfan.scoring.calibration import entropies

DIRECTION: dict[str, int] = {
    "entropy": -1,
    "information_maximization": 1,
    "soft_neighbourhood_density": 1,
    "feature_neighbourhood_density": 1,
    "diversity": 1,
    "coverage": 1,
    "largest_class": -1,
    "drift": -1,
    "certain_drift": -1,
    "doubtful_drift": 1,
    "source_neighbours": 1,
    "certain": 1,
}
"""+1: higher is better; −1: lower is better."""

NEIGHBOURS = 4_000  # samples that the neighbourhood densities look at: N² similarities of all 55,000 would take 12 GB
TEMPERATURE = 0.05  # of Saito et al.
SWALLOWED = 0.8  # see `collapse`
VANISHED = 0.1


def validate(
    probs: Tensor,
    features: Tensor,
    *,
    source_probs: Tensor | None = None,
    source_posterior_probs: Tensor | None = None,
    source_neighbours: Tensor | None = None,
    posterior_probs: Tensor | None = None,
) -> dict[str, float]:
    """The validators of probs N×K and features N×D; those that are read from more, only with it.

    `source_neighbours` (N×k positions) are the nearest neighbours of each sample in the source model's features.

    Non-finite inputs give non-finite values here; `collapse` is what reports them.
    """
    N, K = probs.shape
    if N == 0 or len(features) != N:
        raise DataError(f"validators need one row of features per sample, got {len(features)} for {N} samples")
    mean = probs.mean(dim=0, dtype=torch.float64)
    entropy, mean_entropy = float(entropies(probs).mean()), float(entropies(mean[None]))
    shares = class_shares(probs)
    figures = {
        "entropy": entropy,
        "information_maximization": mean_entropy - entropy,
        "soft_neighbourhood_density": neighbourhood_density(probs),
        "feature_neighbourhood_density": neighbourhood_density(features),
        "diversity": mean_entropy / math.log(K) if K > 1 else 0.0,
        "coverage": float((shares > 0).double().mean()),
        "largest_class": float(shares.max()),
    }
    if source_probs is not None:
        moved = probs.argmax(dim=1) != source_probs.to(probs.device).argmax(dim=1)
        figures["drift"] = _share(moved)
        if source_posterior_probs is not None:
            weights = torch.exp(-entropies(source_posterior_probs.to(probs.device)))
            figures["certain_drift"] = float((weights * moved).sum() / weights.sum())
            figures["doubtful_drift"] = order_probability(weights[moved], weights[~moved])
    if source_neighbours is not None:
        predicted = probs.argmax(dim=1)
        figures["source_neighbours"] = _share(predicted[source_neighbours] == predicted[:, None])
    if posterior_probs is not None:
        figures["certain"] = _share(posterior_probs.max(dim=1).values > (1 + 1 / K) / 2)
    return figures


def neighbourhood_density(vectors: Tensor, temperature: float = TEMPERATURE, most: int = NEIGHBOURS) -> float:
    """Mean entropy of each sample's soft neighbours among `vectors` N×D, itself left out; 0 with no neighbour.

    At most `most` samples are looked at, evenly spaced in the given order: deterministic, and spread over the classes
    when a folder is read class by class. Sets of different sizes do not compare: the entropy grows with log N.
    """
    N = len(vectors)
    if N < 2:
        return 0.0
    if most < N:
        vectors = vectors[torch.arange(most, device=vectors.device) * N // most]
    unit = F.normalize(vectors.detach().float(), dim=1)
    total = torch.zeros((), dtype=torch.float32, device=unit.device)
    chunk = 128 if unit.device.type == "cpu" else most  # small pieces stay in the cache; a GPU wants large ones
    for start in range(0, len(unit), chunk):
        rows = torch.arange(start, min(start + chunk, len(unit)), device=unit.device)
        similarity = unit[rows] @ unit.T / temperature
        similarity[rows - start, rows] = -1e4  # exp of it is 0, and 0·(−10⁴) = 0, where −∞ would give nan
        similarity -= similarity.amax(dim=1, keepdim=True)
        mass = similarity.exp()
        norm = mass.sum(dim=1)
        total += (norm.log() - (mass * similarity).sum(dim=1) / norm).sum()  # H = log Z − E[s], with one exp
    return float(total / len(unit))


def order_probability(low: Tensor, high: Tensor) -> float:
    """The chance that one of `low` is below one of `high`, ties counted half; 1 where either is empty."""
    if len(low) == 0 or len(high) == 0:
        return 1.0
    ordered = low.sort().values
    below = torch.searchsorted(ordered, high.contiguous()).double()
    with_ties = torch.searchsorted(ordered, high.contiguous(), right=True).double()
    return float((below + with_ties).mean() / (2 * len(low)))


def class_shares(probs: Tensor) -> Tensor:
    """K shares of the samples by predicted class (argmax of probs N×K), float64."""
    ones = torch.ones(len(probs), dtype=torch.float64, device=probs.device)
    counts = ones.new_zeros(probs.shape[1]).index_add(0, probs.argmax(dim=1), ones)
    return (counts / max(len(probs), 1)).cpu()


def collapse(probs: Tensor, source_probs: Tensor, classes: Sequence[str] | None = None) -> str | None:
    """Why the model behind `probs` (N×K) counts as collapsed against the source model's `source_probs`; None if not.

    1. A probability is not finite.
    2. One class swallowed the target: it gets 80 % or more of the samples that the source model put into other classes
       (when those are at least 5 % of all: a target that really is one class leaves nothing to swallow).
    3. Classes vanished: of those with a noticeable share by the source model (half of N/K, and 3 samples), more than
       half keep less than a tenth of it, together they held more than half of the source model's predictions, and the
       predictions are less diverse than they were: a poor source model may put nearly all into classes that are wrong.

    Missing classes of a partial-set target may vanish. Only errors of the source model lie in them, so as long as it is
    right more often than not they do not hold half of its predictions, and rule 3 stays silent.
    """
    if not bool(torch.isfinite(probs).all()):
        return "some predictions are not finite"
    N, K = probs.shape
    now, before = class_shares(probs), class_shares(source_probs)
    predicted, source_predicted = probs.argmax(dim=1).cpu(), source_probs.argmax(dim=1).cpu()
    largest = int(now.argmax())
    elsewhere = source_predicted != largest
    if _share(elsewhere) >= 0.05 and _share(predicted[elsewhere] == largest) >= SWALLOWED:
        name = classes[largest] if classes else f"number {largest}"
        return f"class {name} swallowed the target: {now[largest]:.0%} of it, {before[largest]:.0%} by the source model"
    noticeable = before * N >= max(3.0, 0.5 * N / K)
    vanished = noticeable & (now < VANISHED * before)
    gone, of, held = int(vanished.sum()), int(noticeable.sum()), float(before[vanished].sum())
    poorer = float(torch.special.entr(now).sum()) < float(torch.special.entr(before).sum())
    if 2 * gone > of and held > 0.5 and poorer:
        return f"{gone} of {of} classes vanished, which the source model gave {held:.0%} of the target"
    return None


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 0.0
