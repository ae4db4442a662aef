"""Telling known from unknown: a score per sample, a threshold on it, and how the threshold is found.

Scores (higher = more unknown; p N×K the point estimate, p̂ N×K the posterior predictive of Eq. 6, p_m its M draws):

    max-softmax          1 − max_k p_k              energy               −log Σ_k exp(logit_k)
    entropy              H(p) / log K               posterior-entropy    H(p̂) / log K
    mutual-information   H(p̂) − mean_m H(p_m), the epistemic part, in nats

The recipe clusters the scores of the whole target by 2-means and calls the higher cluster unknown. In one dimension
the optimum that k-means looks for is exact: sort, and try every cut. With n₁ values below the cut, n₂ above, and S₁
the sum of the centred values below,

    between-cluster sum of squares = S₁²·N / (n₁·n₂),      explained = that / total sum of squares.

2-means always cuts, unknowns or not. The cut is kept while it flags at most half of the target. A majority is flagged
only if the scores look like two groups: `explained` beats the 3/4 that a uniform spread reaches (a normal one
reaches 2/π) by two standard errors, and at most three quarters are flagged. Otherwise the threshold rises to the
median: no more than half is thrown away. Scores alone do not tell whether a *minority* of high ones is unknown or
merely hard, so that cut stays: whoever asks for open set says that there are unknowns.

Once found, the threshold judges each sample on its own: an image alone gets the flag that it gets in a batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.errors import ArtifactError, ConfigError, DataError
from usfan.scoring.outputs import Outputs

UNIFORM_EXPLAINED = 0.75
STANDARD_ERRORS = 0.55  # two standard errors of `explained` on N uniform values, times √N (measured, N = 20 to 4,000)
LARGEST_MAJORITY = 0.75
SMALLEST_SPREAD = 1e-6  # relative; below it the scores differ by rounding only


def normalised_entropy(probs: Tensor) -> Tensor:
    """H(p) / log K of each row of probs N×K, in [0, 1]; 0 for a single class."""
    K = probs.shape[1]
    entropies: Tensor = torch.special.entr(probs.clamp_min(0)).sum(dim=1)
    return entropies / (math.log(K) if K > 1 else 1.0)


SCORES: dict[str, Callable[[Outputs], Tensor]] = {
    "max-softmax": lambda out: 1 - _double(out.probs).max(dim=1).values,
    "entropy": lambda out: normalised_entropy(_double(out.probs)),
    "posterior-entropy": lambda out: normalised_entropy(_double(out.posterior_probs)),
    "mutual-information": lambda out: _double(out.mutual_information),
    "energy": lambda out: -_double(out.logits).logsumexp(dim=1),
}
"""Every score by name: `Outputs` of N samples → N values in float64, on their device, each from its own row alone."""


@dataclass(frozen=True)
class UnknownRule:
    """The unknown decision of an adapted model: a sample is unknown when its score is above the threshold."""

    score: str
    """A name in `SCORES`."""
    threshold: float
    """In units of the score; infinite when nothing is unknown."""

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"unknown score {self.score!r}: choose one of {', '.join(SCORES)}")
        if math.isnan(self.threshold):
            raise ConfigError("the threshold of the unknown decision must be a number, got NaN")

    def score_of(self, outputs: Outputs) -> Tensor:
        """N scores, higher = more unknown."""
        return SCORES[self.score](outputs)

    def flag(self, outputs: Outputs) -> Tensor:
        """N booleans, True = unknown."""
        return self.score_of(outputs) > self.threshold

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: a threshold that nothing exceeds is None."""
        return {"score": self.score, "threshold": self.threshold if math.isfinite(self.threshold) else None}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "UnknownRule":
        """The rule that `to_dict` described; `ArtifactError` names the wrong field."""
        if not isinstance(stored, Mapping) or set(stored) != {"score", "threshold"}:
            raise ArtifactError(f"unknown rule: expected the fields score and threshold, got {stored!r}")
        score, threshold = stored["score"], stored["threshold"]
        if not isinstance(score, str) or score not in SCORES:
            raise ArtifactError(f"unknown rule: field score must be one of {', '.join(SCORES)}, got {score!r}")
        if threshold is None:
            return cls(score, math.inf)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not math.isfinite(threshold):
            raise ArtifactError(f"unknown rule: field threshold must be a finite number or null, got {threshold!r}")
        return cls(score, float(threshold))


