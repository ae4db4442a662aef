"""Accuracy without labels, and whether it can be told at all.

The figure is e of the guard with few neighbours: it says how well predictions explain the structure of the target under
the names that the source model gives its clusters. Its 90 % interval reaches from e − hypot(h, u) to e + h:

    h = hypot(1/4 (1 − κ), 0.82 / √n)

The less of the structure the source model follows (κ), the more of its names are due to chance. A share u of the
images is expected to lie in clusters with a wrong name, which can only lower accuracy. The last term is the error of a
share among n images. If the interval would be wider than 30 points, the answer is: this cannot be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from usfan.adaptation.guard import EpochScore
from usfan.adaptation.thresholds import (
    ACCURACY_ERROR,
    FOLLOWED_STRUCTURE_STRICT,
    TRAINING_IMAGES,
    WIDEST_ESTIMATE,
)
from usfan.maths.agreement import Interval
from usfan.maths.measurement import NORMAL_90, NORMAL_95

ALL_KNOWN = "if no image is of a new class"
TOO_FEW = "there are too few images to compare"
WITH_UNKNOWN = "with unknown as a class of its own"


@dataclass(frozen=True)
class AccuracyEstimate:
    """Accuracy of the source model and of the one that is kept, as shares, with 90 % intervals."""

    before: Interval | None
    after: Interval | None
    counts: str
    """Definition of a right prediction if there may be new classes."""
    reason: str = ""
    """Why an accuracy cannot be told."""
    possible: tuple[Interval, Interval] | None = None
    """The intervals before and after of accuracies that cannot be told; None if nothing is known of them."""

    def to_dict(self) -> dict[str, object]:
        """For JSON, in percent."""
        possible = None
        if self.possible is not None:
            possible = dict(zip(("before", "after"), map(ends, self.possible), strict=True))
        return {
            "counts": self.counts,
            "before": percentages(self.before),
            "after": percentages(self.after),
            "reason": self.reason or None,
            "possible": possible,
        }


def estimate_accuracy(
    score: EpochScore,
    *,
    count: int,
    doubt: float | None,
    pretrained: bool,
    shift: float = math.inf,
    rejects: bool = False,
) -> AccuracyEstimate:
    """From the guard's figures of the model that is kept, on `count` images. `doubt` is the share of the images whose
    cluster may have a wrong name (None: there are no clusters), `pretrained` says whether a pretrained network looked,
    and `shift` how far the images lie from the training images (1: not at all). If images may be called unknown
    (`rejects`), unknown is one more class, and it is right for images of new classes; otherwise the estimate holds if
    there are none."""
    counts = WITH_UNKNOWN if rejects else ALL_KNOWN
    if doubt is None:
        return AccuracyEstimate(None, None, counts, TOO_FEW)
    structure = score.structure[0]
    below, above = errors(structure, doubt, count)
    before, after = (interval(value, below, above) for value in score.accuracy)
    if shift < TRAINING_IMAGES:
        before, after = (replace(share, high=1.0) for share in (before, after))
    if can_be_told(structure, below + above, pretrained=pretrained):
        return AccuracyEstimate(before, after, counts)
    reason = why_not(structure, doubt, count)
    return AccuracyEstimate(None, None, counts, reason, (before, after))


def errors(
    structure: float, doubt: float, count: int, error: float = ACCURACY_ERROR
) -> tuple[float, float]:
    """How far the interval reaches below and above the estimate, from κ of the source model, the doubt about names, the
    number of images, and the error with many images and κ = 0."""
    above = math.hypot(error * (1 - min(structure, 1.0)), sampling_error(count))
    return math.hypot(above, doubt), above


def sampling_error(count: int) -> float:
    """Of a share among so many images, in nine of ten cases."""
    return NORMAL_90 * 0.5 / math.sqrt(count)


def can_be_told(structure: float, width: float, *, pretrained: bool) -> bool:
    """Whether an estimate with an interval of this width is worth telling. Pixels, the only other view of a network
    from scratch, need more structure."""
    least = -1.0 if pretrained else FOLLOWED_STRUCTURE_STRICT
    return width <= WIDEST_ESTIMATE and structure >= least


def why_not(structure: float, doubt: float, count: int) -> str:
    """What makes the interval widest."""
    names = ACCURACY_ERROR * (1 - structure)
    sampling = sampling_error(count)
    if sampling > max(names, doubt):
        return TOO_FEW
    if doubt > names:
        return f"the names of groups that hold {100 * doubt:.0f} % of the images are in doubt"
    return (
        f"the source model's predictions follow only {100 * max(structure, 0):.0f} % of the images' structure,"
        " so the names that it gives to groups may be wrong"
    )


def believed_accuracy(estimate: AccuracyEstimate) -> float | None:
    """Accuracy that the confidence of the kept model should show: the middle of the interval if it cannot be told."""
    if estimate.after is not None:
        return estimate.after.value
    if estimate.possible is None:
        return None
    after = estimate.possible[1]
    return (after.low + after.high) / 2


def with_labels(believed: float, measured: Interval) -> float:
    """The believed accuracy and the one that labels measured (95 %), weighted by their precision: a few labels say
    little, and labels of changed images say nothing of the others."""
    error = ACCURACY_ERROR / NORMAL_90
    spread = (measured.high - measured.low) / (2 * NORMAL_95)
    weight = error**2 / (error**2 + spread**2)
    return believed + weight * (measured.value - believed)


def of_adapted(share: Interval, earlier: object, confidence: float) -> Interval | None:
    """Accuracy of an adapted model on images: it follows their structure whatever its names, so it is no better than
    its confidence, or than its adaptation believed (`earlier`, the stored estimate in percent; None: it could not
    tell)."""
    figures = earlier if isinstance(earlier, dict) else {}
    value, low = (figures.get(name) for name in ("value", "low"))
    if not isinstance(value, (int, float)) or not isinstance(low, (int, float)):
        return None
    error = (value - low) / 100
    return interval(min(share.value, confidence, value / 100), error, error)


def interval(value: float, below: float, above: float) -> Interval:
    """A share and its interval, between 0 and 1."""
    low, middle, high = (min(max(v, 0.0), 1.0) for v in (value - below, value, value + above))
    return Interval(middle, low, high)


def ends_text(share: Interval) -> str:
    """`between 3 and 51 %`."""
    return f"between {100 * share.low:.0f} and {100 * share.high:.0f} %"


def ends(share: Interval) -> dict[str, float]:
    return {"low": round(100 * share.low, 1), "high": round(100 * share.high, 1)}


def percentages(share: Interval | None) -> dict[str, float] | None:
    if share is None:
        return None
    return {"value": round(100 * share.value, 1), **ends(share)}
