"""The guard: does the adapted model explain the target better than the source model does?

Null hypothesis: the adapted predictions explain the target's structure, as seen by features that the training did not
use, no better than the source model's. Two figures measure this; each has a blind spot that the other covers:

    κ   agreement of neighbours beyond chance (`maths.agreement`). It sees a class torn into parts, but not classes
        that were swapped.
    m   mean probability of the predictions in a mixture with one cluster per class (`maths.cluster_mixture`), which the
        source posterior's predictions name. It sees swapped classes, but expects equal shares.

The source posterior says more about the names: a changed prediction is doubted if none of eight heads drawn from it
gives it, and κ falls by half of the doubted share:

    e = (κ − |κ| u/2 + m) / 2    u: share of all images whose prediction is doubted; the source model's is 0

The guard keeps the adapted model if the 90 % interval of the gain in e is above 0 (bootstrap over images), and the
source model if e does not rise. Otherwise it cannot tell. A pretrained network looks at half of the images first, and
at the others only if the gain is within three standard errors of 0. A neighbourhood has as many images as a class of
average size, at most √N: large enough to see a class torn into parts, as happens if the target lacks classes and
adaptation fills them.

`choose_epoch` is a pure function of the run's history, one `EpochScore` per epoch.

Shapes: N images, n of them judged (at most 1,000), K classes, M = 8 draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.target_classes import unknown_score, with_unnamed
from usfan.adaptation.thresholds import (
    GUARD_CLEAR,
    GUARD_FIRST_IMAGES,
    GUARD_FIRST_PER_CLASS,
    GUARD_IMAGES,
    SMOOTHING_NEIGHBOURS,
)
from usfan.errors import UsfanError, option
from usfan.maths.agreement import NEIGHBOURS, Comparison, Interval, sample_rows
from usfan.maths.cluster_mixture import UNEVEN_PRIOR, fit_mixture, fit_witness_space
from usfan.maths.measurement import NORMAL_90
from usfan.maths.neighbours import nearest_neighbours
from usfan.maths.outputs import Outputs
from usfan.maths.validators import collapse


@dataclass(frozen=True)
class EpochScore:
    """The guard's figures of the model after one epoch."""

    epoch: int
    changed: float
    """Share of the predictions that are not the source model's."""
    gain: Interval
    """e of this model minus that of the source model."""
    names: float
    """Share of the changed predictions that some head drawn from the source posterior gives."""
    structure: tuple[float, float]
    """κ of the source model and of this model."""
    fit: tuple[float, float]
    """m of the source model and of this model."""
    accuracy: tuple[float, float]
    """Their estimated accuracy: e with five neighbours."""
    collapse: str | None = None

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> EpochScore:
        """Raises if it holds anything but numbers."""
        collapsed = stored["collapse"]
        pairs = {name: pair(stored[name]) for name in ("structure", "fit", "accuracy")}
        return cls(
            epoch=int(stored["epoch"]),
            changed=float(stored["changed"]),
            gain=Interval(**{name: float(value) for name, value in stored["gain"].items()}),
            names=float(stored["names"]),
            collapse=None if collapsed is None else str(collapsed),
            **pairs,
        )


def pair(stored: Sequence[Any]) -> tuple[float, float]:
    before, after = stored
    return float(before), float(after)


@dataclass(frozen=True)
class GuardDecision:
    """The model that the guard keeps, and why."""

    kept: str
    """adapted, source, or undecided (then the source model stays, and the adapted one is saved beside it)."""
    epoch: int
    """Epoch of the model that is kept; 0 is the source model."""
    reason: str
    candidate: int = 0
    """The epoch that was judged; 0 if there is none but the source model."""


