"""Stage 1: train the source classifier (Eq. 1), then fit the posterior of its last layer in one pass."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from usfan.artifacts.model import SourceModel, as_images
from usfan.artifacts.schema import check_names
from usfan.compute.accelerate.layers import accelerated, settle_layout
from usfan.compute.features import FeatureStore, features_of, on_features
from usfan.compute.loop import Batch, Loop, Progress
from usfan.compute.passes import Feeder, engine_store, forward_store, prepare
from usfan.compute.runtime import Runtime, permutation, seed_everything, start_runtime
from usfan.compute.stage import Stage
from usfan.compute.step_memory import check_step_memory
from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.data.cache import PixelStore
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.errors import ConfigError, DataError
from usfan.models.backbones import Backbone, create_backbone
from usfan.models.classifier import Classifier
from usfan.posterior.ensemble import MEMBERS, Ensemble
from usfan.posterior.fit import batch_factors
from usfan.posterior.heads import UNTRAINED_RATE, Heads, MCDropout, PointEstimate
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.progress import say
from usfan.runs.folder import RunFolder, load_checkpoint, must_fit
from usfan.scoring.objectives import global_mean, smoothed_cross_entropy
from usfan.scoring.outputs import Outputs

log = logging.getLogger(__name__)

DROPOUT = 0.5
"""Rate of dropout in training for MC dropout, if neither the user nor the network says another."""
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
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    config = make_config(TrainConfig, settings)
    data = data if isinstance(data, PixelStore) else as_images(data)
    classes = check_labelled(data)
    seed_everything(config.seed)
    backbone = create_backbone(config.backbone, config.pretrained)
    config = resolve_defaults(config, backbone)
    spec = backbone.spec if config.augment is None else dataclasses.replace(backbone.spec, augment=config.augment)
    layers = {name: getattr(config, name) for name in ("bottleneck", "dropout", "head_bias", "head_norm")}
    architecture = {"backbone": config.backbone, **layers, "pretrained": backbone.weights}
    network = Classifier(backbone.module, backbone.features, len(classes), **layers)
    classifier = prepare(network, spec, engine, steps=True)
    store = engine_store(data, spec, engine)
    check_counts(store.labels, classes)
    trained, seen = classifier, store
    if config.tune == "new":
        seen = store if isinstance(store, FeatureStore) else features_of(classifier, store, spec, engine)
        trained = on_features(classifier)
    else:
        check_step_memory(classifier, spec, config.batch_size, engine)
    summary = Training(trained, seen, spec, config, engine, run, progress).run()
    if trained is not classifier:
        settle_layout(classifier, engine)
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "damping": config.damping}
    rival = Rival(config.uncertainty, config.dropout, config.members, config.label_smoothing, config.seed)
    posterior, other = fit_posterior(trained, seen, spec, engine, config.prior, rival=rival, **options)
    summary["prior_precision"] = posterior.prior_precision
    return SourceModel(classifier, posterior, classes, spec, architecture, summary, rival=other)


def resolve_defaults(config: TrainConfig, backbone: Backbone) -> TrainConfig:
    """Settings that were left open, decided from the network: whether it starts from pretrained weights, and what it
    brings along (its dropout)."""
    scale = 0.1 if backbone.weights is not None else 1.0
    tune = config.tune
    if tune == "auto":
        tune = "all" if backbone.weights is None or not config.bottleneck else "new"
        why = "random weights" if backbone.weights is None else f"pretrained weights ({backbone.weights['from']})"
        log.info("%s starts from %s: tune %s", config.backbone, why, tune)
    dropout = backbone.dropout if config.dropout is None else config.dropout
    if config.uncertainty == "mc-dropout":
        if not config.bottleneck:
            raise ConfigError("uncertainty mc-dropout: dropout stands after the bottleneck, and --bottleneck is 0")
        dropout = dropout or DROPOUT
    return dataclasses.replace(
        config,
        tune=tune,
        backbone_lr_scale=scale if config.backbone_lr_scale is None else config.backbone_lr_scale,
        dropout=dropout,
    )


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


@dataclass
class Supervised:
    """Eq. 1: cross-entropy with smoothed labels, the one term of stage 1."""

    labels: Tensor
    smoothing: float
    runtime: Runtime

    def refresh(self, outputs: Outputs) -> None:
        """Labels do not change."""

    def __call__(self, batch: Batch) -> Tensor:
        losses = smoothed_cross_entropy(batch.logits, self.labels[batch.samples], self.smoothing)
        return global_mean(losses, self.runtime.total_or_alone)


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
        self.folder = folder
        order = permutation(len(store), config.seed, 1 << 20)
        held = round(config.validation_share * len(store))
        self.held_rows, self.train_rows = order[:held].to(runtime.device), order[held:].to(runtime.device)
        if len(self.train_rows) < 2:
            raise DataError(f"{len(self.train_rows)} images are left to train on: give more, or lower validation_share")
        self.labels = store.labels.to(runtime.device)  # type: ignore[union-attr]
        self.loop = Loop(
            classifier,
            Feeder(store, spec, config.seed, runtime),
            Stage.of(config, head=True),
            [Supervised(self.labels, config.label_smoothing, runtime)],
            runtime,
            rows=self.train_rows,
            progress=progress,
        )
        self.best: dict[str, Any] = {"accuracy": -1.0, "epoch": 0, "rose": 0}
        """Best accuracy on the held-out part, the last epoch that had it, and the first."""
        self.best_state: dict[str, Tensor] = {}

    def run(self) -> dict[str, Any]:
        started, config, done = time.perf_counter(), self.config, 0
        with accelerated(self.classifier, self.runtime, self.loop.steps):
            try:
                done = self.resume()
                for epoch in range(done, config.epochs):
                    if self.has_stalled(epoch):
                        break
                    figures = self.loop.train_epoch(epoch)
                    if len(self.held_rows) and self.validation_is_due(epoch):
                        figures["validation_accuracy"] = self.validate(epoch)
                    self.record(epoch, figures)
                    done = epoch + 1
            finally:
                self.loop.release()
        if self.best_state:
            self.classifier.load_state_dict(self.best_state)
        held = bool(self.best_state)
        if done < config.epochs:
            say(
                f"stopped after epoch {done} of {config.epochs}: no better on the held-out images for "
                f"{config.patience} epochs; epoch {self.best['epoch']} is kept (--patience 0 trains all)"
            )
        return {
            "epochs": done,
            "seed": config.seed,
            "tune": config.tune,
            "weight_decay": config.weight_decay,
            "validation_accuracy": self.best["accuracy"] if held else None,
            "best_epoch": self.best["epoch"] if held else done,
            "seconds": round(time.perf_counter() - started, 3),
        }

    def has_stalled(self, done: int) -> bool:
        """Whether the accuracy on the held-out part has not risen for `patience` epochs, and for two scores at least:
        pixels are not scored every epoch."""
        patience = self.config.patience
        return bool(patience) and bool(self.best_state) and done - self.best["rose"] >= max(patience, 2 * self.every)

    @property
    def every(self) -> int:
        """Epochs from one score on the held-out part to the next; features are scored at once."""
        return 1 if self.store.pixels.ndim == 2 else max(1, self.config.epochs // VALIDATIONS)

    def validation_is_due(self, epoch: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch + 1 == self.config.epochs

    def validate(self, epoch: int) -> float:
        """Percent right on the held-out part; the best iterate is kept, the later of equals."""
        _, logits = forward_store(self.classifier, self.store, self.spec, self.runtime, rows=self.held_rows)
        accuracy = 100 * float((logits.argmax(dim=1) == self.labels[self.held_rows]).double().mean())
        if accuracy >= self.best["accuracy"]:
            rose = epoch + 1 if accuracy > self.best["accuracy"] else self.best["rose"]
            self.best = {"accuracy": accuracy, "epoch": epoch + 1, "rose": rose}
            self.best_state = {k: v.detach().clone() for k, v in self.classifier.state_dict().items()}
        return accuracy

    def record(self, epoch: int, figures: dict[str, float]) -> None:
        self.loop.tell(epoch + 1, figures)
        if self.folder is None or self.runtime.rank:
            return
        self.folder.log("epoch", epoch=epoch + 1, **figures)
        self.folder.scalars({f"train/{k}": v for k, v in figures.items()}, epoch + 1)
        tensors = self.loop.tensors() | {f"best.{k}": v for k, v in self.best_state.items()}
        self.folder.save_checkpoint(epoch + 1, tensors, {"best": self.best})

    def resume(self) -> int:
        """Continue from the newest checkpoint of the run folder; returns the epoch to start with."""
        found = load_checkpoint(self.folder, self.runtime)
        if found is None:
            return 0
        epoch, tensors, state = found
        assert self.folder is not None
        with self.folder.restoring():
            self.loop.restore(tensors)
            self.best_state = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
            best = state["best"]
            rose = int(best.get("rose", best["epoch"]))
            self.best = {"accuracy": float(best["accuracy"]), "epoch": int(best["epoch"]), "rose": rose}
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
    check: Callable[[Tensor], None] | None = None,
    rival: Rival | None = None,
) -> tuple[KroneckerPosterior, Heads | None]:
    """One pass over all the data, test views, BatchNorm in test mode: the posterior, and the uncertainty in use if it
    is another. `check` is shown the logits before the fit."""
    rival = rival or Rival()
    if rival.uncertainty == "ensemble" and store.labels is None:
        raise DataError("an ensemble is trained on labels, and the data has none")
    features, logits = forward_store(classifier, store, spec, runtime, progress=progress)
    if check is not None:
        check(logits)
    weight, bias = classifier.head_tensors()
    labels = None if store.labels is None else store.labels.to(features.device)
    factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
    posterior = KroneckerPosterior.from_factors(
        factors, weight, bias, prior, weight_decay=weight_decay, damping=damping
    )
    return posterior, rival.fit(posterior, features, labels)


@dataclass(frozen=True)
class Rival:
    """Which uncertainty stage 1 makes beside the posterior, and how."""

    uncertainty: str = "posterior"
    rate: float | None = None
    """Rate of MC dropout; None: the rate of the training, or the default."""
    members: int = MEMBERS
    smoothing: float = 0.1
    seed: int = 0

    def fit(self, posterior: KroneckerPosterior, features: Tensor, labels: Tensor | None) -> Heads | None:
        """From features N×D of the source and their labels, which only an ensemble needs."""
        head = posterior.weight, posterior.bias
        if self.uncertainty == "point":
            return PointEstimate(*head)
        if self.uncertainty == "mc-dropout":
            return MCDropout(*head, UNTRAINED_RATE if self.rate is None else self.rate)
        if self.uncertainty != "ensemble":
            return None
        assert labels is not None
        options: dict[str, Any] = {"members": self.members, "smoothing": self.smoothing, "seed": self.seed}
        return Ensemble.fit(features, labels, *head, posterior.prior_precision, **options)
