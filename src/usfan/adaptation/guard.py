"""The guard: keep the iterate that a label-free validator prefers, the source model among the candidates.

Information maximisation ranks the iterates of a run, but it cannot tell classes that were swapped: they are as
confident and as diverse as the right ones. The posterior can. Adaptation should change its mind about images that the
source model doubted. Where the images whose class changed were not clearly less certain than those whose class stayed
(`doubtful_drift` under `TRUSTED`), the run is not trusted, and the source model is kept. A source model that knows next
to nothing of the target (its predictions carry less than `WITNESS` of log K in information) is no witness, and little
is lost with it: it is not asked.

Nor can information tell that classes are missing: it asks for all of them, and images of one class are spread over
several. Neighbours show it. Images that lie together in the source model's features should be predicted alike, and more
so as adaptation goes on (`source_neighbours`). An iterate that lies `SCATTERED` under the highest agreement so far is
not kept, whatever its information; and where the run ends `TORN` under the source model itself, that is kept. This is
not asked in open set, where unknown images are spread on purpose; nor where there are too few images for a class to be
its own neighbours; nor where the source model says nearly the same of every image, and neighbours agree for that.

An image that changes its class for good comes to its neighbours: where adaptation works on many classes, each one that
moves brings 0.3 to 0.8 of agreement. Where it brings less than `TOGETHER`, the source model is kept. It must be a
witness here too: not where most images move, nor where it sees few classes, which agree by chance.

Where the source model sees not one image of a quarter of its classes, they may be missing, or it may be weak. No figure
was found that tells which, so the guard warns, and leaves it to the user.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from usfan.models.classifier import Classifier
from usfan.scoring.calibration import entropies
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.outputs import Outputs
from usfan.scoring.validators import collapse

NEIGHBOURS = 5
TRUSTED = 0.6
"""Least chance that a moved image was less certain than one that stayed; ½ is no relation at all (docs/results.md)."""
WITNESS = 0.4
"""Least information of the source model's predictions, as a share of log K, for its certainty to count."""
MOVED = 0.05
"""Share of the images that must have moved before that is asked."""
SCATTERED = 0.02
"""How far an iterate's agreement of neighbours may lie under the highest so far…"""
TORN = 0.03
"""…and the last one's under the source model's."""
TOGETHER = 0.15
"""Least agreement that an image which changed its class must bring, on average…"""
MOVES = (0.02, 0.5)
"""…where so many of the images did, at least and at most, …"""
SEVERAL = 4
"""…and the source model's predictions are spread over so many classes, in effect. All three are asked…"""
ENOUGH = 100
"""…of so many images at least, …"""
PER_PREDICTED = 6
"""…so many for each class that the source model predicts, …"""
INFORMED = 0.1
"""…and where its predictions hold so much information, as a share of log K."""
UNSEEN = 0.25
"""Share of the classes (and two at least) that the source model predicts for no image, for a warning…"""
PER_CLASS = 4
"""…where there are this many images per class, on average."""


@dataclass(frozen=True)
class Kept:
    """The iterate that was kept, and why."""

    epoch: int
    """0 is the source model."""
    reason: str
    state: dict[str, Tensor] | None = None
    """Its weights; None for the source model's, and for the last iterate's."""