def choose_epoch(history: Sequence[EpochScore]) -> GuardDecision:
    """The decision, from the scores of every epoch, the source model's (epoch 0) first. After a collapse, the last
    model before it is judged."""
    collapsed = next((score for score in history if score.collapse), None)
    last = [score for score in history if not score.collapse][-1]
    start = ""
    candidate = "adapted model"
    adapted_reason = "adapted model kept"
    if collapsed is not None:
        start = f"adaptation collapsed at epoch {collapsed.epoch} ({collapsed.collapse}); "
        candidate = f"model of epoch {last.epoch}"
        adapted_reason = f"the {candidate} is kept"
    if last.epoch == 0 or (collapsed is not None and last.changed == 0):
        judged = 0 if collapsed is None else collapsed.epoch
        return GuardDecision("source", 0, f"{start}source model kept", judged)
    if last.changed == 0:
        reason = f"{adapted_reason}: no prediction changed"
        return GuardDecision("adapted", last.epoch, reason, last.epoch)
    structure_before, structure_after = last.structure
    fit_before, fit_after = last.fit
    figures = (
        f"agreement of similar images {structure_before:z.0%} before, {structure_after:z.0%} after (corrected for"
        f" chance), fit to their clusters {fit_before:.0%} before, {fit_after:.0%} after"
    )
    if last.gain.low > 0:
        reason = f"{start}{adapted_reason}: {figures}"
        return GuardDecision("adapted", last.epoch, reason, last.epoch)
    doubts = ""
    if structure_after + fit_after > structure_before + fit_before:  # the doubts decided
        doubts = (
            f"; the source posterior finds {last.names:.0%} of the new predictions plausible"
        )
    if last.gain.value <= 0:
        reason = f"{start}source model kept: {figures}{doubts}"
        return GuardDecision("source", 0, reason, last.epoch)
    reason = (
        f"{start}cannot tell: {figures}, which may be chance{doubts}; the source model stays in use,"
        f" the {candidate} is saved beside it"
    )
    return GuardDecision("undecided", 0, reason, last.epoch)


def guard_rows(count: int) -> Tensor:
    """Positions of the images that the guard judges by."""
    return sample_rows(count, GUARD_IMAGES)


def first_rows(count: int, classes: int) -> Tensor:
    """Positions of the images that a judge looks at first: some of `guard_rows`, unless there are few, or many
    classes."""
    first = max(GUARD_FIRST_IMAGES, GUARD_FIRST_PER_CLASS * classes)
    return sample_rows(count, min(first, GUARD_IMAGES))


