"""Features of a frozen backbone: computed once per image, then kept like pixels.

In memory (on the device if they fit there), else in a file that is mapped into memory. With a cache folder the file is
kept, under a key of the images, the weights, the layers, what the network makes of a few of the images, and the
engine: features of another network or other settings are never used.

On a CPU without a cache folder pixels are not stored at all: several networks look at each batch as it is decoded
(`streamed_features`).

Shapes: N images, F features of the backbone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from usfan.data import row_cache
from usfan.data.cache import store_of
from usfan.data.sources import ImageData
from usfan.data.store import Store, resize
from usfan.data.stream import stream
from usfan.data.views import InputSpec
from usfan.engine.inference import COMPARED, FeaturePass, engines, feature_pass
from usfan.engine.inference import BackboneAlone as BackboneAlone
from usfan.engine.inference import on_features as on_features
from usfan.engine.passes import PASS_BATCH, own_batches, pass_images
from usfan.engine.runtime import Runtime
from usfan.models.backbones import network_key, weights_hash
from usfan.models.classifier import Classifier
from usfan.progress import bar, network_at_work
from usfan.threads import threads_for

FORWARD = 1
"""Version of the code between a stored image and its features; part of every key."""
PROBES = 3
"""Images whose features are part of the key."""


@torch.no_grad()
def features_of(
    network: Classifier | BackboneAlone,
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    *,
    weights: str | None = None,
) -> Store:
    """Test views of every image through the network's backbone, in test mode. `weights` is the hash of the backbone, if
    the caller has it. A `Classifier` is a trained one."""
    alone = BackboneAlone.of(network)
    sample = store.batch(torch.arange(min(COMPARED, len(store))), runtime.device)
    with threads_for(math.inf):
        probes = pass_images(alone, sample[:PROBES], spec, runtime)
        width = probes.shape[1]
        caches = {}
        if store.key is not None and runtime.world == 1:
            weights = weights or weights_hash(alone.backbone)
            identity = [weights, str(FORWARD), *network_key(alone.backbone, probes)]
            for engine in engines(spec, runtime, len(store)):
                caches[engine] = open_cache(identity, store, spec, runtime, width, engine)
        engine = next(iter(caches), "torch")
        table = caches[engine].read(runtime.device) if caches else None
        if table is None:  # the engine is chosen anew, whatever else the cache holds
            with feature_pass(network, spec, runtime, sample, len(store)) as (through, engine):
                if engine in caches:
                    table = from_file(caches[engine], through, store, runtime)
                else:
                    table = fill(through, store, runtime, width)
    return dataclasses.replace(store, values=table, batch_form=None, engine=engine)


def is_streamed(images: ImageData | Store, runtime: Runtime) -> TypeGuard[ImageData]:
    """Whether pixels that are needed once are not stored. A cache stores them, a GPU has them at hand, and several
    processes share them."""
    is_alone = runtime.device.type == "cpu" and runtime.world == 1
    return is_alone and runtime.cache is None and isinstance(images, ImageData)


@torch.no_grad()
def streamed_features(
    networks: Sequence[tuple[Classifier | BackboneAlone, InputSpec]],
    data: ImageData,
    form: InputSpec,
    runtime: Runtime,
    sample: Tensor,
) -> tuple[list[Store], Store]:
    """`features_of` for several networks. Each image is decoded once, in the form of this input, and dropped when all
    networks have seen it; only those at the positions `sample`, which are in order, stay."""
    is_kept = torch.zeros(len(data), dtype=torch.bool)
    is_kept[sample] = True
    shape = (len(sample), form.channels, form.resize, form.resize)
    pictures = torch.empty(shape, dtype=torch.uint8)
    positions = torch.empty(len(data), dtype=torch.long)
    tables: list[Tensor] = []
    count = 0
    kept = 0
    decoding = stream(
        data,
        size=form.resize,
        channels=form.channels,
        resampling=form.resampling,
        batch_size=PASS_BATCH,
        workers=runtime.workers,
    )
    first = next(decoding)
    with contextlib.ExitStack() as stack, bar(network_at_work.get(), len(data)) as display:
        stack.enter_context(threads_for(math.inf))
        passes = []
        for network, spec in networks:
            few = resize(first[1][:COMPARED], spec.channels, spec.resize)
            chosen = feature_pass(network, spec, runtime, few, len(data))
            passes.append((stack.enter_context(chosen)[0], spec))
        for index, pixels in itertools.chain([first], decoding):
            rows = slice(count, count + len(index))
            for number, (through, spec) in enumerate(passes):
                features = through(resize(pixels, spec.channels, spec.resize))
                if not count:
                    tables.append(torch.empty(len(data), features.shape[1]))
                tables[number][rows] = features
            chosen_pixels = pixels[is_kept[index]]
            pictures[kept : kept + len(chosen_pixels)] = chosen_pixels
            kept += len(chosen_pixels)
            positions[rows] = index
            count = rows.stop
            display.advance(len(index))
    positions = positions[:count]
    stores = [store_of(data, table[:count], positions) for table in tables]
    return stores, Store(pictures[:kept], positions[is_kept[positions]])


def batches(
    through: FeaturePass, store: Store, size: int, runtime: Runtime
) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's rows and their features, batch by batch."""
    with bar(network_at_work.get(), len(store)) as display:
        for rows in own_batches(len(store), size, runtime):
            yield rows, through(store.batch(rows, runtime.device))
            display.advance(len(rows))


def fill(through: FeaturePass, store: Store, runtime: Runtime, width: int) -> Tensor:
    table = torch.zeros(len(store), width, device=runtime.device)
    for rows, features in batches(through, store, PASS_BATCH, runtime):
        table[rows] = features
    return runtime.total(table)


def open_cache(
    identity: list[str],
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    width: int,
    engine: str,
) -> row_cache.RowCache:
    """Where the features by one engine are, or will be."""
    settings = [
        store.key,
        identity,
        dataclasses.astuple(spec),
        runtime.precision if engine == "torch" else engine,
        runtime.device.type,
    ]
    folder = row_cache.cache_folder(runtime.cache)
    key = row_cache.digest(settings)
    return row_cache.RowCache(folder, key, len(store), (width,), torch.float32)


def from_file(
    cache: row_cache.RowCache, through: FeaturePass, store: Store, runtime: Runtime
) -> Tensor:
    """The features that an earlier run cached; else they are computed and cached."""

    def build(_: row_cache.Skips) -> Iterator[Tensor]:
        for _rows, features in batches(through, store, row_cache.CHECKED, runtime):
            yield features

    table, _ = cache.read_or_build(runtime.device, build)
    return table
