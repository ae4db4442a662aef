"""The guard: does the adapted model explain the target better than the source model does?

Null hypothesis: the adapted predictions explain the target's structure, as seen by a network that was not trained on
this loss, no better than the source model's. Structure is the agreement of neighbours corrected for chance
(`scoring.structure`), at two scales: the five nearest images, and a tenth of all images. Near neighbours say whether
predictions follow the images; wide neighbourhoods say whether classes were torn into parts, which is what happens if
the target lacks classes and adaptation fills them. The adapted model is kept if both rise for certain (90 % intervals,
bootstrap over images), and if the source posterior can account for the new names: of the predictions that changed, at
least a quarter are given by one of eight heads drawn from it.

Everything that the decision needs is in the history of the run (`Look`), and `choose_epoch` is a pure function of it.

Shapes: N images (at most 1,000 are looked at), K classes, M = 8 draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.outputs import Outputs
from usfan.scoring.structure import Comparison, Interval, evenly_spaced
from usfan.scoring.validators import collapse

NEAR = 5
WIDE_SHARE = 10
"""Wide neighbourhoods hold one in this many images."""
MOST = 1_000
DRAWS = 8


@dataclass(frozen=True)
class Rules:
    """The thresholds of the decision."""

    names: float = 0.25
    """Smallest share of changed predictions that some head drawn from the source posterior must also give."""
    unchanged: float = 0.01
    """If fewer predictions changed, there is nothing to judge, and the adapted model is kept."""


@dataclass(frozen=True)
class Look:
    """The guard's figures of one iterate; `near` and `wide` are differences to the source model."""

    epoch: int
    changed: float
    near: Interval
    wide: Interval
    names: float
    structure: tuple[float, float]
    """κ of the source model and of this iterate, five neighbours."""
    collapse: str | None = None

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Look:
        """Raises if it holds anything but numbers."""
        intervals = {name: Interval(**{k: float(v) for k, v in stored[name].items()}) for name in ("near", "wide")}
        before, after = map(float, stored["structure"])
        changed, names, collapsed = float(stored["changed"]), float(stored["names"]), stored["collapse"]
        reason = None if collapsed is None else str(collapsed)
        return cls(int(stored["epoch"]), changed, **intervals, names=names, structure=(before, after), collapse=reason)


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


def choose_epoch(history: Sequence[Look], rules: Rules | None = None) -> Kept:
    """The decision, from the looks at every epoch, the source model's (epoch 0) first. After a collapse, the last
    iterate before it is judged."""
    rules = rules or Rules()
    fell = next((look for look in history if look.collapse), None)
    last = [look for look in history if not look.collapse][-1]
    start, kept = "", "adapted model kept"
    if fell is not None:
        start = f"adaptation collapsed at epoch {fell.epoch} ({fell.collapse}); "
        kept = f"the model of epoch {last.epoch} is kept"
    if last.epoch == 0 or (fell is not None and last.changed < rules.unchanged):
        return Kept("source", 0, start + "source model kept")
    if last.changed < rules.unchanged:
        return Kept("adapted", last.epoch, f"{kept}: {last.changed:.1%} of the predictions changed")
    before, after = last.structure
    seen = f"agreement of similar images {before:z.0%} before, {after:z.0%} after (corrected for chance)"
    weaker = min(last.near, last.wide, key=lambda interval: interval.low)
    if last.names < rules.names:
        why = f"the source posterior finds only {last.names:.0%} of the new predictions plausible"
        return Kept("source", 0, f"{start}source model kept: {why}", last.epoch)
    if weaker.low > 0:
        return Kept("adapted", last.epoch, f"{start}{kept}: {seen}")
    if weaker.value <= 0:
        torn = last.wide.value <= 0 < last.near.value
        why = "images that belong together were given different classes; the target may lack classes" if torn else seen
        return Kept("source", 0, f"{start}source model kept: {why}", last.epoch)
    judged = "adapted model" if fell is None else f"model of epoch {last.epoch}"
    return Kept(
        "undecided",
        0,
        f"{start}cannot tell: {seen}, which may be chance; the source model stays in use, the {judged} is saved "
        "beside it",
        last.epoch,
    )