def neighbourhoods(count: int, classes: int) -> tuple[int, int]:
    """Neighbours for the estimated accuracy, and for the decision, of so many images. Both fit into a class of average
    size: half of one, at most five; and a whole one, at most √N."""
    half_class = max(count // (2 * classes), 1)
    near = min(half_class, NEIGHBOURS)
    wide = min(math.isqrt(count), count // classes)
    return near, max(near, wide)


def cluster_fits(
    features: Tensor,
    probs: Tensor,
    near: Tensor,
    classes: int,
) -> Tensor:
    """n × `classes`: the probability of each class in the mixture of n × F features whose clusters are named by n × K
    probabilities. One class more than K is unknown, the clusters without a name; `near` (n × k) helps to find them.
    Without two images or two classes there are no clusters, only names."""
    named = probs.shape[1]
    if min(probs.shape) < 2:
        return torch.nn.functional.pad(probs.float(), (0, classes - named))
    names = probs.float().clamp_min(1e-12).log()
    points = fit_witness_space(features).project(features)
    if classes == named:
        return fit_mixture(points, names).responsibilities
    begin = with_unnamed(points, names, unknown_score(names, near), named)
    fits = fit_mixture(points, names, begin=begin, prior=UNEVEN_PRIOR).responsibilities
    unknown = fits[:, named:].sum(dim=1, keepdim=True)
    return torch.cat([fits[:, :named], unknown], dim=1)


class Guard:
    """Scores the model after every epoch, and keeps the weights of the last good one."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.history: list[EpochScore] = []
        self.state: dict[str, Tensor] = {}
        """Weights of the last model that did not collapse."""
        self.loss_finite = True

    @property
    def collapsed(self) -> str | None:
        return self.history[-1].collapse if self.enabled and self.history else None

    @property
    def latest(self) -> int:
        return self.history[-1].epoch

    @property
    def judged(self) -> EpochScore:
        """The score of the last model that did not collapse."""
        return [score for score in self.history if not score.collapse][-1]

    @property
    def is_open(self) -> bool:
        """Whether more images may change the decision."""
        gain = self.judged.gain
        error = (gain.high - gain.low) / (2 * NORMAL_90)
        return self.judged.epoch > 0 and abs(gain.value) <= GUARD_CLEAR * error

    def open(
        self,
        before: Outputs,
        predictions: Tensor,
        draws: Tensor,
        judge_features: Tensor | None,
        classes: int,
        class_names: Sequence[str] = (),
        rows: Tensor | None = None,
    ) -> None:
        """Called once with the source model's N predictions; and, for the images at `rows` (by default `guard_rows`),
        n × M predictions of drawn heads, and the judge's n × F features (None: the source model's features)."""
        device = predictions.device
        self.source = before
        self.class_names = class_names
        self.rows = (guard_rows(len(predictions)) if rows is None else rows).to(device)
        self.predictions = predictions[self.rows]
        self.draws = draws
        if judge_features is None:
            judge_features = before.features[self.rows]
        features = judge_features.to(device)
        if not bool(torch.isfinite(features).all()):
            raise UsfanError(
                f"the features that the guard judges by are not finite numbers; {option('guard', False)} ignores them"
            )
        near, wide = neighbourhoods(len(self.rows), classes)
        table, _ = nearest_neighbours(features, max(wide, SMOOTHING_NEIGHBOURS))
        fits = cluster_fits(  # on the CPU: the same for every device
            features.float().cpu(),
            before.posterior_probs[self.rows].cpu(),
            table[:, :SMOOTHING_NEIGHBOURS].cpu(),
            classes,
        ).to(device)
        self.structure = Comparison(self.predictions, table[:, :wide], classes, fits)
        self.accuracy = Comparison(self.predictions, table[:, :near], classes, fits)

    def consider(
        self,
        epoch: int,
        outputs: Outputs,
        predictions: Tensor,
        state: dict[str, Tensor],
    ) -> EpochScore:
        """Score a model by its outputs, its N predictions (K for unknown) and its weights."""
        reason = None if self.loss_finite else "the loss is not finite"
        if epoch > 0 and reason is None:
            reason = collapse(outputs.probs, self.source.probs, self.class_names)
        predictions = predictions[self.rows]
        changed = predictions != self.predictions
        is_class = predictions < outputs.logits.shape[1]  # a head does not predict "unknown"
        named = changed & is_class
        doubted = named & ~(self.draws == predictions[:, None]).any(dim=1)
        before = self.structure.before
        after = self.structure.evidence(predictions, doubted)
        plausible = 1 - int(doubted.sum()) / max(int(named.sum()), 1)
        accuracy = self.accuracy.evidence(predictions, doubted).value
        score = EpochScore(
            epoch,
            float(changed.double().mean()),
            self.structure.gain(predictions, doubted),
            plausible,
            (before.structure, after.structure),
            (before.fit, after.fit),
            (self.accuracy.before.value, accuracy),
            reason,
        )
        self.history.append(score)
        if reason is None and self.enabled:
            self.state = {name: value.detach().clone() for name, value in state.items()}
        return score

    def finish(self) -> GuardDecision:
        if self.enabled:
            return choose_epoch(self.history)
        reason = "guard off; the model after the last epoch is kept"
        return GuardDecision("adapted", self.latest, reason, self.latest)

    def score_of(self, epoch: int) -> EpochScore:
        """The score of an epoch; the latest if it has none."""
        scores = [score for score in self.history if score.epoch == epoch]
        return scores[0] if scores else self.history[-1]

    def to_dict(self) -> dict[str, Any]:
        return {"history": [asdict(score) for score in self.history]}

    def restore(self, stored: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint: its weights, and its history except for the last score, which is repeated."""
        self.history = [EpochScore.from_dict(score) for score in stored["history"]][:-1]
        if not self.history or self.history[0].epoch != 0 or self.history[0].collapse:
            raise ValueError("its history does not begin with the source model")
        self.state = state
