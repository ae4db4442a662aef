"""Accuracy without labels, and whether it can be told at all.

The figure is e of the guard with few neighbours: it says how well predictions explain the structure of the target under
the names that the source model gives its clusters. It is worth nothing if these names are in doubt, or if the source
model follows so little of the structure that its names are accidents. Then the answer is: this cannot be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from usfan.adaptation.guard import EpochScore
from usfan.adaptation.thresholds import (
    ACCURACY_ERROR,
    FOLLOWED_STRUCTURE_STRICT,
    NAMED_STRUCTURE,
    TRAINING_IMAGES,
)
from usfan.maths.agreement import Interval
from usfan.maths.measurement import NORMAL_90, NORMAL_95
from usfan.maths.names import IN_DOUBT

ALL_KNOWN = "if no image is of a new class"
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

    def to_dict(self) -> dict[str, object]:
        """For JSON, in percent."""
        return {
            "counts": self.counts,
            "before": percentages(self.before),
            "after": percentages(self.after),
            "reason": self.reason or None,
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
    structure = score.structure[0]
    reason = why_not(structure, doubt, pretrained=pretrained)
    if reason:
        return AccuracyEstimate(None, None, counts, reason)
    error = half_width(structure, count)
    before, after = (interval(value, error) for value in score.accuracy)
    if shift < TRAINING_IMAGES:
        before, after = (replace(share, high=1.0) for share in (before, after))
    return AccuracyEstimate(before, after, counts)


def half_width(structure: float, count: int) -> float:
    """Of the 90 % interval: the less of the structure the source model follows (κ), the wider. With few images it is
    wider too, by the error of a share among so many."""
    return math.hypot(
        ACCURACY_ERROR * math.sqrt(1 - min(structure, 1.0)), NORMAL_90 * 0.5 / math.sqrt(count)
    )


def believed_accuracy(score: EpochScore, estimate: AccuracyEstimate, doubt: float) -> float:
    """Accuracy that the confidence of the kept model should show. If it cannot be told, half of the images whose
    cluster may have a wrong name count as wrong."""
    if estimate.after is not None:
        return estimate.after.value
    return max(score.accuracy[1] * (1 - doubt / 2), 0.0)


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
    return interval(min(share.value, confidence, value / 100), (value - low) / 100)


def why_not(structure: float, doubt: float | None, *, pretrained: bool) -> str:
    """Why accuracy cannot be told, from κ of the source model and the doubt about names; empty if it can."""
    if doubt is None:
        return "there are too few images to compare"
    if structure < (NAMED_STRUCTURE if pretrained else FOLLOWED_STRUCTURE_STRICT):
        return (
            f"the source model's predictions follow only {max(structure, 0):.0%} of the images' structure,"
            " so its names may be accidents"
        )
    if doubt >= IN_DOUBT:
        return f"the names of groups that hold {doubt:.0%} of the images are in doubt"
    return ""


def interval(value: float, error: float) -> Interval:
    """A share and its interval, between 0 and 1."""
    low, middle, high = (min(max(v, 0.0), 1.0) for v in (value - error, value, value + error))
    return Interval(middle, low, high)


def percentages(share: Interval | None) -> dict[str, float] | None:
    if share is None:
        return None
    figures = {"value": share.value, "low": share.low, "high": share.high}
    return {name: round(100 * figure, 1) for name, figure in figures.items()}
