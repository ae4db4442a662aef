"""Stage 2, the one loop: adapt the extractor to unlabelled images, the head stays frozen. The loss is in `loss.py`.

It receives a model, its posterior and images. It cannot receive source data, and drops labels at the door.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.guard import Guard, Kept
from usfan.adaptation.guidance import Guidance
from usfan.adaptation.loss import LOSSES, Objective
from usfan.adaptation.methods import Method, find_method
from usfan.adaptation.settings import begun_with, choose_posterior, chosen_settings, resolve_defaults
from usfan.artifacts.model import AdaptedModel, Passes, SourceModel, as_images
from usfan.artifacts.schema import check_draws
from usfan.compute.optimiser import Optimiser
from usfan.compute.passes import (
    Feeder,
    after_steps,
    count_batches,
    engine_store,
    epoch_batches,
    forward,
    forward_store,
    prepare,
    replayed_pass,
    set_mode,
    speed_up,
    worth_compiling,
)
from usfan.compute.runtime import Runtime, seed_everything, start_runtime
from usfan.compute.stepper import Stepper
from usfan.config import AdaptConfig, RuntimeConfig, make_config
from usfan.data.cache import PixelStore
from usfan.errors import DataError
from usfan.models.classifier import Classifier
from usfan.runs.folder import RunFolder, checked_records, load_checkpoint, must_fit
from usfan.scoring.outputs import Outputs, check_finite
from usfan.scoring.unknown import split_unknown
from usfan.scoring.validators import validate

log = logging.getLogger(__name__)

Progress = Callable[[int, int, dict[str, float]], None]


def adapt(
    source: SourceModel,
    data: Any,
    method: str = "u-sfan",
    *,
    runtime: RuntimeConfig | Runtime | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> AdaptedModel:
    """Adapt to images (an `ImageData`, a folder, an array…). `settings` are fields of `usfan.config.AdaptConfig`."""
    given = make_config(AdaptConfig, {"method": method, **settings})
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    begun = None if run is None else run.load_checkpoint(tensors=False)
    check_draws(given.samples, len(source.classes))
    config = resolve_defaults(given if begun is None else begun_with(given, begun[2]), source)
    if isinstance(data, PixelStore):
        store = dataclasses.replace(data, labels=None, classes=None)
    else:
        store = engine_store(as_images(data).without_labels(), source.spec, engine)
    if len(store) < 2 and find_method(config.method).adapts:
        raise DataError(f"one image is too few to adapt to: {config.method} compares images with each other")
    return Adaptation(source, store, config, engine, run, progress).run()


@functools.cache
def warn_once(message: str) -> None:
    """A study of many runs on one target says it once."""
    log.warning(message)


class Adaptation:
    """The state of one run of stage 2."""

    def __init__(
        self,
        source: SourceModel,
        store: PixelStore,
        config: AdaptConfig,
        runtime: Runtime,
        run: RunFolder | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.source, self.store, self.config, self.runtime = source, store, config, runtime
        self.folder, self.progress = run, progress
        self.method: Method = find_method(config.method)
        self.epochs = config.epochs if self.method.adapts else 0
        self.batches = count_batches(len(store), config.batch_size)
        self.steps = self.batches * self.epochs
        self.compiled = worth_compiling(runtime, self.steps)
        self.classifier = self.source_copy()
        self.classifier.head.requires_grad_(False)
        self.posterior = choose_posterior(source.posterior, config).to(runtime.device)
        self.optimiser = Optimiser(self.classifier, config, self.steps, runtime, head=False)
        views = dataclasses.replace(source.spec, augment=config.augment or source.spec.augment)
        self.feeder = Feeder(store, views, config.seed, runtime)
        self.guidance = Guidance.empty(len(store), len(source.classes), runtime.device)
        beta = torch.zeros((), device=runtime.device)
        self.objective = Objective(config, self.method, self.guidance, self.posterior, runtime, beta)
        self.stepper = Stepper(self.step, runtime, self.steps, self.classifier)
        self.replay = replayed_pass(self.classifier, store, source.spec, runtime, self.steps)
        self.guard = Guard(enabled=config.guard, partial=config.partial_set, neighbourly=not config.open_set)
        self.warning: str | None = None
        self.records: list[dict[str, Any]] = []
        self.path: list[Tensor] = []

    def run(self) -> AdaptedModel:
        started = time.perf_counter()
        first = self.resume()
        before: Outputs | None = None
        for epoch in range(first, self.epochs):
            outputs = self.refresh(epoch)
            before = outputs if epoch == 0 else before
            if self.guard.collapsed:
                break
            if epoch == 0 and self.objective.separation:
                self.settle_statistics()
            self.train_epoch(epoch)
        else:
            outputs = self.refresh(self.epochs)
            before = outputs if self.epochs == 0 else before
        kept = self.guard.finish()
        if kept.epoch != self.guard.latest:
            self.classifier.load_state_dict(kept.state or self.source.classifier.state_dict())
            outputs = self.outputs()
        if before is None:
            before = self.outputs(self.source_copy())
        for stepper in filter(None, (self.stepper, self.replay)):
            stepper.release()
        return self.finished(kept, before, outputs, time.perf_counter() - started)

    def finished(self, kept: Kept, before: Outputs, after: Outputs, seconds: float) -> AdaptedModel:
        history = {
            "method": self.config.method,
            "epochs": self.epochs,
            "kept_epoch": kept.epoch,
            "guard": {"on": self.config.guard, "kept_epoch": kept.epoch, "reason": kept.reason},
            "warning": self.warning,
            "validators": self.guard.validators.get(kept.epoch, {}),
            "prior_precision": self.posterior.prior_precision,
            "chosen": chosen_settings(self.config),
            "seconds": round(seconds, 3),
            "records": self.records,
        }
        if self.folder is not None and self.runtime.rank == 0:
            self.folder.log("kept", epoch=kept.epoch, of=self.epochs, reason=kept.reason)
        rule = None
        if self.config.open_set:
            score = self.config.split or self.method.decision
            rule = split_unknown(after, score, recipe=self.config.preset == "paper")
        return AdaptedModel(
            after_steps(self.classifier, self.runtime),
            self.posterior,
            self.source.classes,
            self.source.spec,
            self.source.architecture,
            {k: v for k, v in history.items() if k not in ("records", "validators", "guard", "warning")},
            self.config.temperature,
            self.config.samples,
            self.config.method,
            rule,
            history,
            Passes(before, after, self.store.kept, tuple(self.store.skipped), tuple(self.path)),
        )

    def outputs(self, source: Classifier | None = None) -> Outputs:
        """One pass over the target, test views, BatchNorm in test mode; validators, weights, pseudo-labels share it."""
        classifier, replay = (self.classifier, self.replay) if source is None else (source, None)
        features, logits = forward_store(
            classifier, self.store, self.source.spec, self.runtime, compiled=self.compiled, replay=replay
        )
        probs, information = self.posterior.moments(features, self.config.temperature, self.config.samples)
        return Outputs(features, logits, logits.softmax(dim=1), probs, information)

    def source_copy(self) -> Classifier:
        copied = copy.deepcopy(self.source.classifier)
        copied = prepare(copied, self.source.spec, self.runtime, steps=self.method.adapts)
        speed_up(copied, self.runtime, self.steps)
        return copied

    def refresh(self, epoch: int) -> Outputs:
        """Look at the target after `epoch` epochs: judge this iterate, and guide the next epoch."""
        outputs = self.outputs()
        if epoch == 0:
            check_finite(outputs.logits, outputs.posterior_probs)
        if bool(torch.isfinite(outputs.logits).all() & torch.isfinite(outputs.posterior_probs).all()):
            done = min(epoch, self.epochs - 1) / max(1, self.epochs)  # what the end says is of the last epoch
            self.guidance.refresh(outputs, self.method, self.config, done)  # else the guard sees it, or the end does
        source = self.guard.source
        if source is None:
            source = outputs if epoch == 0 else self.outputs(self.source_copy())
            self.guard.see_source(source)
            self.warn_of_missing_classes(source)
        figures = validate(
            outputs.probs,
            outputs.features,
            source_probs=source.probs,
            source_posterior_probs=source.posterior_probs,
            source_neighbours=self.guard.neighbours(),
            posterior_probs=outputs.posterior_probs,
        )
        if self.objective.separation:
            figures["information_maximization"] = self.guidance.known_information(outputs.probs)
        self.path.append(outputs.logits.argmax(dim=1).to(torch.int16))
        self.guard.consider(epoch, figures, outputs.probs, self.classifier)
        self.record(epoch, figures, outputs)
        return outputs

    def warn_of_missing_classes(self, outputs: Outputs) -> None:
        if self.config.partial_set or self.config.open_set or self.epochs == 0:
            return
        coverage = len(outputs.logits.argmax(dim=1).unique()) / outputs.logits.shape[1]
        self.warning = self.guard.missing_classes(coverage, *outputs.logits.shape)
        if self.warning is not None and self.runtime.rank == 0:
            warn_once(self.warning)

    @torch.no_grad()
    def settle_statistics(self) -> None:
        """BatchNorm takes the target's statistics before the first split: under the source's, known looks unknown."""
        seed_everything(self.config.seed, 0, part=self.runtime.rank)
        set_mode(self.classifier, training=True, batch_norm=self.config.batch_norm)
        for rows, _ in epoch_batches(len(self.store), self.config.batch_size, self.config.seed, 0, self.runtime):
            forward(self.classifier, self.feeder.view(*self.feeder.inputs(rows)), self.runtime)
        self.guidance.refresh(self.outputs(), self.method, self.config)

    def train_epoch(self, epoch: int) -> None:
        seed_everything(self.config.seed, epoch, part=self.runtime.rank)
        self.feeder.epoch.fill_(epoch)
        warming = epoch < (self.config.pseudo_label_warmup or 0)
        self.objective.pseudo_label_weight.fill_(0.0 if warming else self.config.pseudo_label_weight or 0.0)
        set_mode(self.classifier, training=True, batch_norm=self.config.batch_norm)
        sums = torch.zeros(len(LOSSES), device=self.runtime.device)
        started, lr = time.perf_counter(), 0.0
        batches = epoch_batches(len(self.store), self.config.batch_size, self.config.seed, epoch, self.runtime)
        for number, (rows, _) in enumerate(batches):
            done = epoch * self.batches + number
            lr = self.optimiser.schedule(done)
            sums += self.stepper(*self.feeder.inputs(rows))
            if self.progress is not None:
                self.progress(done + 1, self.steps, {"lr": lr})
        means = (sums / max(1, self.batches)).tolist()
        self.pending = {
            **dict(zip(LOSSES, means, strict=True)),
            "lr": lr,
            "seconds": round(time.perf_counter() - started, 4),
        }
        self.guard.loss_finite = all(abs(m) < float("inf") for m in means)

    def step(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        """One update: view → forward → weights → loss → backward → update."""
        whole = self.compiled and len(samples) == self.config.batch_size
        view = self.feeder.view(samples, staged, compiled=whole)
        features, logits = forward(self.classifier, view, self.runtime, compiled=whole)
        loss, figures = self.objective(samples, features, logits)
        self.optimiser.update(loss)
        return figures

    def record(self, epoch: int, validators: dict[str, float], outputs: Outputs) -> None:
        figures = {"epoch": epoch, **getattr(self, "pending", {}), "weight_mean": float(self.guidance.weights.mean())}
        figures["validators"] = validators
        self.records.append(figures)
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", **figures)
        self.folder.scalars({f"adapt/{k}": v for k, v in figures.items() if isinstance(v, float)}, epoch)
        self.folder.scalars({f"validators/{k}": v for k, v in validators.items()}, epoch)
        self.folder.histogram("adapt/weights", self.guidance.weights, epoch)
        if 0 < epoch < self.epochs:
            tensors = {f"model.{k}": v for k, v in self.classifier.state_dict().items()} | self.optimiser.tensors()
            tensors |= {f"guard.{k}": v for k, v in self.guard.tensors().items()}
            state = {"guard": self.guard.state(), "records": self.records, "chosen": chosen_settings(self.config)}
            self.folder.save_checkpoint(epoch, tensors, state)

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run folder; the epoch to begin with."""
        found = load_checkpoint(self.folder, self.runtime)
        if found is None:
            return 0
        epoch, tensors, state = found
        assert self.folder is not None
        with self.folder.restoring():
            self.classifier.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
            momentum = {k: v.to(self.runtime.device) for k, v in tensors.items() if k.startswith("momentum.")}
            self.optimiser.restore(momentum)
            self.guard.restore({k[6:]: v for k, v in tensors.items() if k.startswith("guard.")}, state["guard"])
            must_fit(self.guard.best_state or {}, self.classifier)
            *self.records, last = checked_records(state["records"])
            self.pending = {k: v for k, v in last.items() if k not in ("epoch", "validators", "weight_mean")}
        return epoch
