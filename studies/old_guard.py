"""The guard of version 0.1, for comparison: fourteen constants, set on Office-31, digits and the toy.

It keeps the epoch with the most information (confident on each image, diverse over all), unless one of four checks
sends it back to the source model: classes seem swapped (the images that changed were hardly less certain than the
others), neighbours in the source model's features are predicted alike less often than before, predictions that changed
did not join their neighbours, or adaptation collapsed. The constants and checks are those of the code as it was; only
the form is new: a pure function of what every epoch predicted.

Shapes: N images, K classes, E + 1 epochs, the source model first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.maths.objectives import entropy
from usfan.maths.validators import collapse

TRUSTED = 0.6
WITNESS = 0.4
MOVED = 0.05
SCATTERED = 0.02
TORN = 0.03
TOGETHER = 0.15
MOVES = (0.02, 0.5)
SEVERAL = 4
ENOUGH = 100
PER_PREDICTED = 6
INFORMED = 0.1


@dataclass(frozen=True)
class Run:
    """What the old guard saw of a run."""

    path: Tensor
    """(E + 1) × N predicted classes."""
    entropy: Tensor
    """E + 1: mean entropy of the predictions."""
    information: Tensor
    """E + 1."""
    probs: Tensor
    """N × K of the source model."""
    posterior: Tensor
    """N × K: the source model's posterior predictive."""
    near: Tensor
    """N × 5 neighbours in the source model's features."""
    setting: str = "closed"


def kept_epoch(run: Run) -> int:
    """The epoch that the old guard keeps; 0 is the source model."""
    count = len(run.probs)
    last, collapsed = ended(run)
    knowledge = information_share(run.probs)
    predicted = len(run.path[0].unique())
    asked = run.setting not in ("open", "universal") and knowledge >= INFORMED
    asked = asked and count >= max(ENOUGH, PER_PREDICTED * predicted)
    alike = [
        float((labels[run.near] == labels[:, None]).double().mean()) if asked else 1.0
        for labels in run.path[: last + 1]
    ]
    partial = run.setting == "partial"
    score = -run.entropy if partial else run.information
    best = 0
    for epoch in range(1, last + 1):
        if score[epoch] >= score[best] and alike[epoch] >= max(alike[: epoch + 1]) - SCATTERED:
            best = epoch
    if swapped(run, best, knowledge) or (not collapsed and alike[last] < alike[0] - TORN):
        return 0
    spread = float(entropy(run.probs.double().mean(dim=0)))
    if asked and not partial and spread >= math.log(SEVERAL):
        for epoch in {best} if collapsed else {best, last}:
            moved = float((run.path[epoch] != run.path[0]).double().mean())
            if MOVES[0] <= moved <= MOVES[1] and (alike[epoch] - alike[0]) / moved < TOGETHER:
                return 0
    return best


def ended(run: Run) -> tuple[int, bool]:
    """The last epoch that did not collapse, and whether one did."""
    classes = run.probs.shape[1]
    for epoch in range(1, len(run.path)):
        now = torch.nn.functional.one_hot(run.path[epoch].long(), classes).float()
        if not bool(torch.isfinite(run.entropy[epoch])) or collapse(now, run.probs):
            return epoch - 1, True
    return len(run.path) - 1, False


def information_share(probs: Tensor) -> float:
    """Information of the predictions as a share of log K."""
    information = entropy(probs.double().mean(dim=0)) - entropy(probs.double()).mean()
    return float(information) / math.log(probs.shape[1])


def swapped(run: Run, epoch: int, knowledge: float) -> bool:
    """Whether the images that changed were hardly less certain than those that stayed."""
    moved = run.path[epoch] != run.path[0]
    if knowledge < WITNESS or float(moved.double().mean()) < MOVED or bool(moved.all()):
        return False
    certainty = torch.exp(-entropy(run.posterior.double()))
    low = certainty[moved]
    high = certainty[~moved]
    below = (low[:, None] < high).double().mean() + 0.5 * (low[:, None] == high).double().mean()
    return float(below) < TRUSTED
