"""Watching a run of stage 2 through its own interface: a term that adds nothing to the loss and writes down what it
sees, last in a method's row."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import usfan
from lookalikes import picture
from tiny_models import witness_for
from usfan.adaptation.methods import METHODS
from usfan.adaptation.terms.term import Context, Term
from usfan.engine.loop import Batch
from usfan.maths.outputs import Outputs
from usfan.store.model import AdaptedModel, SourceModel

CLASSES = ("a", "b", "c")


def squares(images: int = 12, domain: int = 3, classes: int = 3) -> usfan.ImageData:
    labels = np.tile(np.arange(classes), images)
    pixels = np.stack(
        [picture(int(label), domain, i, 28, grey=True) for i, label in enumerate(labels)]
    )
    return usfan.ImageData(pixels, labels=labels, classes=CLASSES[:classes], name="squares")


def witness_of(method: str, data: usfan.ImageData) -> dict[str, Tensor]:
    """Settings that the method needs: the pixels themselves stand for what a witness sees."""
    return witness_for(method, torch.stack([data.load(i, 1)[0] for i in range(len(data))]))


@dataclass
class Epoch:
    """What a term sees of one epoch."""

    outputs: Outputs
    """Of the pass before it."""
    weights: Tensor
    known: Tensor
    batches: list[Batch]


class Trace:
    """What a term saw of a run."""

    def __init__(self, meddle: Callable[[Context], object] | None = None) -> None:
        self.meddle = meddle
        self.context: Context | None = None
        self.epochs: list[Epoch] = []
        self.model: AdaptedModel | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """The logged figures of each epoch of steps."""
        assert self.model is not None
        return [record for record in self.model.history["records"] if "loss" in record]


@dataclass
class Spy(Term):
    def start(self, context: Context) -> None:
        self.trace.context = context

    def refresh(self, outputs: Outputs) -> None:
        if self.trace.meddle is not None:
            self.trace.meddle(self.context)
        guidance = self.context.guidance
        self.trace.epochs.append(
            Epoch(outputs, guidance.weights.clone(), guidance.known.clone(), [])
        )

    def __call__(self, batch: Batch) -> Tensor:
        self.trace.epochs[-1].batches.append(
            dataclasses.replace(
                batch, features=batch.features.detach(), logits=batch.logits.detach()
            )
        )
        return batch.logits.new_zeros(())


@contextlib.contextmanager
def spied_method(method: str, trace: Trace) -> Iterator[str]:
    """The name of the method with a spy in its row."""
    row = METHODS[method]
    spy = Spy()
    spy.trace = trace
    METHODS.add(dataclasses.replace(row, name="spied", terms=(*row.terms, spy)))
    try:
        yield "spied"
    finally:
        del METHODS["spied"]


def spied_run(
    source: SourceModel,
    method: str,
    *,
    meddle: Callable[[Context], object] | None = None,
    **settings: Any,
) -> Trace:
    """A run of the method, one batch of all 36 images an epoch, and what its terms saw. `meddle` may write into the
    tables of the guidance after each pass."""
    trace = Trace(meddle)
    given = {"epochs": 1, "batch_size": 36, "guard": False, **settings}
    with spied_method(method, trace) as name:
        trace.model = usfan.adapt(source, squares().without_labels(), name, **given)
    return trace


def exact_certainty(probs: Tensor) -> Tensor:
    """exp(−H), in float64."""
    probs = probs.double()
    return torch.exp((probs * probs.log()).sum(dim=1))