def looked_at(count: int) -> Tensor:
    """Positions of the images that the guard looks at."""
    return evenly_spaced(count, MOST)


class Guard:
    """Examines every iterate, and keeps the weights of the last good one."""

    def __init__(self, *, enabled: bool, rules: Rules | None = None) -> None:
        self.enabled, self.rules = enabled, rules or Rules()
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
        wide = max(NEAR, len(self.rows) // WIDE_SHARE)
        table = nearest_neighbours(features, wide)[0]
        self.labels, self.draws = labels[self.rows], draws
        self.near, self.wide = (Comparison(self.labels, near, classes) for near in (table[:, :NEAR], table))

    def consider(self, epoch: int, outputs: Outputs, labels: Tensor, state: dict[str, Tensor]) -> Look:
        """Look at an iterate: its outputs, its N labels (K for unknown), its weights."""
        reason = None if self.loss_finite else "the loss is not finite"
        if epoch > 0 and reason is None:
            reason = collapse(outputs.probs, self.source.probs, self.class_names)
        own = labels[self.rows]
        moved = own != self.labels
        named = moved & (own < outputs.logits.shape[1])  # "unknown" is no name that a head could give
        known = (self.draws == own[:, None]).any(dim=1)[named]
        after, near = self.near.gain(own)
        _, wide = self.wide.gain(own)
        names = float(known.double().mean()) if bool(named.any()) else 1.0
        changed = float(moved.double().mean())
        look = Look(epoch, changed, near, wide, names, (self.near.value, after), reason)
        self.history.append(look)
        if reason is None and self.enabled:
            self.state = {name: value.detach().clone() for name, value in state.items()}
        return look

    def finish(self) -> Kept:
        if not self.enabled:
            return Kept("adapted", self.latest, "guard off: the last iterate is kept", self.latest)
        return choose_epoch(self.history, self.rules)

    def to_dict(self) -> dict[str, Any]:
        return {"history": [asdict(look) for look in self.history]}

    def restore(self, stored: dict[str, Any], state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint: its weights, and its history except for the last look, which is repeated."""
        self.history = [Look.from_dict(look) for look in stored["history"]][:-1]
        if not self.history or self.history[0].epoch != 0 or self.history[0].collapse:
            raise ValueError("its history does not begin with the source model")
        self.state = state


ACCURACY_ERROR = {"before": (0.12, 0.12), "after": (0.20, 0.08)}
"""How far the truth may be below and above the estimate. Set on the runs that the guard was chosen on;
docs/studies/guard.md says how often the interval holds on those set aside."""


ALL_KNOWN, WITH_UNKNOWN = "if no image is of a new class", "with unknown as a class of its own"


def estimated_accuracy(history: Sequence[Look], *, kept: int, rejects: bool = False) -> dict[str, Any]:
    """Accuracy without labels, in percent, with a 90 % interval: the agreement of neighbours beyond chance, before and
    after a run that kept this epoch. If images may be called unknown (`rejects`), that is a class of its own, and it is
    right for images of new classes; otherwise the estimate holds if there are none, and says so."""
    found: dict[str, Any] = {"counts": WITH_UNKNOWN if rejects else ALL_KNOWN}
    look = next((look for look in history if look.epoch == kept), history[-1])
    for when, value in zip(("before", "after"), look.structure, strict=True):
        below, above = ACCURACY_ERROR[when if kept else "before"]
        low, high = max(0.0, value - below), min(1.0, value + above)
        figures = {"value": min(max(value, 0.0), 1.0), "low": min(low, 1.0), "high": max(high, 0.0)}
        found[when] = {name: round(100 * number, 1) for name, number in figures.items()}
    return found
