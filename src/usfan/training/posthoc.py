"""A posterior for a model that is already trained: a module, a model folder, or a state dict and its network's name."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from usfan.config import RuntimeConfig
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.labels import checked_classes
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.engine.passes import engine_store, prepare
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import ConfigError, DataError, option, printable
from usfan.models import hugging_face
from usfan.models.backbones import read_state, recognise_timm, timm_model, timm_spec
from usfan.models.classifier import copy_module, example_of, guess_head, wrap_module
from usfan.store.model import SourceModel, as_images
from usfan.store.schema import JsonTable, check_names
from usfan.training.source import fit_posterior
from usfan.uncertainty.base import FitSettings
from usfan.uncertainty.kronecker import KroneckerPosterior

Progress = Callable[[int], None] | None
"""Called with the number of images of each batch that has passed."""
log = logging.getLogger(__name__)


class ImageProcessor(Protocol):
    """An image processor of `transformers`, which need not be installed."""

    def to_dict(self) -> dict[str, object]: ...


SMALL = 128
"""Square pictures up to this side are not enlarged for a module whose input is unknown."""


def attach_posterior(
    module: nn.Module,
    data: Any,
    head: str | None = None,
    *,
    classes: Sequence[str] | None = None,
    spec: InputSpec | ImageProcessor | None = None,
    runtime: RuntimeConfig | Runtime | None = None,
    settings: FitSettings | None = None,
    progress: Progress = None,
) -> SourceModel:
    """A posterior for a classifier that is already trained; no retraining. It must end in the Linear named `head`.

    timm classifiers need no `head`, and bring their input size and normalisation; for others they are guessed, or give
    `spec`. The module given is copied. `classes` are the names of its outputs, in its order; without them the data's.
    Unlabelled data is enough: the posterior needs features and logits only. With labels, an order of names that does
    not fit the module's predictions is refused, and the one that fits is named (`ClassOrderError`).
    """
    runtime = start_runtime(runtime)
    settings = settings or FitSettings()
    kind = type(module).__name__
    check_weight_decay(settings, f"this {kind}")
    config = None
    if hugging_face.is_network(module):
        classes = classes or hugging_face.class_names(module)
        spec = spec or hugging_face.input_of(module)
        head = f"network.{head}" if head else hugging_face.head_of(module)
        config = hugging_face.config_of(module)
        module = hugging_face.LogitsOf(module)
    if spec is not None and not isinstance(spec, InputSpec):
        spec = hugging_face.spec_of(spec)
    data = named_data(as_images(data), classes)
    check_names(tuple(data.classes or ()))
    # Posteriors, views and saved models are float32; `prepare` moves the copy to its device.
    module = copy_module(module).to("cpu", torch.float32)
    spec = spec or module_spec(module, data)
    timm_name = recognise_timm(module)
    classifier = wrap_module(module, head, example_of(spec))
    names = output_names(data, classifier.head.out_features)
    architecture: JsonTable = {"module": kind, "head": classifier.head_name}
    if config is not None:
        architecture["transformers"] = config
    if timm_name:
        architecture["timm"] = timm_name
    network = prepare(classifier, spec, runtime).eval()
    store = engine_store(data, spec, runtime)
    posterior, fitted = fit_posterior(network, store, spec, runtime, settings, progress, names)
    summary = summary_of(posterior, settings)
    return SourceModel(
        network, posterior, names, spec, architecture, summary, uncertainty=fitted
    )


def summary_of(posterior: KroneckerPosterior, settings: FitSettings) -> dict[str, float]:
    summary = {"prior_precision": posterior.prior_precision}
    if settings.weight_decay is not None:
        summary["weight_decay"] = settings.weight_decay
    return summary


def named_data(data: ImageData, classes: Sequence[str] | None) -> ImageData:
    """The data, its labels as numbers of these names; data without labels only takes the names."""
    if classes is None:
        return data
    if data.labels is not None:
        return data.match_classes(classes)
    return data.without_labels(classes)


def output_names(data: ImageData, outputs: int) -> tuple[str, ...]:
    """The names of a module's outputs."""
    if data.classes is None:
        log.warning(
            "%s has no labels: the model's classes are called class 0 to class %d until classes= names them",
            data.name,
            outputs - 1,
        )
        return tuple(f"class {i}" for i in range(outputs))
    if len(data.classes) != outputs:
        what = f"{data.name} has {len(data.classes)} classes, the module {outputs}"
        raise DataError(f"{what}: pass classes=, the names of all its outputs in its order")
    return tuple(data.classes)


