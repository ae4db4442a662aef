"""Label-free validators: figures of a model from one pass over the target, without labels.

With p (N×K) the point estimate, H the entropy in nats and p̄ = mean_n p_n:

    entropy                         mean_n H(p_n)
    information_maximization        H(p̄) − mean_n H(p_n)          the objective of Eqs. 2 and 3, read as a validator
    diversity                       H(p̄) / log K
    coverage                        share of the K classes that at least one sample is predicted as
    largest_class                   share of the samples in the most predicted class
    drift                           share of the samples whose argmax is not the source model's
    certain                         share of the samples with max_k p̂_k > (1 + 1/K)/2, p̂ the posterior predictive: past
                                    half-way from a uniform guess to certainty (0.75 for K = 2, about 0.5 for large K)

`DIRECTION` says which way is better. Diversity, coverage and information maximisation take it that every class occurs
in the target: in a partial set the best value is not the best model. Drift is a warning, not a goal: a model that
never moves has none.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.maths.objectives import entropy

DIRECTION: dict[str, int] = {
    "entropy": -1,
    "information_maximization": 1,
    "diversity": 1,
    "coverage": 1,
    "largest_class": -1,
    "drift": -1,
    "certain": 1,
}
"""+1: higher is better; −1: lower is better."""

SWALLOWED = 0.8
MOVED = 0.05
VANISHED = 0.1
"""See `collapse`."""


def validate(
    probs: Tensor,
    source_probs: Tensor,
    posterior_probs: Tensor,
) -> dict[str, float]:
    """The validators of probs N×K, from those of the source model and of the posterior predictive too.

    Inputs that are not finite give values that are not finite; `collapse` reports them.
    """
    K = probs.shape[1]
    mean_probs = probs.mean(dim=0, dtype=torch.float64)
    mean_entropy = float(entropy(probs.detach().double()).mean())
    entropy_of_mean = float(entropy(mean_probs))
    shares = class_shares(probs)
    source_labels = source_probs.to(probs.device).argmax(dim=1)
    return {
        "entropy": mean_entropy,
        "information_maximization": entropy_of_mean - mean_entropy,
        "diversity": entropy_of_mean / math.log(K),
        "coverage": float((shares > 0).double().mean()),
        "largest_class": float(shares.max()),
        "drift": _share(probs.argmax(dim=1) != source_labels),
        "certain": _share(is_certain(posterior_probs)),
    }


def is_certain(posterior_probs: Tensor) -> Tensor:
    """N booleans: the posterior predictive N×K is past half-way from uniform to certain."""
    half_way = (1 + 1 / posterior_probs.shape[1]) / 2
    return posterior_probs.max(dim=1).values > half_way


def class_shares(probs: Tensor) -> Tensor:
    """K shares of the samples by predicted class (argmax of probs N×K), float64."""
    counts = torch.bincount(probs.argmax(dim=1), minlength=probs.shape[1])
    return counts.cpu().double() / len(probs)


def collapse(
    probs: Tensor,
    source_probs: Tensor,
    classes: Sequence[str] | None = None,
) -> str | None:
    """Why the model behind `probs` (N×K) counts as collapsed against the source model's `source_probs`; None if not.

    1. A probability is not finite.
    2. One class took over the target: it gets 80 % or more of the samples that the source model put into other classes
       (if those are at least 5 % of all samples, because a target may really be one class).
    3. Classes vanished: of those with a noticeable share by the source model (half of N/K, and 3 samples), more than
       half keep less than a tenth of it, together they held more than half of the source model's predictions, and the
       predictions are less diverse than they were: a poor source model may put nearly all into classes that are wrong.

    Missing classes of a partial-set target may vanish. Only errors of the source model lie in them, so as long as it is
    right more often than not they do not hold half of its predictions, and rule 3 stays silent.
    """
    if not bool(torch.isfinite(probs).all()):
        return "some predictions are not finite"
    N, K = probs.shape
    now = class_shares(probs)
    before = class_shares(source_probs)
    largest = int(now.argmax())
    elsewhere = source_probs.argmax(dim=1).cpu() != largest
    predicted = probs.argmax(dim=1).cpu()
    swallowed = _share(predicted[elsewhere] == largest)
    if _share(elsewhere) >= MOVED and swallowed >= SWALLOWED:
        name = classes[largest] if classes else f"number {largest}"
        return f"{now[largest]:.0%} of the images were assigned to class {name} (source model: {before[largest]:.0%})"
    noticeable = before * N >= max(3.0, 0.5 * N / K)
    vanished = noticeable & (now < VANISHED * before)
    gone = int(vanished.sum())
    total = int(noticeable.sum())
    source_share = float(before[vanished].sum())
    poorer = float(entropy(now)) < float(entropy(before))
    if 2 * gone > total and source_share > 0.5 and poorer:
        return f"{gone} of {total} classes vanished, which the source model gave {source_share:.0%} of the target"
    return None


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if flags.numel() else 0.0
