"""A posterior for a model that is already trained: a module, a model folder, or a state dict and its network's name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from usfan.artifacts.model import SourceModel, as_images, trained_rate
from usfan.artifacts.schema import check_names
from usfan.compute.passes import engine_store, prepare
from usfan.compute.runtime import Runtime, start_runtime
from usfan.config import RuntimeConfig
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.labels import checked_classes
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec, test_view
from usfan.errors import ConfigError, DataError
from usfan.models.backbones import read_state, recognise_timm, timm_model, timm_spec
from usfan.models.classifier import copy_module, guess_head, wrap_module
from usfan.training.class_order import check_order
from usfan.training.source import Rival, fit_posterior

Progress = Callable[[int], None] | None
"""Told of the images of each batch that has passed."""
log = logging.getLogger(__name__)

SMALL = 128
"""Square pictures up to this side are not enlarged for a module whose input is unknown."""


def attach_posterior(
    module: nn.Module,
    data: Any,
    head: str | None = None,
    *,
    classes: Sequence[str] | None = None,
    prior: float | str = "evidence",
    damping: str = "exact",
    weight_decay: float | None = None,
    spec: InputSpec | None = None,
    runtime: RuntimeConfig | Runtime | None = None,
    rival: Rival | None = None,
    progress: Progress = None,
) -> SourceModel:
    """A posterior for a classifier that is already trained; no retraining. It must end in the Linear named `head`.

    timm classifiers need no `head`, and bring their input size and normalisation; for others they are guessed, or give
    `spec`. The module given is copied. `classes` are the names of its outputs, in its order; without them the data's.
    Unlabelled data is enough: the posterior needs features and logits only. With labels, an order of names that does
    not fit the module's predictions is refused, and the one that fits is named (`ClassOrderError`).
    """
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    needs_weight_decay(prior, weight_decay, f"this {type(module).__name__}")
    data = named_data(as_images(data), classes)
    spec = spec or module_spec(copy_module(module).float() if is_odd(module) else module, data)
    check_names(tuple(data.classes or ()))
    module = copy_module(module).to(engine.device, torch.float32)  # posteriors, views and saved models are float32
    known = recognise_timm(module)
    store = engine_store(data, spec, engine)
    rows = torch.arange(min(2, len(store)), device=engine.device)
    classifier = wrap_module(module, head, test_view(store.batch(rows, engine.device), spec))
    classifier = prepare(classifier, spec, engine)  # type: ignore[assignment]
    outputs = classifier.head.out_features
    names = output_names(data, outputs)
    check = functools.partial(check_order, labels=store.labels, classes=names, what=data.name)
    options: dict[str, Any] = {"weight_decay": weight_decay, "damping": damping, "progress": progress, "check": check}
    posterior, other = fit_posterior(classifier, store, spec, engine, prior, rival=rival, **options)
    architecture = {"module": type(module).__name__, "head": classifier.head_name} | ({"timm": known} if known else {})
    summary = {"prior_precision": posterior.prior_precision}
    summary |= {} if weight_decay is None else {"weight_decay": weight_decay}
    return SourceModel(classifier.eval(), posterior, names, spec, architecture, summary, rival=other)


def named_data(data: ImageData, classes: Sequence[str] | None) -> ImageData:
    """The data, its labels as numbers of these names; data without labels only takes the names."""
    if classes is None:
        return data
    if data.labels is not None:
        return data.match_classes(classes)
    return data.with_class_names(classes)


def output_names(data: ImageData, outputs: int) -> tuple[str, ...]:
    """The names of a module's outputs."""
    if data.classes is None:
        log.warning(
            "%s has no labels: the model's classes are called class 0 to class %d until classes= names them",
            *(data.name, outputs - 1),
        )
        return tuple(f"class {i}" for i in range(outputs))
    if len(data.classes) != outputs:
        what = f"{data.name} has {len(data.classes)} classes, the module {outputs}"
        raise DataError(f"{what}: pass classes=, the names of all its outputs in its order")
    return tuple(data.classes)


def is_odd(module: nn.Module) -> bool:
    """Whether some of its numbers are not float32, as those of a module in half or double precision."""
    return any(t.is_floating_point() and t.dtype != torch.float32 for t in (*module.parameters(), *module.buffers()))


def module_spec(module: nn.Module, data: ImageData) -> InputSpec:
    if getattr(module, "pretrained_cfg", None):
        return timm_spec(module)
    guess = guess_spec(module, data)
    spec = next((s for s in (guess, InputSpec()) if takes(module, s)), guess)
    log.warning(
        "%s does not say what images it takes: it is given %d×%d×%d, normalised by mean %s and std %s; "
        "pass spec=usfan.InputSpec(…) if it was trained on others",
        *(type(module).__name__, spec.channels, spec.size, spec.size, spec.mean, spec.std),
    )
    return spec


