"""Accuracy, from labels of randomly chosen images of a finite set.

The images fall into strata h of M_h images (those whose prediction changed, and the others), of which n_h are labelled
at random and r_h of these are right:

    p = Σ_h M_h/N · r_h/n_h

Each stratum has Wilson's interval (l_h, u_h) for n_h (M_h − 1)/(M_h − n_h) labels: without replacement they are worth
more. The ends of the whole are found from the distances of theirs (Zou and Donner, 2008):

    low = p − √Σ_h (M_h/N)² (p_h − l_h)²        high = p + √Σ_h (M_h/N)² (u_h − p_h)²

Of a stratum without a label nothing is known, which is no error that chance may cancel: p takes 1/2 for it, and both
ends move by M_h/(2N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from usfan.maths.agreement import Interval

NORMAL_90 = 1.645
NORMAL_95 = 1.959964


def wilson(right: int, count: int, population: int | None = None) -> Interval:
    """Wilson's 95 % interval of the share of right ones, among so many images (None: infinitely many)."""
    if count == 0:
        return Interval(0.5, 0.0, 1.0)
    share = right / count
    if population == count:
        return Interval(share, share, share)
    worth = float(count)
    if population is not None:
        worth *= (population - 1) / (population - count)
    square = NORMAL_95**2 / worth
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(square * share * (1 - share) + square**2 / 4) / (1 + square)
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0))


def measured_accuracy(strata: Sequence[tuple[int, Tensor]]) -> Interval:
    """From the size of each stratum, and n_h booleans: which of its labelled images are right."""
    total = max(sum(size for size, _ in strata), 1)
    value = 0.0
    below = 0.0
    above = 0.0
    unknown = 0.0
    for size, right in strata:
        part = wilson(int(right.sum()), len(right), size)
        weight = size / total
        value += weight * part.value
        if not len(right):
            unknown += weight / 2
            continue
        below += (weight * (part.value - part.low)) ** 2
        above += (weight * (part.high - part.value)) ** 2
    low = value - unknown - math.sqrt(below)
    high = value + unknown + math.sqrt(above)
    return Interval(value, low, high)
