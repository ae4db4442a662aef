"""The guard: keep the iterate that a label-free validator prefers, the source model among the candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from usfan.adaptation.neighbours import nearest_neighbours
from usfan.evaluation.validators import collapse
from usfan.models.classifier import Classifier
from usfan.models.model import Outputs

NEIGHBOURS = 5


@dataclass(frozen=True)
class Kept:
    """The iterate that was kept, and why."""

    epoch: int
    reason: str
    state: dict[str, Tensor] | None = None


class Guard:
    """Sees every iterate; remembers the best, and the last good one."""

    def __init__(self, *, enabled: bool, partial: bool = False) -> None:
        self.enabled, self.partial = enabled, partial
        self.source: Outputs | None = None
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
            reason = collapse(probs, self.source.probs)
        if not self.enabled:
            return
        if reason is not None:
            self.collapsed = reason
            return
        if self.best_state is None or score(validators) >= score(self.validators[self.best]):
            self.best = epoch
            self.best_state = {k: v.detach().clone() for k, v in classifier.state_dict().items()}

    def finish(self) -> Kept:
        if not self.enabled:
            return Kept(self.latest, f"the last iterate of {self.latest}: the guard is off")
        if self.collapsed is not None:
            return Kept(
                self.best,
                f"adaptation collapsed at epoch {self.latest} ({self.collapsed}): kept epoch {self.best}",
                self.best_state,
            )
        if self.best == 0 and self.latest > 0:
            return Kept(
                0, "adaptation was not trusted: source model kept, because no iterate scored higher", self.best_state
            )
        return Kept(self.best, f"kept epoch {self.best} of {self.latest}", self.best_state)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.best_state or {})

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "validators": {str(k): v for k, v in self.validators.items()}}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.validators = {int(k): v for k, v in state["validators"].items()}
        self.best_state = tensors or None


def score(validators: dict[str, float]) -> float:
    """Information maximisation: confident on each sample, diverse over all."""
    return validators["information_maximization"]
