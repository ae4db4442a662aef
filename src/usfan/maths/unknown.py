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

The threshold then judges each sample by itself: an image alone gets the flag that it gets in a batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.errors import ArtifactError, DataError
from usfan.maths.objectives import entropy
from usfan.maths.outputs import Outputs

UNIFORM_EXPLAINED = 0.75
"""`explained` of a uniform spread."""
STANDARD_ERRORS = 0.55
"""Two standard errors of `explained` on N uniform values, times √N (measured, N = 20 to 4,000)."""
LARGEST_MAJORITY = 0.75
"""Largest share of the target that may be flagged."""
SMALLEST_SPREAD = 1e-6
"""Relative; below it the scores differ by rounding only."""


def normalised_entropy(probs: Tensor) -> Tensor:
    """H(p) / log K of each row of probs N×K, in [0, 1]; 0 for a single class."""
    return entropy(probs) / math.log(max(probs.shape[1], 2))


SCORES: dict[str, Callable[[Outputs], Tensor]] = {
    "entropy": lambda out: normalised_entropy(_double(out.logits).softmax(dim=1)),
    "max-softmax": lambda out: 1 - _double(out.logits).softmax(dim=1).max(dim=1).values,
    "posterior-entropy": lambda out: normalised_entropy(_double(out.posterior_probs)),
    "mutual-information": lambda out: _double(out.mutual_information),
    "energy": lambda out: -_double(out.logits).logsumexp(dim=1),
}
"""Every score by name: `Outputs` of N samples → N values in float64, on their device, each from one row alone."""


@dataclass(frozen=True)
class UnknownRule:
    """The unknown decision of an adapted model: a sample is unknown when its score is above the threshold."""

    score: str
    """A name in `SCORES`."""
    threshold: float
    """In units of the score; infinite when nothing is unknown."""

    def score_of(self, outputs: Outputs) -> Tensor:
        """N scores, higher = more unknown."""
        return SCORES[self.score](outputs)

    def flag(self, outputs: Outputs) -> Tensor:
        """N booleans, True = unknown."""
        return self.score_of(outputs) > self.threshold

    def to_dict(self) -> dict[str, str | float | None]:
        """For JSON, which has no infinity: a threshold that nothing exceeds is None."""
        threshold = self.threshold if math.isfinite(self.threshold) else None
        return {"score": self.score, "threshold": threshold}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "UnknownRule":
        """The rule that `to_dict` described; `ArtifactError` names the wrong field."""
        if not isinstance(stored, Mapping) or set(stored) != {"score", "threshold"}:
            raise ArtifactError(
                f"unknown rule: expected the fields score and threshold, got {stored!r}"
            )
        score = stored["score"]
        threshold = stored["threshold"]
        if not isinstance(score, str) or score not in SCORES:
            raise ArtifactError(
                f"unknown rule: field score must be one of {', '.join(SCORES)}, got {score!r}"
            )
        if threshold is None:
            return cls(score, math.inf)
        if type(threshold) not in (int, float) or not math.isfinite(threshold):
            raise ArtifactError(
                f"unknown rule: field threshold must be a finite number or null, got {threshold!r}"
            )
        return cls(score, float(threshold))


def split_unknown(
    outputs: Outputs,
    score: str,
    *,
    recipe: bool = False,
) -> UnknownRule:
    """The rule with the threshold that `unknown_threshold` finds on the outputs of the whole target."""
    threshold = unknown_threshold(SCORES[score](outputs), recipe=recipe)
    return UnknownRule(score, threshold)


def unknown_threshold(scores: Tensor, *, recipe: bool = False) -> float:
    """The threshold above which the N scores are unknown; `recipe=True` is plain 2-means.

    It is infinite, and nothing is unknown, if the scores are all equal (up to rounding) or fewer than two.
    """
    values = _finite(scores)
    if len(values) < 2:
        return math.inf
    largest = float(values.max())
    spread = largest - float(values.min())
    if spread <= SMALLEST_SPREAD * float(values.abs().max()):
        return math.inf
    threshold = two_means_threshold(values)
    is_high = values > threshold
    is_minority = 2 * int(is_high.sum()) <= len(values)
    if recipe or is_minority or _two_groups(values, is_high):
        return threshold
    median = float(values.median())  # the lower of two middle ones: at most half lie above
    return median if median < largest else math.inf


def two_means_threshold(values: Tensor) -> float:
    """Half-way between the two means of the exact optimal 2-means of N values.

    O(N log N), float64, deterministic; of several best cuts the lowest. Infinite if all values are equal, or if there
    are fewer than two.
    """
    ordered = _finite(values).sort().values
    N = len(ordered)
    if N < 2 or bool(ordered[0] == ordered[-1]):
        return math.inf
    below = torch.arange(1, N, dtype=torch.float64)
    sums = (ordered - ordered.mean()).cumsum(0)[:-1]
    between = sums.square() / (below * (N - below))
    between[ordered[1:] == ordered[:-1]] = -1.0  # equal values stay together
    cut = int(between.argmax()) + 1
    low = ordered[:cut]
    high = ordered[cut:]
    threshold = float((low.mean() + high.mean()) / 2)
    # The optimum has its boundary strictly between the clusters; only rounding can push it onto a value.
    if float(low[-1]) <= threshold < float(high[0]):
        return threshold
    return float(low[-1])


def _two_groups(values: Tensor, is_high: Tensor) -> bool:
    share = float(is_high.double().mean())
    low = values[~is_high].var(correction=0)
    high = values[is_high].var(correction=0)
    within = share * high + (1 - share) * low
    explained = 1 - float(within / values.var(correction=0))
    least = UNIFORM_EXPLAINED + STANDARD_ERRORS / math.sqrt(len(values))
    return explained > least and share <= LARGEST_MAJORITY


def _finite(values: Tensor) -> Tensor:
    values = _double(values).cpu()
    infinite = int((~torch.isfinite(values)).sum())
    if values.ndim != 1 or infinite:
        raise DataError(
            f"one finite score per sample is needed to tell known from unknown, got shape {tuple(values.shape)} "
            f"with {infinite} that are not finite: the model may have diverged"
        )
    return values


def _double(values: Tensor) -> Tensor:
    return values.detach().double()
