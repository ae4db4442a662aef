"""Stage 1: train the source classifier (Eq. 1), then fit the posterior of its last layer in one pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.artifacts.model import SourceModel, as_images
from usfan.artifacts.schema import check_names
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
    set_mode,
    speed_up,
    worth_compiling,
)
from usfan.compute.runtime import Runtime, permutation, seed_everything, start_runtime
from usfan.compute.stepper import Stepper
from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.data.cache import PixelStore
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.errors import DataError
from usfan.models.backbones import create_backbone
from usfan.models.classifier import Classifier
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.fit import batch_factors
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.runs.folder import RunFolder, load_checkpoint, must_fit
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy

log = logging.getLogger(__name__)

VALIDATIONS = 10
"""How often the held-out part is scored in a training."""

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with (steps done, steps in all, figures)."""


def train_source(
    data: Any,
    *,
    runtime: RuntimeConfig | Runtime | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> SourceModel:
    """Train on labelled images. `settings` are the fields of `usfan.config.TrainConfig`."""
    config = resolve_defaults(make_config(TrainConfig, settings))
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    data = data if isinstance(data, PixelStore) else as_images(data)
    classes = check_labelled(data)
    seed_everything(config.seed)
    backbone, features, spec = create_backbone(config.backbone, config.pretrained)
    if config.augment is not None:
        spec = InputSpec(**{**vars(spec), "augment": config.augment})
    architecture = {
        "backbone": config.backbone,
        "bottleneck": config.bottleneck,
        "dropout": config.dropout,
        "head_bias": config.head_bias,
        "head_norm": config.head_norm,
    }
    options: dict[str, Any] = {k: v for k, v in architecture.items() if k != "backbone"}
    classifier = prepare(Classifier(backbone, features, len(classes), **options), spec, engine, steps=True)
    store = engine_store(data, spec, engine)
    check_counts(store.labels, classes)
    summary = Training(classifier, store, spec, config, engine, run, progress).run()
    classifier = after_steps(classifier, engine)
    posterior = fit_posterior(
        classifier, store, spec, engine, config.prior, weight_decay=config.weight_decay, damping=config.damping
    )
    summary["prior_precision"] = posterior.prior_precision
    return SourceModel(classifier, posterior, classes, spec, architecture, summary)


def resolve_defaults(config: TrainConfig) -> TrainConfig:
    """The settings that depend on the backbone."""
    import dataclasses

    small = config.backbone in SMALL_BACKBONES
    scale = (1.0 if small else 0.1) if config.backbone_lr_scale is None else config.backbone_lr_scale
    dropout = (0.5 if config.backbone in ("lenet", "dtn") else 0.0) if config.dropout is None else config.dropout
    return dataclasses.replace(config, backbone_lr_scale=scale, dropout=dropout)


def check_labelled(data: ImageData | PixelStore) -> tuple[str, ...]:
    if len(data) == 0:
        raise DataError("no images to train on")
    if data.labels is None or data.classes is None:
        raise DataError("no labels: a source model is trained on class/*.jpg folders or a list with labels")
    if len(data.classes) < 2:
        raise DataError(f"one class only ({data.classes[0]}); a classifier needs at least two")
    check_names(data.classes)
    check_counts(data.labels, data.classes)
    return tuple(data.classes)


def check_counts(labels: Tensor | None, classes: tuple[str, ...]) -> None:
    if labels is None:
        raise DataError("no labels")
    counts = torch.bincount(labels.cpu(), minlength=len(classes))
    empty = [classes[i] for i in (counts == 0).nonzero().flatten().tolist()]
    if empty:
        raise DataError(
            f"no image of class {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''}: add some, or take it out"
        )


class Training:
    """The state of one run of stage 1. `run` leaves the best iterate in the classifier and gives the summary."""

    def __init__(
        self,
        classifier: Classifier,
        store: PixelStore,
        spec: InputSpec,
        config: TrainConfig,
        runtime: Runtime,
        folder: RunFolder | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.classifier, self.store, self.spec, self.config, self.runtime = classifier, store, spec, config, runtime
        self.folder, self.progress = folder, progress
        order = permutation(len(store), config.seed, 1 << 20)
        held = round(config.validation_share * len(store))
        self.held_rows, self.train_rows = order[:held].to(runtime.device), order[held:].to(runtime.device)
        if len(self.train_rows) < 2:
            raise DataError(f"{len(self.train_rows)} images are left to train on: give more, or lower validation_share")
        self.labels = store.labels.to(runtime.device)  # type: ignore[union-attr]
        self.batches = count_batches(len(self.train_rows), config.batch_size)
        self.steps = self.batches * config.epochs
        self.optimiser = Optimiser(classifier, config, self.steps, runtime, head=True)
        self.feeder = Feeder(store, spec, config.seed, runtime)
        self.compiled = worth_compiling(runtime, self.steps)
        speed_up(classifier, runtime, self.steps)
        self.stepper = Stepper(self.step, runtime, self.steps, self.classifier)
        self.best: dict[str, Any] = {"accuracy": -1.0, "epoch": 0}
        self.best_state: dict[str, Tensor] = {}

    def run(self) -> dict[str, Any]:
        started, config = time.perf_counter(), self.config
        for epoch in range(self.resume(), config.epochs):
            figures = self.train_epoch(epoch)
            if len(self.held_rows) and self.validation_is_due(epoch):
                figures["validation_accuracy"] = self.validate(epoch)
            self.record(epoch, figures)
        self.stepper.release()
        if self.best_state:
            self.classifier.load_state_dict(self.best_state)
        held = bool(self.best_state)
        return {
            "epochs": config.epochs,
            "seed": config.seed,
            "weight_decay": config.weight_decay,
            "validation_accuracy": self.best["accuracy"] if held else None,
            "best_epoch": self.best["epoch"] if held else config.epochs,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def step(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        """One update: view → forward → loss (Eq. 1) → backward → update."""
        whole = self.compiled and len(samples) == self.config.batch_size
        view = self.feeder.view(samples, staged, compiled=whole)
        _, logits = forward(self.classifier, view, self.runtime, compiled=whole)
        losses = smoothed_cross_entropy(logits, self.labels[samples], self.config.label_smoothing)
        loss = global_mean(losses, self.runtime.total_or_alone)
        self.optimiser.update(loss)
        return loss.detach()

    def train_epoch(self, epoch: int) -> dict[str, float]:
        seed_everything(self.config.seed, epoch, part=self.runtime.rank)
        self.feeder.epoch.fill_(epoch)
        set_mode(self.classifier, training=True)
        started, losses = time.perf_counter(), torch.zeros((), device=self.runtime.device)
        order = epoch_batches(len(self.train_rows), self.config.batch_size, self.config.seed, epoch, self.runtime)
        for number, (rows, _) in enumerate(order):
            done = epoch * self.batches + number
            lr = self.optimiser.schedule(done)
            losses += self.stepper(*self.feeder.inputs(self.train_rows[rows]))
            if self.progress is not None:
                self.progress(done + 1, self.steps, {"lr": lr})
        return {"loss": float(losses) / max(1, self.batches), "seconds": round(time.perf_counter() - started, 4)}

    def validation_is_due(self, epoch: int) -> bool:
        every = max(1, self.config.epochs // VALIDATIONS)
        return (epoch + 1) % every == 0 or epoch + 1 == self.config.epochs

    def validate(self, epoch: int) -> float:
        """Percent right on the held-out part; the best iterate is kept, the later of equals."""
        _, logits = forward_store(self.classifier, self.store, self.spec, self.runtime, rows=self.held_rows)
        accuracy = 100 * float((logits.argmax(dim=1) == self.labels[self.held_rows]).double().mean())
        if accuracy >= self.best["accuracy"]:
            self.best = {"accuracy": accuracy, "epoch": epoch + 1}
            self.best_state = {k: v.detach().clone() for k, v in self.classifier.state_dict().items()}
        return accuracy

    def record(self, epoch: int, figures: dict[str, float]) -> None:
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", epoch=epoch + 1, **figures)
        self.folder.scalars({f"train/{k}": v for k, v in figures.items()}, epoch + 1)
        tensors = {f"model.{k}": v for k, v in self.classifier.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best_state.items()} | self.optimiser.tensors()
        self.folder.save_checkpoint(epoch + 1, tensors, {"best": self.best})

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run folder; the epoch to begin with."""
        found = load_checkpoint(self.folder, self.runtime)
        if found is None:
            return 0
        epoch, tensors, state = found
        assert self.folder is not None
        with self.folder.restoring():
            self.classifier.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
            self.best_state = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
            self.optimiser.restore(tensors)
            self.best = {"accuracy": float(state["best"]["accuracy"]), "epoch": int(state["best"]["epoch"])}
            must_fit(self.best_state, self.classifier)
        return epoch


def fit_posterior(
    classifier: Classifier,
    store: PixelStore,
    spec: InputSpec,
    runtime: Runtime,
    prior: float | str,
    *,
    weight_decay: float | None = None,
    damping: str = "exact",
    progress: Callable[[int], None] | None = None,
) -> KroneckerPosterior:
    """One pass over all the data, test views, BatchNorm in test mode."""
    features, logits = forward_store(classifier, store, spec, runtime, progress=progress)
    weight, bias = classifier.head_tensors()
    labels = None if store.labels is None else store.labels.to(features.device)
    factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
    return KroneckerPosterior.from_factors(factors, weight, bias, prior, weight_decay=weight_decay, damping=damping)
