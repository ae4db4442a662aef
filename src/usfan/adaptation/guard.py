"""The guard: does the adapted model explain the target better than the source model does?

Null hypothesis: the adapted predictions explain the target's structure, as seen by features that the training did not
use, no better than the source model's. Two figures, each of which can be fooled where the other cannot:

    κ   agreement of neighbours beyond chance (`scoring.structure`). It sees a class torn into parts, but not classes
        that were swapped.
    m   mean probability of the predictions in a mixture with one cluster per class (`scoring.mixture`), which the
        source posterior's predictions name. It sees swapped classes, but expects equal shares.

The source posterior says more about the names: a changed prediction is doubted if none of eight heads drawn from it
gives it, and half of the doubted predictions count as wrong:

    e = (κ − |κ| u/2 + m) / 2    u: share of all images whose prediction is doubted; the source model's is 0

The guard keeps the adapted model if the 90 % interval of the gain in e is above 0 (bootstrap over images), and the
source model if e does not rise. Otherwise it cannot tell. A neighbourhood has as many images as a class of average
size, at most √N: large enough to see a class torn into parts, as happens if the target lacks classes and adaptation
fills them.

Everything that the decision needs is in the history of the run (`Look`), and `choose_epoch` is a pure function of it.

Shapes: N images (at most 1,000 are looked at), K classes, M = 8 draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.errors import UsfanError
from usfan.scoring.mixture import UNEVEN_PRIOR, fit_mixture, fit_witness_space
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.outputs import Outputs
from usfan.scoring.situation import SMOOTHED, unknown_score, with_unnamed
from usfan.scoring.structure import NEIGHBOURS, Comparison, Interval, evenly_spaced
from usfan.scoring.validators import collapse

MOST = 1_000
"""Images that are looked at. More make the interval narrower, and cost time."""
DRAWS = 8


@dataclass(frozen=True)
class Look:
    """The guard's figures of one iterate."""

    epoch: int
    changed: float
    """Share of the predictions that are not the source model's."""
    gain: Interval
    """e of this iterate minus that of the source model."""
    names: float
    """Share of the changed predictions that some head drawn from the source posterior gives."""
    structure: tuple[float, float]
    """κ of the source model and of this iterate."""
    fit: tuple[float, float]
    """m of the source model and of this iterate."""
    accuracy: tuple[float, float]
    """Their estimated accuracy: e with five neighbours."""
    collapse: str | None = None

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Look:
        """Raises if it holds anything but numbers."""
        gain = Interval(**{k: float(v) for k, v in stored["gain"].items()})
        structure, fit, accuracy = (pair(stored[name]) for name in ("structure", "fit", "accuracy"))
        changed, names, collapsed = float(stored["changed"]), float(stored["names"]), stored["collapse"]
        reason = None if collapsed is None else str(collapsed)
        return cls(int(stored["epoch"]), changed, gain, names, structure, fit, accuracy, reason)


def pair(stored: Sequence[Any]) -> tuple[float, float]:
    before, after = map(float, stored)
    return before, after


@dataclass(frozen=True)
class Kept:
    """What was kept, and why."""

    kept: str
    """adapted, source, or undecided (then the source model stays, and the adapted one is saved beside it)."""
    epoch: int
    """Epoch of the model that is kept; 0 is the source model."""
    reason: str
    candidate: int = 0
    """The epoch that was judged."""


def choose_epoch(history: Sequence[Look]) -> Kept:
    """The decision, from the looks at every epoch, the source model's (epoch 0) first. After a collapse, the last
    iterate before it is judged."""
    fell = next((look for look in history if look.collapse), None)
    last = [look for look in history if not look.collapse][-1]
    start, judged, kept = "", "adapted model", "adapted model kept"
    if fell is not None:
        start = f"adaptation collapsed at epoch {fell.epoch} ({fell.collapse}); "
        judged = f"model of epoch {last.epoch}"
        kept = f"the {judged} is kept"
    if last.epoch == 0 or (fell is not None and last.changed == 0):
        return Kept("source", 0, start + "source model kept")
    if last.changed == 0:
        return Kept("adapted", last.epoch, f"{kept}: no prediction changed")
    before, after = last.structure
    seen = (
        f"agreement of similar images {before:z.0%} before, {after:z.0%} after (corrected for chance), fit to their"
        f" clusters {last.fit[0]:.0%} before, {last.fit[1]:.0%} after"
    )
    if last.gain.low > 0:
        return Kept("adapted", last.epoch, f"{start}{kept}: {seen}")
    names = ""
    if after + last.fit[1] > before + last.fit[0]:  # the doubts decided
        names = f"; the source posterior finds {last.names:.0%} of the new predictions plausible"
    if last.gain.value <= 0:
        return Kept("source", 0, f"{start}source model kept: {seen}{names}", last.epoch)
    end = f"; the source model stays in use, the {judged} is saved beside it"
    return Kept("undecided", 0, f"{start}cannot tell: {seen}, which may be chance{names}{end}", last.epoch)


def looked_at(count: int) -> Tensor:
    """Positions of the images that the guard looks at."""
    return evenly_spaced(count, MOST)