def split_unknown(outputs: Outputs, score: str, *, recipe: bool = False) -> UnknownRule:
    """The rule with the threshold that `known_unknown_split` finds on the outputs of the whole target."""
    scores = UnknownRule(score, math.inf).score_of(outputs)
    return UnknownRule(score, known_unknown_split(scores, recipe=recipe)[0])


def known_unknown_split(scores: Tensor, *, recipe: bool = False) -> tuple[float, Tensor]:
    """Threshold, and N flags (True = unknown), of N scores; `recipe=True` is plain 2-means.

    The threshold is infinite, and nothing flagged, when the scores are all equal (up to rounding) or fewer than two.
    """
    values = _finite(scores)
    threshold = _threshold(values, recipe)
    return threshold, (values > threshold).to(scores.device)


def two_means_1d(values: Tensor) -> tuple[float, Tensor]:
    """The exact optimal 2-means of N values: the threshold half-way between the two means, and who is above it (N).

    O(N log N), float64, deterministic; of several best cuts the lowest. With all values equal, one value or none,
    nothing is high and the threshold is infinite.
    """
    device, values = values.device, _finite(values)
    ordered = values.sort().values
    N = len(ordered)
    if N < 2 or bool(ordered[0] == ordered[-1]):
        return math.inf, torch.zeros(N, dtype=torch.bool, device=device)
    below = torch.arange(1, N, dtype=torch.float64)
    between = (ordered - ordered.mean()).cumsum(0)[:-1].square() / (below * (N - below))
    between[ordered[1:] == ordered[:-1]] = -1.0  # equal values stay together
    cut = int(between.argmax()) + 1
    low, high = ordered[:cut], ordered[cut:]
    threshold = float((low.mean() + high.mean()) / 2)
    # The optimum has its boundary strictly between the clusters; only rounding can push it onto a value.
    if not float(low[-1]) <= threshold < float(high[0]):
        threshold = float(low[-1])
    return threshold, (values > threshold).to(device)


def _threshold(values: Tensor, recipe: bool) -> float:
    if len(values) < 2 or float(values.max() - values.min()) <= SMALLEST_SPREAD * float(values.abs().max()):
        return math.inf
    threshold, is_high = two_means_1d(values)
    if recipe or 2 * int(is_high.sum()) <= len(values) or _two_groups(values, is_high):
        return threshold
    median = float(values.median())  # the lower middle one of an even number: at most half of the values lie above
    return median if median < float(values.max()) else math.inf


def _two_groups(values: Tensor, is_high: Tensor) -> bool:
    share = float(is_high.double().mean())
    low, high = values[~is_high].var(correction=0), values[is_high].var(correction=0)
    explained = 1 - float((share * high + (1 - share) * low) / values.var(correction=0))
    return explained > UNIFORM_EXPLAINED + STANDARD_ERRORS / math.sqrt(len(values)) and share <= LARGEST_MAJORITY


def _finite(values: Tensor) -> Tensor:
    values = _double(values).cpu()
    if values.ndim != 1 or not bool(torch.isfinite(values).all()):
        raise DataError(
            f"one finite score per sample is needed to tell known from unknown, got shape {tuple(values.shape)} "
            f"with {int((~torch.isfinite(values)).sum())} that are not finite: the model may have diverged"
        )
    return values


def _double(values: Tensor) -> Tensor:
    return values.detach().double()