class Guard:
    """Sees every iterate; remembers the best, and the last good one."""

    def __init__(
        self, *, enabled: bool, partial: bool = False, neighbourly: bool = True, names: tuple[str, ...] | None = None
    ) -> None:
        self.names = names
        self.enabled, self.partial, self.neighbourly = enabled, partial, neighbourly
        self.source: Outputs | None = None
        self.classes = 1
        self._neighbours: Tensor | None = None
        self.validators: dict[int, dict[str, float]] = {}
        self.collapsed: str | None = None
        self.loss_finite = True
        self.latest = 0
        self.best = 0
        self.best_state: dict[str, Tensor] | None = None

    def neighbours(self) -> Tensor:
        """N×5 positions: the nearest in the source model's features, found once."""
        if self._neighbours is None:
            assert self.source is not None
            self._neighbours = nearest_neighbours(self.source.features, NEIGHBOURS)[0]
        return self._neighbours

    def consider(self, epoch: int, validators: dict[str, float], probs: Tensor, classifier: Classifier) -> None:
        self.latest = epoch
        self.validators[epoch] = validators
        reason = None if self.loss_finite else "the loss is not finite"
        if epoch > 0 and reason is None and self.source is not None:
            reason = collapse(probs, self.source.probs, self.names)
        if not self.enabled:
            return
        if reason is not None:
            self.collapsed = reason
            return
        if self.best_state is None or self.prefers(epoch):
            self.best = epoch
            self.best_state = {k: v.detach().clone() for k, v in classifier.state_dict().items()}

    def see_source(self, outputs: Outputs) -> None:
        """The source model's look at the target, with which the iterates are compared."""
        self.source, self.classes = outputs, outputs.probs.shape[1]
        predicted = len(outputs.probs.argmax(dim=1).unique())
        self.neighbourly &= self.worth_asking(len(outputs.probs), predicted, self.source_knowledge())

    @staticmethod
    def worth_asking(count: int, predicted: int, knowledge: float) -> bool:
        """Whether the agreement of neighbours says something, over `count` images of `predicted` classes."""
        return count >= max(ENOUGH, PER_PREDICTED * predicted) and knowledge >= INFORMED

    def prefers(self, epoch: int) -> bool:
        """Whether this iterate, the newest, takes the place of the best so far."""
        better = self.score(self.validators[epoch]) >= self.score(self.validators[self.best])
        return better and not self.scattered(epoch)

    def scattered(self, epoch: int) -> bool:
        return self.agreement(epoch) < max(map(self.agreement, self.validators)) - SCATTERED

    def agreement(self, epoch: int) -> float:
        """How often neighbours in the source model's features are predicted alike."""
        return self.validators[epoch].get("source_neighbours", 1.0) if self.neighbourly else 1.0

    def finish(self) -> Kept:
        if not self.enabled:
            return Kept(self.latest, f"the last iterate of {self.latest}: the guard is off")
        doubt = self.distrust(self.validators[self.best], self.source_knowledge())
        doubt = doubt or (self.torn() if self.collapsed is None else None) or self.scattering()
        if doubt is not None:
            return Kept(0, f"adaptation was not trusted: source model kept, because {doubt}")
        if self.collapsed is not None:
            return Kept(
                self.best,
                f"adaptation collapsed at epoch {self.latest} ({self.collapsed}): kept epoch {self.best}",
                self.best_state,
            )
        if self.best == 0 and self.latest > 0:
            apart = "images that lie together were predicted apart"
            why = apart if self.scattered(self.latest) else "no iterate scored higher"
            return Kept(0, f"adaptation was not trusted: source model kept, because {why}")
        reason = f"kept epoch {self.best} of {self.latest}"
        if self.scattered(self.latest):
            reason += ": after it images that lie together were predicted apart"
        return Kept(self.best, reason, self.best_state)

    def torn(self) -> str | None:
        """Why the run as a whole is not to be trusted: its end tears apart what the source model sees together."""
        before, after = self.agreement(min(self.validators)), self.agreement(self.latest)
        if min(self.validators) > 0 or after >= before - TORN:
            return None
        return (
            f"images that lie together are predicted alike less often than before ({after:.0%}, it was {before:.0%})"
            + ("" if self.partial else ": the target may lack classes, and then --partial-set is better")
        )

    def scattering(self) -> str | None:
        """Why the run is not to be trusted: what moved never came to its neighbours, at the end or in what is kept."""
        epochs = {self.best} if self.collapsed is not None else {self.best, self.latest}
        gains = [gain for epoch in epochs if (gain := self.gain_per_move(epoch)) is not None]
        if self.partial or min(gains, default=TOGETHER) >= TOGETHER:
            return None
        return (
            f"images that changed their class hardly came to those that they lie together with (agreement per move "
            f"{min(gains):.3f}, {TOGETHER} is needed): the target may lack classes, and then --partial-set is better"
        )

    def gain_per_move(self, epoch: int) -> float | None:
        """Agreement of neighbours that an image brought by changing its class; None where that says nothing."""
        first, moved = self.validators.get(0, {}), self.validators[epoch].get("drift", 0.0)
        spread = first.get("diversity", 0.0) * math.log(self.classes)
        if not self.neighbourly or not MOVES[0] <= moved <= MOVES[1] or spread < math.log(SEVERAL):
            return None
        return (self.agreement(epoch) - self.agreement(0)) / moved

    def score(self, validators: dict[str, float]) -> float:
        """Information maximisation: confident on each sample, diverse over all. Where classes may be missing, only
        confident: their absence is no fault."""
        return -validators["entropy"] if self.partial else validators["information_maximization"]

    def source_knowledge(self) -> float:
        """Information of the source model's predictions on the target, as a share of log K."""
        if self.source is None or self.source.probs.shape[1] < 2:
            return 0.0
        probs = self.source.probs
        information = entropies(probs.mean(dim=0)[None])[0] - entropies(probs).mean()
        return float(information) / math.log(probs.shape[1])

    @staticmethod
    def distrust(validators: dict[str, float], source_knowledge: float) -> str | None:
        """Why an iterate is not to be trusted; None if it is."""
        drift, doubtful = validators.get("drift", 0.0), validators.get("doubtful_drift", 1.0)
        if drift < MOVED or doubtful >= TRUSTED or source_knowledge < WITNESS:
            return None
        return (
            f"it changed the class of {drift:.0%} of the images, and those were hardly less certain than the others "
            f"(doubtful drift {doubtful:.2f}, {TRUSTED} is needed): classes may have been swapped"
        )

    @staticmethod
    def missing_classes(coverage: float, count: int, classes: int) -> str | None:
        """What to say where the source model predicts `coverage` of the classes only, over `count` images."""
        unseen = round((1 - coverage) * classes)
        if unseen < max(2, UNSEEN * classes) or count < PER_CLASS * classes:
            return None
        return (
            f"the source model predicts {unseen} of {classes} classes for not one of {count} images: it may be weak, "
            "or the target lacks them; adaptation will fill them, and where they are missing --partial-set is better"
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.best_state or {})

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "validators": {str(k): v for k, v in self.validators.items()}}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.validators = {int(k): v for k, v in state["validators"].items()}
        self.best_state = tensors or None
