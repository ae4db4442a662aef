"""The one loop that every stage runs: views → forward → sum of terms → backward → update, epoch by epoch.

A stage is a value (`Stage`): what is trainable, how long, how fast. Its loss is a sum of terms. A term is one small
module with two verbs:

    term.refresh(outputs)       after a pass over the data: new tables, in place
    term(batch) -> Tensor       its part of the loss of one batch, its weight included

A term that keeps one row per sample (a bank, pseudo-labels) allocates the rows once, in its constructor or `start`,
and writes into them: on a GPU the step is captured as a CUDA graph, which reads the same memory again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from usfan.engine.optimiser import Optimiser
from usfan.engine.passes import (
    Feeder,
    count_batches,
    epoch_batches,
    forward,
    set_mode,
    worth_compiling,
)
from usfan.engine.runtime import Runtime, permutation, seed_everything
from usfan.engine.stage import Stage
from usfan.engine.stepper import Stepper
from usfan.engine.stream import StreamOutputs
from usfan.models.classifier import Classifier
from usfan.threads import threads_for

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with (images seen, images in all, figures), each image once an epoch. At the end of an epoch the figures hold
`epoch` and `epochs`."""


@dataclass
class Batch:
    """Inputs and outputs of one step, as a term sees them."""

    samples: Tensor
    """B sample numbers, by which tables are read."""
    images: Tensor
    """B × … views, as the network takes them."""
    features: Tensor
    """B × D."""
    logits: Tensor
    """B × K."""
    done: Tensor
    """Share of the stage's steps that are done, a scalar."""
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]
    """(features, logits) of other views, for terms that make their own."""
    beside: tuple[Tensor, Tensor] | None = None
    """Sample numbers and logits of samples that went through the network beside the batch, if any."""
    second_view: Callable[[], Tensor] | None = None
    """Draws B × … further views of the same images; None for cached features."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Figures for the log, by name."""

    @property
    def probs(self) -> Tensor:
        return self.logits.softmax(dim=1)


class Term(Protocol):
    """One summand of the loss."""

    def refresh(self, outputs: Any) -> None: ...
    def __call__(self, batch: Batch) -> Tensor: ...