def neighbourhoods(count: int, classes: int) -> tuple[int, int]:
    """Neighbours for the estimated accuracy, and for the decision, of so many images. Both fit into a class of average
    size: half of one, at most five; and a whole one, at most √N."""
    near = min(max(count // (2 * classes), 1), NEIGHBOURS)
    return near, max(near, min(math.isqrt(count), count // classes))


def cluster_fits(features: Tensor, probs: Tensor, near: Tensor, classes: int) -> Tensor:
    """N × `classes`: the probability of each class in the mixture of N × F features whose clusters are named by N × K
    probabilities. One class more than K is unknown, the clusters without a name; `near` (N × k) helps to find them.
    Without two images or two classes there are no clusters, only names."""
    if min(probs.shape) < 2:
        return torch.nn.functional.pad(probs.float(), (0, classes - probs.shape[1]))
    names = probs.float().clamp_min(1e-12).log()
    points = fit_witness_space(features).project(features)
    if classes == names.shape[1]:
        return fit_mixture(points, names).responsibilities
    begin = with_unnamed(points, names, unknown_score(names, near), names.shape[1])
    found = fit_mixture(points, names, begin=begin, prior=UNEVEN_PRIOR).responsibilities
    named, unnamed = found[:, : names.shape[1]], found[:, names.shape[1] :]
    return torch.cat([named, unnamed.sum(dim=1, keepdim=True)], dim=1)


class Guard:
    """Examines every iterate, and keeps the weights of the last good one."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.history: list[Look] = []
        self.state: dict[str, Tensor] = {}
        """Weights of the last iterate that did not collapse."""
        self.loss_finite = True

    @property
    def collapsed(self) -> str | None:
        return self.history[-1].collapse if self.enabled and self.history else None

    @property
    def latest(self) -> int:
        return self.history[-1].epoch

    def open(
        self,
        before: Outputs,
        labels: Tensor,
        draws: Tensor,
        seen: Tensor | None,
        classes: int,
        names: Sequence[str] = (),
    ) -> None:
        """Called once with the source model's N labels; and, for the images at `looked_at`, N' × M labels of drawn
        heads, and the judge's N' × F features (None for the source model's own)."""
        self.source, self.class_names = before, names
        self.rows = looked_at(len(labels)).to(labels.device)
        features = before.features[self.rows] if seen is None else seen.to(labels.device)
        if not bool(torch.isfinite(features).all()):
            raise UsfanError("the features that the guard judges by are not finite numbers; --guard off ignores them")
        near, wide = neighbourhoods(len(self.rows), classes)
        table = nearest_neighbours(features, max(wide, SMOOTHED))[0]
        self.labels, self.draws = labels[self.rows], draws
        seen, probs, close = (part.cpu() for part in (features.float(), before.posterior_probs[self.rows], table))
        fits = cluster_fits(seen, probs, close[:, :SMOOTHED], classes).to(labels.device)  # the same on every device
        self.structure = Comparison(self.labels, table[:, :wide], classes, fits)
        self.accuracy = Comparison(self.labels, table[:, :near], classes, fits)

    def consider(self, epoch: int, outputs: Outputs, labels: Tensor, state: dict[str, Tensor]) -> Look:
        """Look at an iterate: its outputs, its N labels (K for unknown), its weights."""
        reason = None if self.loss_finite else "the loss is not finite"
        if epoch > 0 and reason is None:
            reason = collapse(outputs.probs, self.source.probs, self.class_names)
        own = labels[self.rows]
        moved = own != self.labels
        named = moved & (own < outputs.logits.shape[1])  # "unknown" is no name that a head could give
        doubted = named & ~(self.draws == own[:, None]).any(dim=1)
        first, after = self.structure.before, self.structure.evidence(own, doubted)
        changed, asked = float(moved.double().mean()), int(named.sum())
        names = 1 - int(doubted.sum()) / asked if asked else 1.0
        look = Look(
            epoch,
            changed,
            self.structure.gain(own, doubted),
            names,
            structure=(first.structure, after.structure),
            fit=(first.fit, after.fit),
            accuracy=(self.accuracy.before.value, self.accuracy.evidence(own, doubted).value),
            collapse=reason,
        )
        self.history.append(look)
        if reason is None and self.enabled:
            self.state = {name: value.detach().clone() for name, value in state.items()}
        return look

    def finish(self) -> Kept:
        if not self.enabled:
            return Kept("adapted", self.latest, "guard off: the last iterate is kept", self.latest)
        return choose_epoch(self.history)

    def to_dict(self) -> dict[str, Any]:
        return {"history": [asdict(look) for look in self.history]}

    def restore(self, stored: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint: its weights, and its history except for the last look, which is repeated."""
        self.history = [Look.from_dict(look) for look in stored["history"]][:-1]
        if not self.history or self.history[0].epoch != 0 or self.history[0].collapse:
            raise ValueError("its history does not begin with the source model")
        self.state = state


ACCURACY_ERROR = 0.13
"""How far the truth may be from the estimate after adaptation if the target has many images: nine in ten of the runs
that the guard was chosen on are within it. docs/studies/guard.md says how many of those set aside."""

ALL_KNOWN, WITH_UNKNOWN = "if no image is of a new class", "with unknown as a class of its own"


def estimated_accuracy(history: Sequence[Look], *, kept: int, count: int, rejects: bool = False) -> dict[str, Any]:
    """Accuracy without labels, in percent, with a 90 % interval, before and after a run that kept this epoch. With few
    images (`count`) the interval is wider, by the error of a share among so many. If images may be called unknown
    (`rejects`), that is a class of its own, and it is right for images of new classes; otherwise the estimate holds if
    there are none, and says so."""
    found: dict[str, Any] = {"counts": WITH_UNKNOWN if rejects else ALL_KNOWN}
    look = next((look for look in history if look.epoch == kept), history[-1])
    error = math.hypot(ACCURACY_ERROR, 1.645 * 0.5 / math.sqrt(count))
    for when, value in zip(("before", "after"), look.accuracy, strict=True):
        figures = {"value": value, "low": value - error, "high": value + error}
        found[when] = {name: round(100 * min(max(number, 0.0), 1.0), 1) for name, number in figures.items()}
    return found
