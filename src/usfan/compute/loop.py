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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from usfan.compute.optimiser import Optimiser
from usfan.compute.passes import Feeder, count_batches, epoch_batches, forward, set_mode, worth_compiling
from usfan.compute.runtime import Runtime, permutation, seed_everything
from usfan.compute.stage import Stage
from usfan.compute.stepper import Stepper
from usfan.models.classifier import Classifier
from usfan.threads import threads_for

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with (steps done, steps in all, figures). The figures hold `images` seen and `images_in_all`, each image once
an epoch; at the end of an epoch `epoch` and `epochs` too."""


@dataclass
class Batch:
    """What a term sees of one step."""

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
    ) -> None:
        """`rows` are the samples to train on, all by default. `beside` are samples that go through the network beside
        every batch, at most half as many as it has at a time: only terms that request them see them."""
        self.classifier, self.feeder, self.stage, self.runtime = classifier, feeder, stage, runtime
        self.terms, self.progress = list(terms), progress
        self.rows = torch.arange(len(feeder.store), device=runtime.device) if rows is None else rows
        self.beside = None if beside is None else beside.to(runtime.device)
        self.at_once = 0 if beside is None else min(len(beside), max(1, stage.batch_size // 2))
        self.batches = count_batches(len(self.rows), stage.batch_size)
        self.steps = self.batches * stage.epochs
        self.compiled = worth_compiling(runtime, self.steps)
        own = [p for term in self.terms for p in getattr(term, "parameters", list)()]
        self.optimiser = Optimiser(classifier, stage, self.steps, runtime, own)
        self.stepper = Stepper(self.step, runtime, self.steps, classifier)
        self.done = torch.zeros((), device=runtime.device)
        self.names: tuple[str, ...] = ()

    def train_epoch(self, epoch: int) -> dict[str, float]:
        """The mean of each noted figure over the epoch, the learning rate and the seconds."""
        stage = self.stage
        seed_everything(stage.seed, epoch, part=self.runtime.rank)
        self.feeder.epoch.fill_(epoch)
        set_mode(self.classifier, stage.tune)
        sums: Tensor | None = None
        started, lr = time.perf_counter(), 0.0
        batches = epoch_batches(len(self.rows), stage.batch_size, stage.seed, epoch, self.runtime)
        with threads_for(self.multiplications):
            for number, (rows, _) in enumerate(batches):
                done = epoch * self.batches + number
                lr = self.optimiser.schedule(done)
                self.done.fill_(done / max(1, self.steps))
                figures = self.stepper(*self.feeder.inputs(self.with_beside(self.rows[rows], epoch, number)))
                sums = figures if sums is None else sums + figures
                if self.progress is not None:
                    self.progress(done + 1, self.steps, {"lr": lr, **self.seen(epoch, number + 1)})
        means = [] if sums is None else (sums / max(1, self.batches)).tolist()
        noted = dict(zip(self.names, means, strict=True))
        return {**noted, "lr": lr, "seconds": round(time.perf_counter() - started, 4)}

    @property
    def multiplications(self) -> float:
        """Of the largest operation in a step on features; a network on pixels always counts as large."""
        if self.feeder.store.pixels.ndim != 2:
            return math.inf
        return self.stage.batch_size * max((p.numel() for p in self.optimiser.parameters), default=0)

    def tell(self, epoch: int, figures: dict[str, Any]) -> None:
        """Report that `epoch` epochs of this stage are done, with the figures of the last one."""
        if self.progress is not None:
            shown = {name: value for name, value in figures.items() if isinstance(value, (int, float))}
            shown |= {"epoch": epoch, "epochs": self.stage.epochs, **self.seen(epoch)}
            self.progress(epoch * self.batches, self.steps, shown)

    def with_beside(self, samples: Tensor, epoch: int, number: int) -> Tensor:
        """The samples of a batch, and after them this process's share of those beside it, which take turns."""
        if self.beside is None:
            return samples
        count = len(self.beside)
        order = permutation(count, self.stage.seed, (1 << 21) + epoch).to(samples.device)
        turn = (number * self.at_once + torch.arange(self.at_once, device=samples.device)) % count
        own = self.beside[order[turn]][self.runtime.rank :: self.runtime.world]
        return torch.cat([samples, own.to(samples.device)])

    @property
    def own_beside(self) -> int:
        """How many of the samples that this process steps on lie beside the batch."""
        return len(range(self.at_once)[self.runtime.rank :: self.runtime.world])

    def seen(self, epochs: int, batches: int = 0) -> dict[str, int]:
        """Images seen after this many epochs and batches, without those that only fill up the last batch."""
        count = len(self.rows)
        last = min(batches * self.stage.batch_size, count)
        return {"images": epochs * count + last, "images_in_all": self.stage.epochs * count}

    def step(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        """One update: view → forward → loss → backward → update."""
        size = len(samples) - self.own_beside
        whole = self.compiled and size == self.stage.batch_size
        view = self.feeder.view(samples, staged, compiled=whole)
        features, logits = forward(self.classifier, view, self.runtime, compiled=whole)
        beside = None if self.beside is None else (samples[size:], logits[size:])
        samples, view, features, logits = samples[:size], view[:size], features[:size], logits[:size]
        batch = Batch(samples, view, features, logits, self.done, self.forward, beside)
        loss = sum((term(batch) for term in self.terms), torch.zeros((), device=self.runtime.device))
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
            self.feeder.epoch.fill_(epoch)
            for rows, _ in epoch_batches(len(self.rows), self.stage.batch_size, self.stage.seed, epoch, self.runtime):
                self.forward(self.feeder.view(*self.feeder.inputs(self.rows[rows])))

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs to continue: the network and the momentum."""
        return {f"model.{k}": v for k, v in self.classifier.state_dict().items()} | self.optimiser.tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.classifier.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        self.optimiser.restore({k: v.to(self.runtime.device) for k, v in tensors.items() if k.startswith("momentum.")})

    def release(self) -> None:
        """No more steps: captured graphs are freed."""
        self.stepper.release()
