"""Accuracy without labels, and whether it can be told at all.

The figure is e of the guard with few neighbours: it says how well predictions explain the structure of the target under
the names that the source model gives its clusters. It is worth nothing if these names are in doubt, or if the source
model follows so little of the structure that its names are accidents. Then the answer is: this cannot be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from usfan.adaptation.guard import EpochScore
from usfan.adaptation.thresholds import ACCURACY_ERROR, NAMED_STRUCTURE
from usfan.maths.agreement import Interval
from usfan.maths.names import IN_DOUBT, Naming

ALL_KNOWN = "if no image is of a new class"
WITH_UNKNOWN = "with unknown as a class of its own"


@dataclass(frozen=True)
class AccuracyEstimate:
    """Accuracy of the source model and of the one that is kept, as shares, with 90 % intervals."""

    before: Interval | None
    after: Interval | None
    counts: str
    """What counts as right if there may be new classes."""
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
    score: EpochScore, *, count: int, doubt: float | None, rejects: bool = False
) -> AccuracyEstimate:
    """From the guard's figures of the model that is kept, on `count` images. `doubt` is the share of the images whose
    cluster may have a wrong name (None: there are no clusters). With few images the interval is wider, by the error of
    a share among so many. If images may be called unknown (`rejects`), unknown is one more class, and it is right for
    images of new classes; otherwise the estimate holds if there are none."""
    counts = WITH_UNKNOWN if rejects else ALL_KNOWN
    reason = why_not(score.structure[0], doubt)
    if reason:
        return AccuracyEstimate(None, None, counts, reason)
    error = math.hypot(ACCURACY_ERROR, 1.645 * 0.5 / math.sqrt(count))
    before, after = (interval(value, error) for value in score.accuracy)
    return AccuracyEstimate(before, after, counts)


def believed_accuracy(score: EpochScore, naming: Naming) -> float:
    """Accuracy that the confidence of the kept model should show: the estimate, also if it is too much in doubt to be
    called one."""
    return max(score.accuracy[1] * (1 - naming.share_in_doubt), 0.0)


def why_not(structure: float, doubt: float | None) -> str:
    """Why accuracy cannot be told, from κ of the source model and the doubt about names; empty if it can."""
    if doubt is None:
        return "there are too few images to compare"
    if structure < NAMED_STRUCTURE:
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
