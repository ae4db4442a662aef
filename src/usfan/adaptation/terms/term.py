"""The interface of a loss term of stage 2: its settings are fields, its state is allocated by `start`.

    @dataclass
    class Mine(usfan.Term):
        my_weight: float = 0.1
        "Weight of my loss."

        def start(self, context):        # optional: tables with a row per target sample
            self.bank = torch.zeros(context.count, context.classes, device=context.device)

        def refresh(self, outputs):      # optional: after each pass over the target
            self.bank.copy_(outputs.probs)

        def __call__(self, batch):       # the term's part of the loss, its weight included
            each = (batch.probs * self.bank[batch.samples]).sum(dim=1)
            return self.my_weight * self.context.mean(each, batch)

Shapes: N target samples, B batch, K classes, D features.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from usfan.adaptation.guidance import Guidance
from usfan.adaptation.run_facts import RunFacts
from usfan.config import convert
from usfan.engine.loop import Batch
from usfan.engine.runtime import Runtime
from usfan.maths.names import TargetNaming
from usfan.maths.objectives import global_mean, global_sum
from usfan.maths.outputs import Outputs
from usfan.maths.user_labels import UserLabels
from usfan.models.classifier import Classifier
from usfan.uncertainty.base import Uncertainty

__all__ = ["Batch", "Context", "Outputs", "Term"]


@dataclass(frozen=True)
class Context:
    """The part of the run that a term may use. It holds neither source data nor labels, except those that the user
    gave. Its means and sums are over the batches of all processes."""

    count: int
    """N."""
    classes: int
    """K."""
    runtime: Runtime
    epochs: int
    seed: int
    guidance: Guidance
    """Certainty weights, known samples, class shares."""
    source: Outputs
    """The source model's outputs on the target."""
    witness: Tensor | None = None
    """N × (F + C): the target as the witness describes it, or None."""
    naming: TargetNaming | None = None
    """Clusters of the target and their names; None with fewer than two images or classes."""
    uncertainty: Uncertainty | None = None
    """Source of certainty: the posterior of the source head, unless the run uses another."""
    user_labels: UserLabels | None = None
    """Labels that the user gave for a few of the images."""

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def known(self, batch: Batch) -> Tensor:
        """B: 1 for samples judged known, else 0."""
        return self.guidance.known[batch.samples]

    def mean(
        self,
        values: Tensor,
        batch: Batch | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The mean of B×… values: over the samples of the batch judged known, or weighted by a mask (B), or over all
        values if neither is passed. 0 if no sample counts."""
        if mask is None and batch is not None:
            mask = self.known(batch)
        return global_mean(values, self.runtime.total_or_alone, mask)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the rows of B×… values."""
        return global_sum(values, self.runtime.total_or_alone)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows B×… of the batches of all processes; no gradient passes."""
        return self.runtime.gathered(rows)

    def local(self, rows: Tensor, batch: Batch) -> Tensor:
        """Those of the gathered rows that belong to this process's batch."""
        if self.runtime.world == 1:
            return rows
        return rows[self.positions(batch)]

    def whole(self, rows: Tensor, batch: Batch) -> Tensor:
        """The rows B×… of the global batch; a gradient passes to those of this process's batch."""
        if self.runtime.world == 1:
            return rows
        return self.gather(rows.detach()).index_copy(0, self.positions(batch), rows)

    def positions(self, batch: Batch) -> Tensor:
        """Where the samples of this process's batch are in the global batch."""
        samples = self.gather(batch.samples)
        return (samples == batch.samples[:, None]).int().argmax(dim=1)

    def pin(self, table: Tensor) -> None:
        """Write the user's labels, if there are any, into a table of N labels or N × K probabilities."""
        if self.user_labels is not None:
            self.user_labels.pin(table)


class Started:
    """State of a term that runs."""

    context: Context

    @property
    def guidance(self) -> Guidance:
        return self.context.guidance


@dataclass
class Term(Started):
    """One summand of the loss of stage 2. A setting with bounds is `usfan.config.number(default, low, high)`."""

    needs_pixels = False
    """Whether the term makes its own views, so that cached features are not enough."""
    needs_witness = False

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            if item.metadata:
                convert(item, getattr(self, item.name))

    def decide(self, facts: RunFacts) -> Self:
        """The same term with every open setting (None) decided from the facts."""
        return self

    def started(self, context: Context) -> Self:
        """A running copy."""
        term = copy.copy(self)
        term.context = context
        term.start(context)
        return term

    def start(self, context: Context) -> None:
        """Allocate tables."""

    def begin_epoch(self, epoch: int) -> None:
        """Before the steps of an epoch."""

    def refresh(self, outputs: Outputs) -> None:
        """New tables from a pass over the target, in place."""

    def end_epoch(self, epoch: int, classifier: Classifier) -> None:
        """After the steps of an epoch, with the network after its last step."""

    def parameters(self) -> list[Tensor]:
        """Parameters of the term itself (an auxiliary head), which the optimiser trains too."""
        return []

    def tensors(self) -> dict[str, Tensor]:
        """State that a checkpoint must hold: whatever the next `refresh` does not recompute."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back the state of `tensors`."""

    def __call__(self, batch: Batch) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no loss: define __call__(self, batch)")
