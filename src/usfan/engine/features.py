"""Features of a frozen backbone: computed once per image, then kept like pixels.

In memory (on the device if they fit there), else in a file that is mapped into memory. With a cache folder the file is
kept, under a key of the images, the weights, the layers, what the network makes of a few of the images, and the
engine: features of another network or other settings are never used.

Shapes: N images, F features of the backbone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
import queue
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from usfan.data import row_cache
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.passes import (
    PASS_BATCH,
    SMALL_PICTURES,
    faster_laid_out,
    own_batches,
    pass_batch,
)
from usfan.engine.runtime import Runtime
from usfan.models.backbones import weights_hash
from usfan.models.classifier import Classifier, plain_layout
from usfan.progress import bar, network_at_work
from usfan.threads import threads_for, use

log = logging.getLogger(__name__)

PIECE = 16
"""Images that one thread of a CPU takes at a time: a quarter of the memory of a batch, and the same bits. In pieces of
8 a convolution adds up in another order."""

FORWARD = 1
"""Version of the code between a stored image and its features; part of every key."""
ENGINE = "torch"
"""The engine that passes images through a network."""
PROBES = 3
"""Images whose features are part of the key."""

Pass = Callable[[Store, Tensor], Tensor]
"""Features of the images of a store at some rows."""


class BackboneAlone(nn.Module):
    """Gives the features of the backbone instead of those of the bottleneck."""

    def __init__(self, backbone: nn.Module, *, channels_last: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.channels_last = channels_last

    def extract(self, images: Tensor) -> Tensor:
        features: Tensor = self.backbone(images)
        return features


@contextlib.contextmanager
def laid_out(backbone: nn.Module, spec: InputSpec, runtime: Runtime) -> Iterator[None]:
    """Channels last on a CPU if that is faster for this network; its own layout afterwards."""
    if runtime.device.type != "cpu" or not faster_laid_out(backbone, spec):
        yield
        return
    backbone.to(memory_format=torch.channels_last)
    try:
        yield
    finally:
        plain_layout(backbone)


def on_features(classifier: Classifier) -> Classifier:
    """The layers after the backbone as a classifier of its features. They are the same layers: training one trains the
    other."""
    light = Classifier.__new__(Classifier)
    nn.Module.__init__(light)
    light.backbone = nn.Identity()
    light.bottleneck = classifier.bottleneck
    light.head = classifier.head
    return light


@torch.no_grad()
def features_of(
    network: Classifier | BackboneAlone,
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    *,
    weights: str | None = None,
    engine: str = ENGINE,
) -> Store:
    """Test views of every image through the network's backbone, in test mode. `weights` is the hash of the backbone, if
    the caller has it."""
    alone = BackboneAlone(network.backbone, channels_last=network.channels_last).eval()
    with (
        threads_for(math.inf),
        laid_out(alone.backbone, spec, runtime),
        passing(alone, spec, runtime) as through,
    ):
        width = int(through(store, torch.zeros(1, dtype=torch.long)).shape[1])
        if store.key is None or runtime.world > 1:
            table = fill(through, store, runtime, width)
        else:
            probes = through(store, torch.linspace(0, len(store) - 1, PROBES).long())
            weights = weights or weights_hash(alone.backbone)
            identity = [engine, weights, *network_key(alone.backbone, probes)]
            table = from_file(through, identity, store, spec, runtime, width)
    return dataclasses.replace(store, values=table, batch_form=None)


@contextlib.contextmanager
def passing(alone: BackboneAlone, spec: InputSpec, runtime: Runtime) -> Iterator[Pass]:
    """The pass of a batch through the network. On a CPU it is cut into pieces, and each thread takes a piece of its own
    through all layers: within a layer threads would wait for each other, at the end of every one. Each thread has a
    copy of the network; one that cannot be copied takes one piece after another."""
    if runtime.device.type != "cpu" or spec.size <= SMALL_PICTURES:
        yield lambda store, rows: pass_batch(alone, store, rows, spec, runtime)
        return
    threads = torch.get_num_threads()
    networks = copies(alone, min(threads, PASS_BATCH // PIECE))
    free: queue.SimpleQueue[BackboneAlone] = queue.SimpleQueue()
    for network in networks:
        free.put(network)

    @torch.no_grad()  # each thread has its own mode
    def pass_piece(store: Store, rows: Tensor) -> Tensor:
        network = free.get()
        try:
            return pass_batch(network, store, rows, spec, runtime)
        finally:
            free.put(network)

    def pass_pieces(store: Store, rows: Tensor) -> Tensor:
        pieces = rows.tensor_split(max(1, len(rows) // PIECE))
        return torch.cat(list(pool.map(pass_piece, itertools.repeat(store), pieces)))

    use(threads // len(networks))
    try:
        with ThreadPoolExecutor(len(networks)) as pool:
            yield pass_pieces
    finally:
        use(threads)


def copies(alone: BackboneAlone, count: int) -> list[BackboneAlone]:
    """The network and copies of it with the same tensors: a layer may note something in itself. The network alone if it
    has hooks, which all copies would share together with what they write to, or cannot be copied."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in alone.modules()):
        return [alone]
    tensors = [*alone.parameters(), *alone.buffers()]
    try:
        others = [copy.deepcopy(alone, {id(t): t for t in tensors}) for _ in range(1, count)]
    except Exception as error:  # a user's network may hold anything, such as a lock
        log.debug(
            "the backbone cannot be copied, so threads do not share the images: %s", error
        )
        return [alone]
    return [alone, *others]


def batches(
    through: Pass, store: Store, size: int, runtime: Runtime
) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's rows and their features, batch by batch."""
    with bar(network_at_work.get(), len(store)) as display:
        for rows in own_batches(len(store), size, runtime):
            yield rows, through(store, rows)
            display.advance(len(rows))


def fill(through: Pass, store: Store, runtime: Runtime, width: int) -> Tensor:
    table = torch.zeros(len(store), width, device=runtime.device)
    for rows, features in batches(through, store, PASS_BATCH, runtime):
        table[rows] = features
    return runtime.total(table)


def network_key(backbone: nn.Module, probes: Tensor) -> list[str]:
    """What else than its weights names a network: its layers, the library that computes them and, because layers of one
    name may compute different things, figures of its features of a few images (F wide): how large they are, and sums
    with alternating signs. They are rounded, because another number of threads may change the last digits."""
    layers = re.sub("0x[0-9a-f]+", "", f"{type(backbone).__module__} {backbone}")
    features = probes.float().cpu()
    waves = torch.arange(features.shape[1]).outer(torch.tensor([0.0, 1.0, 0.1])).cos()
    sizes = features.abs().sum(dim=1, keepdim=True).clamp_min(1e-12)
    figures = [f"{size:.3e}" for size in sizes.flatten().tolist()]
    figures += [f"{share:.4f}" for share in (features @ waves / sizes).flatten().tolist()]
    return [str(FORWARD), torch.__version__, layers, *figures]


def from_file(
    through: Pass,
    identity: list[str],
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    width: int,
) -> Tensor:
    """The features that an earlier run cached; else they are computed and cached."""
    settings = [
        store.key,
        identity,
        dataclasses.astuple(spec),
        runtime.precision,
        runtime.device.type,
    ]
    key = row_cache.digest(settings)
    folder = row_cache.cache_folder(runtime.cache)
    cache = row_cache.RowCache(folder, key, len(store), (width,), torch.float32)

    def build(_: row_cache.Skips) -> Iterator[Tensor]:
        for _rows, features in batches(through, store, row_cache.CHECKED, runtime):
            yield features

    table, _ = cache.read_or_build(runtime.device, build)
    return table
