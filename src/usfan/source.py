"""Stage 1: train the source classifier (Eq. 1), then fit the posterior of its last layer in one pass."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from usfan.adaptation.objectives import global_mean, smoothed_cross_entropy
from usfan.config import RuntimeConfig, TrainConfig, make_config
from usfan.data.cache import PixelStore
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.engine import (
    Feeder,
    Optimiser,
    Stepper,
    count_batches,
    engine_store,
    epoch_batches,
    forward,
    forward_store,
    prepare,
    set_mode,
    worth_compiling,
)
from usfan.errors import DataError
from usfan.models.backbones import create_backbone
from usfan.models.classifier import Classifier, wrap_module
from usfan.models.model import SourceModel, as_images
from usfan.models.small_backbones import SMALL_BACKBONES
from usfan.posterior.fit import batch_factors
from usfan.posterior.kronecker import KroneckerPosterior
from usfan.run import RunFolder
from usfan.runtime import Runtime, permutation, seed_everything, start_runtime

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
    options = {k: v for k, v in architecture.items() if k != "backbone"}
    classifier = prepare(Classifier(backbone, features, len(classes), **options), engine)
    store = engine_store(data, spec, engine)
    check_counts(store.labels, classes)
    summary = fit_classifier(classifier, store, spec, config, engine, run, progress)
    posterior = fit_posterior(
        classifier, store, spec, engine, config.prior, weight_decay=config.weight_decay, damping=config.damping
    )
    summary["prior_precision"] = posterior.prior_precision
    return SourceModel(classifier.eval(), posterior, classes, spec, architecture, summary)


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


def fit_classifier(
    classifier: Classifier,
    store: PixelStore,
    spec: InputSpec,
    config: TrainConfig,
    runtime: Runtime,
    run: RunFolder | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """The training loop. Leaves the best state in the classifier; returns the summary."""
    started = time.perf_counter()
    order = permutation(len(store), config.seed, 1 << 20)
    held = round(config.validation_share * len(store))
    held_rows, train_rows = order[:held].to(runtime.device), order[held:].to(runtime.device)
    if len(train_rows) < 2:
        raise DataError(f"{len(train_rows)} images are left to train on: give more, or lower validation_share")
    labels = store.labels.to(runtime.device)  # type: ignore[union-attr]
    batches = count_batches(len(train_rows), config.batch_size)
    total_steps = batches * config.epochs
    optimiser = Optimiser(classifier, config, total_steps, runtime, head=True)
    feeder = Feeder(store, spec, config.seed, runtime)
    compiled = worth_compiling(runtime, total_steps)

    def step(samples: Tensor, staged: Tensor | None = None) -> Tensor:
        whole = compiled and len(samples) == config.batch_size
        _, logits = forward(classifier, feeder.view(samples, staged), runtime, compiled=whole)
        loss = global_mean(
            smoothed_cross_entropy(logits, labels[samples], config.label_smoothing), runtime.total_or_alone
        )
        optimiser.update(loss)
        return loss.detach()

    stepper = Stepper(step, runtime, total_steps)
    every = max(1, config.epochs // VALIDATIONS)
    best: dict[str, Any] = {"accuracy": -1.0, "epoch": 0}
    best_state: dict[str, Tensor] = {}
    first = 0
    if run is not None and (found := run.load_checkpoint()) is not None:
        first, tensors, state = found
        classifier.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        best_state = {k[5:]: v for k, v in tensors.items() if k.startswith("best.")}
        optimiser.restore(tensors)
        best = state["best"]
    for epoch in range(first, config.epochs):
        seed_everything(config.seed, epoch)
        feeder.epoch.fill_(epoch)
        set_mode(classifier, training=True)
        epoch_started, losses = time.perf_counter(), torch.zeros((), device=runtime.device)
        for number, (rows, _) in enumerate(
            epoch_batches(len(train_rows), config.batch_size, config.seed, epoch, runtime)
        ):
            lr = optimiser.schedule(epoch * batches + number)
            losses += stepper(*feeder.inputs(train_rows[rows]))
            if progress is not None:
                progress(epoch * batches + number + 1, total_steps, {"lr": lr})
        figures = {"loss": float(losses) / batches, "seconds": time.perf_counter() - epoch_started}
        if held and ((epoch + 1) % every == 0 or epoch + 1 == config.epochs):
            figures["validation_accuracy"] = held_accuracy(classifier, store, spec, held_rows, labels, runtime)
            if figures["validation_accuracy"] >= best["accuracy"]:
                best = {"accuracy": figures["validation_accuracy"], "epoch": epoch + 1}
                best_state = {k: v.detach().clone() for k, v in classifier.state_dict().items()}
        if run is not None and runtime.rank == 0:
            run.log("epoch", epoch=epoch + 1, **figures)
            run.scalars({f"train/{k}": v for k, v in figures.items()}, epoch + 1)
            tensors = {f"model.{k}": v for k, v in classifier.state_dict().items()}
            tensors |= {f"best.{k}": v for k, v in best_state.items()} | optimiser.tensors()
            run.save_checkpoint(epoch + 1, tensors, {"best": best})
    if best_state:
        classifier.load_state_dict(best_state)
    return {
        "epochs": config.epochs,
        "seed": config.seed,
        "validation_accuracy": best["accuracy"] if held else None,
        "best_epoch": best["epoch"] if held else config.epochs,
        "seconds": round(time.perf_counter() - started, 3),
    }


def held_accuracy(
    classifier: Classifier, store: PixelStore, spec: InputSpec, rows: Tensor, labels: Tensor, runtime: Runtime
) -> float:
    """Percent right on the held-out part, later ones first on a tie."""
    _, logits = forward_store(classifier, store, spec, runtime, rows=rows)
    return 100 * float((logits.argmax(dim=1) == labels[rows]).float().mean())


def fit_posterior(
    classifier: Classifier,
    store: PixelStore,
    spec: InputSpec,
    runtime: Runtime,
    prior: float | str,
    *,
    weight_decay: float | None = None,
    damping: str = "exact",
) -> KroneckerPosterior:
    """One pass over all the data, test views, BatchNorm in test mode."""
    features, logits = forward_store(classifier, store, spec, runtime)
    weight, bias = classifier.head_tensors()
    labels = None if store.labels is None else store.labels.to(features.device)
    factors = batch_factors(features, logits, bias=bias is not None, labels=labels)
    return KroneckerPosterior.from_factors(factors, weight, bias, prior, weight_decay=weight_decay, damping=damping)


def attach_posterior(
    module: nn.Module,
    data: Any,
    head: str | None = None,
    *,
    prior: float | str = "evidence",
    damping: str = "exact",
    weight_decay: float | None = None,
    spec: InputSpec | None = None,
    runtime: RuntimeConfig | Runtime | None = None,
) -> SourceModel:
    """A posterior for a classifier that is already trained; no retraining. It must end in the Linear named `head`.

    timm classifiers need no `head`, and bring their input size and normalisation; others: ImageNet's, or give `spec`.
    The module given is copied. Data without labels will do: the posterior needs features and logits only.
    """
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    data = as_images(data)
    spec = spec or module_spec(module)
    module = copy.deepcopy(module).to(engine.device)
    store = engine_store(data, spec, engine)
    from usfan.data.views import test_view

    rows = torch.arange(min(2, len(store)), device=engine.device)
    classifier = wrap_module(module, head, test_view(store.batch(rows, engine.device), spec))
    classifier = prepare(classifier, engine)  # type: ignore[assignment]
    outputs = classifier.head.out_features
    classes = tuple(data.classes) if data.classes is not None else tuple(str(i) for i in range(outputs))
    if len(classes) != outputs:
        raise DataError(
            f"{data.name} has {len(classes)} classes, the module {outputs}: give the data its classes= in the module's order"
        )
    posterior = fit_posterior(classifier, store, spec, engine, prior, weight_decay=weight_decay, damping=damping)
    architecture = {"module": type(module).__name__, "head": classifier.head_name}
    return SourceModel(
        classifier.eval(), posterior, classes, spec, architecture, {"prior_precision": posterior.prior_precision}
    )


def module_spec(module: nn.Module) -> InputSpec:
    if getattr(module, "pretrained_cfg", None):
        import timm

        from usfan.models.backbones import RESIZE_RATIO

        data = timm.data.resolve_model_data_config(module)
        size = int(data["input_size"][-1])
        return InputSpec(
            int(data["input_size"][0]), size, round(size * RESIZE_RATIO), tuple(data["mean"]), tuple(data["std"])
        )
    return InputSpec()