def guess_spec(module: nn.Module, data: ImageData) -> InputSpec:
    """The channels of its first convolution. Pictures keep their size if they are small (or, without
    convolutions, as the first Linear needs them), else as ImageNet's networks take them."""
    size, channels = small_side(data), 3
    convolution = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if convolution is not None:
        channels = 1 if convolution.in_channels == 1 else 3
    elif linear is not None:
        fits = [(c, math.isqrt(linear.in_features // c)) for c in (1, 3)]
        channels, size = next(((c, s) for c, s in fits if c * s * s == linear.in_features), (channels, size))
    normal = InputSpec()
    mean, std = (normal.mean, normal.std) if channels == 3 else ((0.5,), (0.5,))
    if size is None:
        return dataclasses.replace(normal, channels=channels, mean=mean, std=std)
    return InputSpec(channels, size, size, mean, std, "resized-crop-flip" if channels == 3 else "none")


def takes(module: nn.Module, spec: InputSpec) -> bool:
    """Whether the module runs on images of this shape."""
    was_training, where = module.training, next(module.parameters(), torch.empty(0)).device
    try:
        with torch.no_grad():
            module.eval()(torch.zeros(2, spec.channels, spec.size, spec.size, device=where))
    except Exception:  # the module's own; what it says is said when the images come
        return False
    finally:
        module.train(was_training)
    return True


def small_side(data: ImageData) -> int | None:
    """The side of the first picture that can be read, if it is a small square."""
    for i in range(min(len(data), 10)):
        with contextlib.suppress(UnreadableImage):
            height, width = data.load(i).shape[1:]
            return height if height == width <= SMALL else None
    return None


def needs_weight_decay(prior: float | str, weight_decay: object, model: str) -> None:
    """Raise if the prior needs a weight decay that is unknown, before any image is decoded."""
    number = isinstance(weight_decay, (int, float)) and not isinstance(weight_decay, bool)
    if prior == "weight-decay" and not (number and 0 < float(weight_decay) < math.inf):  # type: ignore[arg-type]
        what = "is not stored with" if weight_decay is None else f"is {weight_decay!r} for"
        raise ConfigError(f"prior weight-decay: the weight decay of the training {what} {model}: give --weight-decay")


def refit_posterior(
    model: SourceModel,
    data: ImageData,
    runtime: Runtime,
    *,
    prior: float | str,
    damping: str,
    classes: Sequence[str] | None = None,
    weight_decay: float | None = None,
    rival: Rival | None = None,
    progress: Progress = None,
) -> SourceModel:
    """The same network; a new posterior from this data. The weight decay is the stored one unless another is given.

    `classes` are new names for the model's outputs, in its order.
    """
    if classes is not None:
        names = checked_classes(classes)
        if len(names) != len(model.classes):
            raise DataError(f"classes= holds {len(names)} names, the model has {len(model.classes)} classes")
        model = dataclasses.replace(model, classes=names)
    if weight_decay is None:
        weight_decay = model.summary.get("weight_decay")
    needs_weight_decay(prior, weight_decay, "the model")
    if data.labels is not None:
        data = data.match_classes(model.classes)
    spec = model.spec
    store = engine_store(data, spec, runtime)
    model.to(runtime.device)
    check = functools.partial(check_order, labels=store.labels, classes=model.classes, what=data.name)
    options: dict[str, Any] = {"weight_decay": weight_decay, "damping": damping, "progress": progress, "check": check}
    if rival is not None and rival.uncertainty == "mc-dropout" and rival.rate is None:
        rival = dataclasses.replace(rival, rate=trained_rate(model))
    posterior, other = fit_posterior(model.classifier, store, spec, runtime, prior, rival=rival, **options)
    summary = {**model.summary, "prior_precision": posterior.prior_precision}
    summary |= {} if weight_decay is None else {"weight_decay": weight_decay}
    return dataclasses.replace(model, posterior=posterior, summary=summary, rival=other)


def from_state_dict(
    path: str,
    backbone: str | None,
    data: ImageData,
    runtime: Runtime,
    *,
    head: str | None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> SourceModel:
    """A timm classifier from its weights; the classes are those given, or those of the data, in its order. `options`
    are those of `attach_posterior`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: neither a model folder nor a weights file")
    if backbone is None:
        raise ConfigError(f"{path} is a weights file: say which network it belongs to, --backbone NAME")
    needs_weight_decay(options.get("prior", "evidence"), options.get("weight_decay"), path)
    data = named_data(data, classes)
    state = read_state(file)
    module = timm_model(backbone)
    name = head or guess_head(module)
    weight = state.get(f"{name}.weight")
    if weight is None or weight.ndim != 2:
        raise ConfigError(f"{path}: no {name}.weight in it; is it a {backbone} with a linear classifier?")
    if data.classes is not None and len(data.classes) != len(weight):
        raise DataError(f"{data.name} has {len(data.classes)} classes, {path} has {len(weight)}")
    module = timm_model(backbone, num_classes=len(weight))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit {backbone}: {' '.join(str(error).split())[:200]}") from None
    return attach_posterior(module, data, head=head, runtime=runtime, **options)
