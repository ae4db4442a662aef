"""What every term of stage 2 shares: its settings are fields, its state is made by `start`.

    @dataclass
    class Mine(Term):
        my_weight: float = 0.1
        "Weight of my loss."

        def start(self, context):        # optional: tables with a row per target sample
            self.bank = torch.zeros(context.count, context.classes, device=context.device)

        def refresh(self, outputs):      # optional: after each pass over the target
            self.bank.copy_(outputs.probs)

        def __call__(self, batch):       # the term's part of the loss, its weight included
            return self.my_weight * (batch.probs * self.bank[batch.samples]).sum(dim=1).mean()

Shapes: N target samples, B batch, K classes, D features.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from usfan.adaptation.facts import Facts
from usfan.adaptation.given import Given
from usfan.compute.loop import Batch
from usfan.compute.runtime import Runtime
from usfan.models.classifier import Classifier
from usfan.scoring.outputs import Outputs


@dataclass(frozen=True)
class Context:
    """What a term may see of the run. It holds neither source data nor labels, except those that the user gave."""

    count: int
    """N."""
    classes: int
    """K."""
    runtime: Runtime
    epochs: int
    seed: int
    guide: Any
    """`Guidance`: certainty weights, known samples, class shares."""
    source: Outputs
    """What the source model says of the target."""
    witness: Tensor | None = None
    """N × D' features of the target in a frozen pretrained network, or None."""
    uncertainty: Any = None
    """Source of certainty: the posterior of the source head, unless the run uses another."""
    given: Given | None = None
    """Labels that the user gave for a few of the images."""

    @property
    def device(self) -> torch.device:
        return self.runtime.device


@dataclass
class Term:
    """One summand of the loss of stage 2."""

    needs_pixels = False
    """Whether the term makes views of its own, so that cached features are not enough."""
    needs_witness = False

    def decide(self, facts: Facts) -> Self:
        """The same term with every setting that was left open (None) decided from what the program can see."""
        return self

    def started(self, context: Context) -> Self:
        """A running copy."""
        term = copy.copy(self)
        term.context = context  # type: ignore[attr-defined]
        term.start(context)
        return term

    def start(self, context: Context) -> None:
        """Allocate tables."""

    def begin_epoch(self, epoch: int) -> None:
        """Before the steps of an epoch."""

    def refresh(self, outputs: Outputs) -> None:
        """New tables from a pass over the target, in place."""

    def end_epoch(self, epoch: int, classifier: Classifier) -> None:
        """After the steps of an epoch: the network as they left it."""

    def parameters(self) -> list[Tensor]:
        """Parameters of the term's own (an auxiliary head), which the optimiser trains too."""
        return []

    def tensors(self) -> dict[str, Tensor]:
        """State that a checkpoint must hold: what the next `refresh` does not recompute."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""

    def __call__(self, batch: Batch) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no loss: define __call__(self, batch)")