class Loop:
    """Trains a classifier on the views of a feeder, by a stage and its terms."""

    def __init__(
        self,
        classifier: Classifier,
        feeder: Feeder,
        stage: Stage,
        terms: Sequence[Term],
        runtime: Runtime,
        *,
        rows: Tensor | None = None,
        beside: Tensor | None = None,
        progress: Progress | None = None,
        stream: StreamOutputs | None = None,
    ) -> None:
        """`rows` are the samples to train on, all by default. `beside` are samples that go through the network beside
        every batch, at most half as many as it has at a time: only terms that request them see them. `stream` takes
        the outputs of each batch."""
        self.classifier = classifier
        self.feeder = feeder
        self.stage = stage
        self.runtime = runtime
        self.terms = list(terms)
        self.progress = progress
        self.stream = stream
        if rows is None:
            rows = torch.arange(len(feeder.store), device=runtime.device)
        self.rows = rows
        self.beside = rows[:0] if beside is None else beside.to(runtime.device)
        self.batches = count_batches(len(self.rows), stage.batch_size)
        self.steps = self.batches * stage.epochs
        self.compiled = worth_compiling(runtime, self.steps)
        layers = [p for term in self.terms for p in getattr(term, "parameters", list)()]
        self.optimiser = Optimiser(classifier, stage, self.steps, runtime, layers)
        self.stepper = Stepper(self.step, runtime, self.steps)
        self.done = torch.zeros((), device=runtime.device)
        self.names: tuple[str, ...] = ()

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """The mean of each noted figure over the epoch, the learning rate and the seconds."""
        seed_everything(self.stage.seed, epoch, part=self.runtime.rank)
        set_mode(self.classifier, self.stage.tune)
        sums: Tensor | float = 0.0
        started = time.perf_counter()
        lr = 0.0
        with threads_for(self.multiplications):
            for number, samples in enumerate(self.epoch_samples(epoch)):
                done = epoch * self.batches + number
                lr = self.optimiser.schedule(done)
                self.done.fill_(done / self.steps)
                beside = self.samples_beside(epoch, number)
                inputs = self.feeder.inputs(torch.cat([samples, beside]))
                sums = sums + self.stepper(*inputs)
                images = min((number + 1) * self.stage.batch_size, len(self.rows))
                self.show(epoch, {"lr": lr}, images)
        figures = {}
        if isinstance(sums, Tensor):
            means = (sums / self.batches).tolist()
            figures = dict(zip(self.names, means, strict=True))
        seconds = round(time.perf_counter() - started, 4)
        return {**figures, "lr": lr, "seconds": seconds}

    def epoch_samples(self, epoch: int) -> Iterator[Tensor]:
        """This process's samples of each batch."""
        self.feeder.epoch.fill_(epoch)
        if self.stream is not None:
            self.stream.begin_epoch()
        batches = epoch_batches(
            len(self.rows), self.stage.batch_size, self.stage.seed, epoch, self.runtime
        )
        for rows in batches:
            yield self.rows[rows]

    @property
    def multiplications(self) -> float:
        """Of the largest operation in a step on features; a network on pixels always counts as large."""
        if not self.feeder.store.is_features:
            return math.inf
        sizes = [p.numel() for p in self.optimiser.parameters]
        return self.stage.batch_size * max(sizes, default=0)

    def tell(self, epoch: int, figures: dict[str, Any]) -> None:
        """Report that `epoch` epochs of this stage are done, with the figures of the last one."""
        numbers = {k: v for k, v in figures.items() if isinstance(v, (int, float))}
        self.show(epoch, numbers | {"epoch": epoch, "epochs": self.stage.epochs})

    def show(self, epochs: int, figures: dict[str, float], images: int = 0) -> None:
        """Progress after so many epochs, and so many images of the next one."""
        if self.progress is not None:
            count = len(self.rows)
            self.progress(epochs * count + images, self.stage.epochs * count, figures)

    def samples_beside(self, epoch: int, number: int) -> Tensor:
        """This process's share of the samples that go beside a batch; they take turns."""
        count = len(self.beside)
        at_once = self.count_beside
        if not at_once:
            return self.beside
        order = permutation(count, self.stage.seed, (1 << 21) + epoch).to(self.beside.device)
        turn = number * at_once + torch.arange(at_once, device=order.device)
        samples = self.beside[order[turn % count]]
        return samples[self.runtime.rank :: self.runtime.world]

    @property
    def count_beside(self) -> int:
        """How many samples go beside each global batch."""
        return min(len(self.beside), max(1, self.stage.batch_size // 2))

    def step(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        """One update: view → forward → loss → backward → update."""
        size = len(samples) - len(
            range(self.runtime.rank, self.count_beside, self.runtime.world)
        )
        compiled = self.compiled and size == self.stage.batch_size
        view = self.feeder.view(samples, staged)
        features, logits = forward(self.classifier, view, self.runtime, compiled=compiled)
        if self.stream is not None:
            self.stream.write(samples[:size], features[:size], logits[:size])

        def further_views() -> Tensor:
            pixels = None if staged is None else staged[:size]
            return self.feeder.view(samples[:size], pixels, again=True)

        batch = Batch(
            samples[:size],
            view[:size],
            features[:size],
            logits[:size],
            self.done,
            self.forward,
            (samples[size:], logits[size:]),
            None if self.feeder.store.is_features else further_views,
        )
        loss = torch.zeros((), device=self.runtime.device)
        for term in self.terms:
            loss = loss + term(batch)
        self.optimiser.update(loss)
        figures = {"loss": loss, **batch.notes}
        self.names = tuple(figures)
        return torch.stack([figures[name].detach() for name in self.names])

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return forward(self.classifier, images, self.runtime)

    @torch.no_grad()
    def settle(self, batches: int = 1) -> None:
        """Forward passes in training mode, whole epochs of `batches` or more: BatchNorm takes the statistics of these
        images, except in a backbone that is frozen."""
        seed_everything(self.stage.seed, 0, part=self.runtime.rank)
        set_mode(self.classifier, "new" if self.stage.tune == "new" else "norm")
        for epoch in range(-(-batches // max(1, self.batches))):
            for samples in self.epoch_samples(epoch):
                outputs = self.forward(self.feeder.view(*self.feeder.inputs(samples)))
                if self.stream is not None:
                    self.stream.write(samples, *outputs)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint: the network and the momentum."""
        network = {f"model.{k}": v for k, v in self.classifier.state_dict().items()}
        stream = {} if self.stream is None else self.stream.tensors()
        return network | self.optimiser.tensors() | stream

    def restore(self, tensors: dict[str, Tensor]) -> None:
        network = {k[6:]: v for k, v in tensors.items() if k.startswith("model.")}
        self.classifier.load_state_dict(network)
        self.optimiser.restore(tensors)
        if self.stream is not None:
            self.stream.restore(tensors)

    def release(self) -> None:
        """No more steps: captured graphs are freed."""
        self.stepper.release()
