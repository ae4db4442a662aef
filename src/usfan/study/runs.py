"""The two stages as studies call them: every source model and every adapted model of this package comes from here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.engine.loop import Progress
from usfan.engine.runtime import Runtime
from usfan.store.model import AdaptedModel, SourceModel
from usfan.training.source import train_source
from usfan.workflow import adapt_model as adapt

Settings = Mapping[str, Any]
"""Fields of `TrainConfig` or `AdaptConfig`, and settings of methods."""


def train_model(
    data: ImageData | Store,
    runtime: Runtime,
    settings: Settings,
    progress: Progress | None = None,
) -> SourceModel:
    """Stage 1."""
    return train_source(data, runtime=runtime, progress=progress, **settings)


def adapt_model(
    source: SourceModel,
    images: Store,
    method: str,
    runtime: Runtime,
    settings: Settings,
    progress: Progress | None = None,
) -> AdaptedModel:
    """Stage 2. The labels of the images, if there are any, are not used."""
    return adapt(source, images, method, runtime=runtime, progress=progress, **settings)


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many CPU threads of torch inside; None leaves them alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