def module_spec(module: nn.Module, data: ImageData) -> InputSpec:
    if getattr(module, "pretrained_cfg", None):
        return timm_spec(module)
    spec = normalised(guess_spec(module, data), data)
    log.warning(
        "%s does not say what images it takes: it is given %s, normalised by mean %s and std %s; "
        "pass spec=usfan.InputSpec(…), or its image processor, if it was trained on others",
        type(getattr(module, "network", module)).__name__,
        spec.shape_text,
        spec.mean,
        spec.std,
    )
    return spec


def normalised(spec: InputSpec, data: ImageData) -> InputSpec:
    """The input with the mean and standard deviation of the data's own transforms, if it has any."""
    normalisation = getattr(data.images, "normalisation", None)
    if normalisation is None:
        return spec
    mean, std = (tuple(values.flatten().tolist()) for values in normalisation)
    if len(mean) not in (1, spec.channels):
        return spec
    times = spec.channels // len(mean)
    return dataclasses.replace(spec, mean=mean * times, std=std * times)


def guess_spec(module: nn.Module, data: ImageData) -> InputSpec:
    """The first input that the module runs on: in colour or grey; pictures as they are if they are small, or as
    ImageNet's networks take them."""
    colour = InputSpec()
    grey = dataclasses.replace(colour, channels=1, mean=(0.5,), std=(0.5,), augment="none")
    side = small_side(data)
    for spec in (colour, grey):
        if side is not None:
            augment = "none" if spec is grey else "resized-crop-flip"
            small = dataclasses.replace(spec, size=side, resize=side, augment=augment)
            if takes(module, small):
                return small
        if takes(module, spec):
            return spec
    return colour


def takes(module: nn.Module, spec: InputSpec) -> bool:
    """Whether the module runs on images of this shape."""
    with torch.no_grad(), contextlib.suppress(Exception):  # it is reported when the images come
        module.eval()(example_of(spec))
        return True
    return False


def small_side(data: ImageData) -> int | None:
    """The side of the first picture that can be read, if it is a small square."""
    for i in range(min(len(data), 10)):
        with contextlib.suppress(UnreadableImage):
            height, width = data.load(i).shape[1:]
            return height if height == width <= SMALL else None
    return None


def check_weight_decay(settings: FitSettings, model: str) -> None:
    """Raise if the prior needs a weight decay that is unknown, before any image is decoded."""
    decay = settings.weight_decay
    is_usable = type(decay) in (int, float) and 0 < float(decay or 0) < math.inf
    if settings.prior == "weight-decay" and not is_usable:
        what = "is not stored with" if decay is None else f"is {decay!r} for"
        raise ConfigError(
            f"prior weight-decay: the weight decay of the training {what} {model}: give {option('weight_decay')}"
        )


def refit_posterior(
    model: SourceModel,
    data: ImageData,
    runtime: Runtime,
    settings: FitSettings,
    *,
    classes: Sequence[str] | None = None,
    progress: Progress = None,
) -> SourceModel:
    """The same network; a new posterior from this data. The weight decay is the stored one unless another is given.

    `classes` are new names for the model's outputs, in its order.
    """
    if classes is not None:
        names = checked_classes(classes)
        if len(names) != len(model.classes):
            raise DataError(
                f"classes= holds {len(names)} names, the model has {len(model.classes)} classes"
            )
        model = dataclasses.replace(model, classes=names)
    decay = settings.weight_decay
    if decay is None:
        decay = model.summary.get("weight_decay")
    settings = dataclasses.replace(
        settings, weight_decay=decay, trained_rate=model.dropout_rate
    )
    check_weight_decay(settings, "the model")
    if data.labels is not None:
        data = data.match_classes(model.classes)
    model.to(runtime.device)
    store = engine_store(data, model.spec, runtime)
    posterior, fitted = fit_posterior(
        model.classifier, store, model.spec, runtime, settings, progress, model.classes
    )
    summary = {**model.summary, **summary_of(posterior, settings)}
    return dataclasses.replace(model, posterior=posterior, summary=summary, uncertainty=fitted)


def from_state_dict(path: str, backbone: str | None, head: str | None = None) -> nn.Module:
    """A timm classifier from a weights file."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: neither a model folder nor a weights file")
    if backbone is None:
        raise ConfigError(
            f"{path} is a weights file: say which network it belongs to, {option('backbone', 'NAME')}"
        )
    state = read_state(file)
    with torch.device("meta"):
        name = head or guess_head(timm_model(backbone))
    weight = state.get(f"{name}.weight")
    if weight is None or weight.ndim != 2:
        raise ConfigError(
            f"{path}: no {name}.weight in it; is it a {backbone} with a linear classifier?"
        )
    module: nn.Module = timm_model(backbone, num_classes=len(weight))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit {backbone}: {printable(error, 200)}") from None
    return module
