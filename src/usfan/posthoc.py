"""A posterior for a model that is already trained: from a model folder, or from a state dict and the name of its network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from usfan.engine import engine_store
from usfan.data.sources import ImageData
from usfan.errors import ConfigError, DataError
from usfan.models.backbones import read_state, suggest
from usfan.models.classifier import guess_head
from usfan.models.model import SourceModel
from usfan.runtime import Runtime
from usfan.source import attach_posterior, fit_posterior


def refit_posterior(
    model: SourceModel, data: ImageData, runtime: Runtime, *, prior: float | str, damping: str
) -> SourceModel:
    """The same network; a new posterior from this data."""
    if data.labels is not None:
        data = data.match_classes(model.classes)
    spec = model.spec
    store = engine_store(data, spec, runtime)
    model.to(runtime.device)
    posterior = fit_posterior(model.classifier, store, spec, runtime, prior, damping=damping)
    return dataclasses.replace(model, posterior=posterior)


def from_state_dict(
    path: str,
    backbone: str | None,
    data: ImageData,
    runtime: Runtime,
    *,
    head: str | None,
    prior: float | str,
    damping: str,
) -> SourceModel:
    """A timm classifier from its weights; the classes are those of the data, in its order."""
    import timm

    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: neither a model folder nor a weights file")
    if backbone is None:
        raise ConfigError(f"{path} is a weights file: say which network it belongs to, --backbone NAME")
    if not timm.is_model(backbone.split(".")[0]):
        raise ConfigError(f"unknown backbone {backbone!r}: {suggest(backbone)}")
    state = read_state(file)
    module: Any = timm.create_model(backbone)
    name = head or guess_head(module)
    weight = state.get(f"{name}.weight")
    if weight is None or weight.ndim != 2:
        raise ConfigError(f"{path}: no {name}.weight in it; is it a {backbone} with a linear classifier?")
    if data.classes is not None and len(data.classes) != len(weight):
        raise DataError(f"{data.name} has {len(data.classes)} classes, {path} has {len(weight)}")
    module = timm.create_model(backbone, num_classes=len(weight))
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit {backbone}: {' '.join(str(error).split())[:200]}") from None
    model = attach_posterior(module, data, head=head, prior=prior, damping=damping, runtime=runtime)
    model.architecture["timm"] = backbone
    return model
