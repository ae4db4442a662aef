"""Stage 1: train the source classifier (Eq. 1), then fit the posterior of its last layer in one pass."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import (
    BackboneAlone,
    features_of,
    is_streamed,
    on_features,
    streamed_features,
)
from usfan.engine.loop import Batch, Loop, Progress
from usfan.engine.passes import Feeder, engine_store, forward_store, prepare
from usfan.engine.runtime import Runtime, permutation, seed_everything, start_runtime
from usfan.engine.stage import Stage
from usfan.errors import DataError, option
from usfan.maths.objectives import global_mean, smoothed_cross_entropy
from usfan.maths.outputs import Outputs
from usfan.models.backbones import Backbone, create_backbone, default_backbone
from usfan.models.classifier import LAYER_SETTINGS, Classifier, settle_layout
from usfan.progress import say
from usfan.store.model import SourceModel, as_images
from usfan.store.run_folder import RunFolder, load_checkpoint, must_fit
from usfan.store.schema import check_names
from usfan.training.class_order import check_order
from usfan.uncertainty.base import FitSettings, Uncertainty
from usfan.uncertainty.fit import batch_factors
from usfan.uncertainty.kronecker import KroneckerPosterior
from usfan.uncertainty.registry import find_uncertainty

log = logging.getLogger(__name__)

FIT_SETTINGS = (
    "uncertainty",
    "prior",
    "damping",
    "curvature",
    "weight_decay",
    "members",
    "seed",
)
VALIDATIONS = 10
"""How often the held-out part is scored in a training."""


def train_source(
    data: Any,
    *,
    runtime: RuntimeConfig | Runtime | None = None,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> SourceModel:
    """Train on labelled images. `settings` are the fields of `usfan.config.TrainConfig`."""
    runtime = start_runtime(runtime)
    config = make_config(TrainConfig, settings)
    images = data if isinstance(data, Store) else as_images(data)
    classes = check_labelled(images)
    seed_everything(config.seed)
    name = config.backbone or default_backbone(config.pretrained)
    config = dataclasses.replace(config, backbone=name)
    backbone = create_backbone(name, config.pretrained)
    config = resolve_defaults(config, backbone)
    spec = backbone.spec
    if config.augment is not None:
        spec = dataclasses.replace(spec, augment=config.augment)
    layers = {name: getattr(config, name) for name in LAYER_SETTINGS}
    architecture = {"backbone": config.backbone, **layers, "pretrained": backbone.weights}
    network = Classifier(backbone.module, backbone.features, len(classes), **layers)
    network = prepare(network, spec, runtime, steps=True)
    alone = BackboneAlone.of(network)
    if config.tune == "new" and is_streamed(images, runtime):
        (store,), _ = streamed_features([(alone, spec)], images, spec, runtime, torch.arange(0))
    else:
        store = engine_store(images, spec, runtime)
    check_counts(store.labels, classes)
    classifier = network
    if config.tune == "new":
        classifier = on_features(network)
        if not store.is_features:
            store = features_of(alone, store, spec, runtime)
    summary = Training(classifier, store, spec, config, runtime, run, progress).run()
    if classifier is not network:
        settle_layout(network, runtime.device)
    settings = {name: getattr(config, name) for name in FIT_SETTINGS}
    settings |= {"dropout_rate": config.dropout, "smoothing": config.label_smoothing}
    posterior, uncertainty = fit_posterior(
        classifier, store, spec, runtime, FitSettings(**settings)
    )
    summary["prior_precision"] = posterior.prior_precision
    return SourceModel(
        network, posterior, classes, spec, architecture, summary, uncertainty=uncertainty
    )


def resolve_defaults(config: TrainConfig, backbone: Backbone) -> TrainConfig:
    """Settings that were left open, decided from the network: whether it starts from pretrained weights, and what it
    brings along (its dropout)."""
    tune = config.tune
    if tune == "auto":
        tune = "all" if backbone.weights is None or not config.bottleneck else "new"
        origin = (backbone.weights or {"from": "random"})["from"]
        log.info("%s starts from %s weights: tune %s", config.backbone, origin, tune)
    scale = config.backbone_lr_scale
    if scale is None:
        scale = 1.0 if backbone.weights is None else 0.1
    uncertainty = find_uncertainty(config.uncertainty)
    dropout = uncertainty.training_dropout(config.dropout, backbone.dropout, config.bottleneck)
    return dataclasses.replace(config, tune=tune, backbone_lr_scale=scale, dropout=dropout)


def check_labelled(data: ImageData | Store) -> tuple[str, ...]:
    if len(data) == 0:
        raise DataError("no images to train on")
    if data.labels is None or data.classes is None:
        raise DataError(
            "no labels: a source model is trained on class/*.jpg folders or a list with labels"
        )
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


@dataclass
class Supervised:
    """Eq. 1: cross-entropy with smoothed labels, the one term of stage 1."""

    labels: Tensor
    smoothing: float
    runtime: Runtime

    def refresh(self, outputs: Outputs) -> None:
        """Labels do not change."""

    def __call__(self, batch: Batch) -> Tensor:
        losses = smoothed_cross_entropy(
            batch.logits, self.labels[batch.samples], self.smoothing
        )
        return global_mean(losses, self.runtime.total_or_alone)


@dataclass(frozen=True)
class Best:
    """Best accuracy on the held-out part, the last epoch that had it, and the first."""

    accuracy: float = -1.0
    epoch: int = 0
    rose: int = 0


@dataclass
class Training:
    """The state of one run of stage 1. `run` leaves the best iterate in the classifier and gives the summary."""

    classifier: Classifier
    store: Store
    spec: InputSpec
    config: TrainConfig
    runtime: Runtime
    folder: RunFolder | None = None
    progress: InitVar[Progress | None] = None

    def __post_init__(self, progress: Progress | None) -> None:
        config = self.config
        store = self.store
        runtime = self.runtime
        order = permutation(len(store), config.seed, 1 << 20).to(runtime.device)
        held_out = round(config.validation_share * len(store))
        self.held_rows = order[:held_out]
        train_rows = order[held_out:]
        if len(train_rows) < 2:
            raise DataError(
                f"{len(train_rows)} images are left to train on: give more, or lower validation_share"
            )
        self.labels = store.labels.to(runtime.device)  # type: ignore[union-attr]
        self.loop = Loop(
            self.classifier,
            Feeder(store, self.spec, config.seed, runtime),
            Stage.of(config, head=True),
            [Supervised(self.labels, config.label_smoothing, runtime)],
            runtime,
            rows=train_rows,
            progress=progress,
        )
        self.best = Best()
        self.best_state: dict[str, Tensor] = {}

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        config = self.config
        done = 0
        try:
            done = self.resume()
            for epoch in range(done, config.epochs):
                if self.has_stalled(epoch):
                    break
                done = epoch + 1
                figures = self.loop.train_epoch(epoch)
                is_due = done % self.every == 0 or done == config.epochs
                if len(self.held_rows) and is_due:
                    figures["validation_accuracy"] = self.validate(epoch)
                self.record(epoch, figures)
        finally:
            self.loop.release()
        settle_layout(self.classifier, self.runtime.device)
        if self.best_state:
            self.classifier.load_state_dict(self.best_state)
        if done < config.epochs:
            say(
                f"stopped after epoch {done} of {config.epochs}: no better on the held-out images for "
                f"{config.patience} epochs; epoch {self.best.epoch} is kept ({option('patience', 0)} trains all)"
            )
        return {
            "epochs": done,
            "seed": config.seed,
            "tune": config.tune,
            "weight_decay": config.weight_decay,
            "validation_accuracy": self.best.accuracy if self.best_state else None,
            "best_epoch": self.best.epoch if self.best_state else done,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def has_stalled(self, done: int) -> bool:
        """Whether the accuracy on the held-out part has not risen for `patience` epochs, and for two scores at least:
        pixels are not scored every epoch."""
        patience = self.config.patience
        if not patience or not self.best_state:
            return False
        return done - self.best.rose >= max(patience, 2 * self.every)

    @property
    def every(self) -> int:
        """Epochs from one score on the held-out part to the next; features are scored at once."""
        return 1 if self.store.is_features else max(1, self.config.epochs // VALIDATIONS)

    def validate(self, epoch: int) -> float:
        """Percent right on the held-out part; the best iterate is kept, the later of equals."""
        _, logits = forward_store(
            self.classifier, self.store, self.spec, self.runtime, rows=self.held_rows
        )
        right = logits.argmax(dim=1) == self.labels[self.held_rows]
        accuracy = 100 * float(right.double().mean())
        if accuracy >= self.best.accuracy:
            rose = epoch + 1 if accuracy > self.best.accuracy else self.best.rose
            self.best = Best(accuracy, epoch + 1, rose)
            state = self.classifier.state_dict()
            self.best_state = {k: v.detach().clone() for k, v in state.items()}
        return accuracy

    def record(self, epoch: int, figures: dict[str, float]) -> None:
        self.loop.tell(epoch + 1, figures)
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", epoch=epoch + 1, **figures)
        self.folder.scalars({f"train/{k}": v for k, v in figures.items()}, epoch + 1)
        tensors = self.loop.tensors() | {f"best.{k}": v for k, v in self.best_state.items()}
        self.folder.save_checkpoint(epoch + 1, tensors, {"best": dataclasses.asdict(self.best)})

    def resume(self) -> int:
        """Continue from the newest checkpoint of the run folder; returns the epoch to start with."""
        checkpoint = load_checkpoint(self.folder, self.runtime)
        if checkpoint is None:
            return 0
        epoch, tensors, state = checkpoint
        assert self.folder is not None
        with self.folder.restoring():
            self.loop.restore(tensors)
            self.best_state = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
            best = state["best"]
            self.best = Best(float(best["accuracy"]), int(best["epoch"]), int(best["rose"]))
            must_fit(self.best_state, self.classifier)
        return epoch


def fit_posterior(
    classifier: Classifier,
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    settings: FitSettings,
    progress: Callable[[int], None] | None = None,
    names: Sequence[str] | None = None,
) -> tuple[KroneckerPosterior, Uncertainty]:
    """Fit the posterior and the uncertainty in use in one pass over all the data: test views, BatchNorm in test mode.
    Labels that say that `names` are in another order than the network's outputs are refused before the fit."""
    name = settings.uncertainty
    kind = find_uncertainty(name)
    if kind.needs_source_data and store.labels is None:
        raise DataError(f"uncertainty {name} is trained on labels, and the data has none")
    features, logits = forward_store(classifier, store, spec, runtime, progress=progress)
    if names is not None:
        check_order(logits, store.labels, names)
    weight, bias = classifier.head_tensors()
    labels = None if store.labels is None else store.labels.to(features.device)
    factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
    posterior = KroneckerPosterior.from_factors(
        factors,
        weight,
        bias,
        settings.prior,
        weight_decay=settings.weight_decay,
        damping=settings.damping,
        curvature=settings.curvature,
    )
    return posterior, kind.from_posterior(posterior, settings, features, labels)
