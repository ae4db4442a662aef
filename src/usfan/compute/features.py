"""Features of a frozen backbone: computed once per image, then kept like pixels.

In memory (on the device if they fit there), else in a file that is mapped into memory. With a cache folder the file is
kept, under a key of the images, the weights and the input: features of other weights or settings are never used.

Shapes: N images, F features of the backbone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

from usfan.compute.passes import PASS_BATCH, SMALL_PICTURES, faster_laid_out, own_batches, pass_batch
from usfan.compute.runtime import Runtime
from usfan.data import cache_file
from usfan.data.cache import PixelStore
from usfan.data.memory import choose_place
from usfan.data.views import InputSpec
from usfan.models.backbones import weights_hash
from usfan.models.classifier import Classifier, plain_layout
from usfan.progress import bar
from usfan.threads import all_threads, use

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
PIECE = 16
"""Images that one thread of a CPU takes at a time: a quarter of the memory of a batch, and the same bits. In pieces of
8 a convolution adds up in another order."""

Pass = Callable[[PixelStore, Tensor], Tensor]
"""Features of the images of a store at some rows."""


@dataclass(frozen=True)
class FeatureStore(PixelStore):
    """Features instead of pixels: `pixels` is float32 N×F, and a view of an image is its row."""

    def batch(self, index: Tensor, device: torch.device | str | None = None) -> Tensor:
        device = self.device if device is None else torch.device(device)
        return self.pixels.index_select(0, index.to(self.device)).to(device, non_blocking=True)


class BackboneAlone(nn.Module):
    """Gives the features of the backbone instead of those of the bottleneck."""

    def __init__(self, backbone: nn.Module, *, channels_last: bool = True) -> None:
        super().__init__()
        self.backbone, self.channels_last, self.laid_out = backbone, channels_last, False

    def extract(self, images: Tensor) -> Tensor:
        if self.laid_out:
            images = images.contiguous(memory_format=torch.channels_last)
        features: Tensor = self.backbone(images)
        return features

    @contextlib.contextmanager
    def fast(self, spec: InputSpec, runtime: Runtime) -> Iterator[None]:
        """Channels last on a CPU if that is faster for this network; its own layout afterwards."""
        self.laid_out = runtime.device.type == "cpu" and faster_laid_out(self.backbone, spec)
        if self.laid_out:
            self.backbone.to(memory_format=torch.channels_last)
        try:
            yield
        finally:
            if self.laid_out:
                plain_layout(self.backbone)
            self.laid_out = False


def on_features(classifier: Classifier) -> Classifier:
    """The layers after the backbone as a classifier of its features. They are the same layers: training one trains the
    other."""
    light = Classifier.__new__(Classifier)
    nn.Module.__init__(light)
    light.backbone, light.bottleneck, light.head = nn.Identity(), classifier.bottleneck, classifier.head
    return light


@torch.no_grad()
def features_of(
    network: Classifier | BackboneAlone, store: PixelStore, spec: InputSpec, runtime: Runtime
) -> FeatureStore:
    """Test views of every image through the network's backbone, in test mode."""
    alone = BackboneAlone(network.backbone, channels_last=network.channels_last).eval()
    with all_threads(), alone.fast(spec, runtime), passing(alone, spec, runtime) as through:
        width = int(through(store, torch.zeros(1, dtype=torch.long)).shape[1])
        if store.key is None or runtime.world > 1:
            table = fill(through, store, runtime, width)
        else:
            table = from_file(through, alone, store, spec, runtime, width)
    kept = {f.name: getattr(store, f.name) for f in dataclasses.fields(PixelStore)}
    return FeatureStore(**{**kept, "pixels": table})


@contextlib.contextmanager
def passing(alone: BackboneAlone, spec: InputSpec, runtime: Runtime) -> Iterator[Pass]:
    """The pass of a batch through the network. On a CPU it is cut into pieces, and each thread takes a piece of its own
    through all layers: within a layer threads would wait for each other, at the end of every one. Each thread has a
    copy of the network; one that cannot be copied takes whole batches."""

    def through(network: BackboneAlone, store: PixelStore, rows: Tensor) -> Tensor:
        return pass_batch(network, store, rows, spec, runtime)

    total = torch.get_num_threads()
    beside = math.gcd(total, PASS_BATCH // PIECE)
    whole = runtime.device.type != "cpu" or spec.size <= SMALL_PICTURES or (beside == 1 and total > 1)
    networks = None if whole else copies(alone, beside)
    if networks is None:
        yield functools.partial(through, alone)
        return
    free: queue.SimpleQueue[BackboneAlone] = queue.SimpleQueue()
    for network in networks:
        free.put(network)

    @torch.no_grad()  # a thread has a mode of its own
    def piece(store: PixelStore, rows: Tensor) -> Tensor:
        network = free.get()
        try:
            return through(network, store, rows)
        finally:
            free.put(network)

    use(total // beside)
    try:
        with ThreadPoolExecutor(beside) as pool:

            def batch(store: PixelStore, rows: Tensor) -> Tensor:
                pieces = rows.tensor_split(max(1, len(rows) // PIECE))
                return torch.cat(list(pool.map(piece, itertools.repeat(store), pieces)))

            yield batch
    finally:
        use(total)


def copies(alone: BackboneAlone, count: int) -> list[BackboneAlone] | None:
    """The network and its twins; None if there can be none. Twins would share the hooks, and what these write to."""
    if count > 1 and any(part._forward_hooks or part._forward_pre_hooks for part in alone.modules()):
        return None
    try:
        return [alone, *(twin(alone) for _ in range(count - 1))]
    except Exception as error:  # a user's network may hold anything, such as a lock
        log.debug("the backbone cannot be copied, so threads do not share out the images: %s", error)
        return None


def twin(module: BackboneAlone) -> BackboneAlone:
    """The same network with the same tensors, as an object of its own: a layer may note something in itself."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def fill(through: Pass, store: PixelStore, runtime: Runtime, width: int) -> Tensor:
    table = torch.zeros(len(store), width, device=runtime.device)
    with bar("features", len(store)) as shown:
        for start, rows in own_batches(len(store), PASS_BATCH, runtime):
            table[start : start + len(rows)] = through(store, rows)[: len(rows)]
            shown.advance(len(rows))
    return runtime.total(table) if runtime.world > 1 else table


def from_file(
    through: Pass, alone: BackboneAlone, store: PixelStore, spec: InputSpec, runtime: Runtime, width: int
) -> Tensor:
    """From the file that an earlier run kept, or through one."""
    folder = Path(runtime.cache or os.environ.get("USFAN_CACHE") or "~/.cache/usfan").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    form = (1, width, 4)  # the bytes of float32 numbers
    place = choose_place(4 * len(store) * width, runtime.device, MEMORY_SHARE)
    name = [store.key, weights_hash(alone.backbone), dataclasses.astuple(spec), runtime.precision, runtime.device.type]
    key = blake2b(json.dumps(name).encode(), digest_size=16).hexdigest()
    path = folder / f"{key}.features"
    with cache_file.locked(folder / f"{key}.lock") as held:
        found = read(path, key, len(store), form, runtime, place)
        if found is None:
            if held:
                cache_file.remove_parts(path)
            with cache_file.replacing(path) as file, bar("features", len(store)) as shown:
                writer = cache_file.Writer(file)
                for part in parts(through, store, runtime):
                    writer.append(part.cpu().contiguous().view(torch.uint8).view(len(part), *form))
                    shown.advance(len(part))
                writer.finish(key, form, [])
            found = read(path, key, len(store), form, runtime, place)
    return fill(through, store, runtime, width) if found is None else found


def parts(through: Pass, store: PixelStore, runtime: Runtime) -> Iterator[Tensor]:
    for start in range(0, len(store), cache_file.CHECKED):
        rows = torch.arange(start, min(start + cache_file.CHECKED, len(store)), device=runtime.device)
        yield through(store, rows)[: len(rows)]


def read(path: Path, key: str, count: int, form: tuple[int, int, int], runtime: Runtime, place: str) -> Tensor | None:
    room = None if place == "disk" else lambda n: torch.empty((n, *form), dtype=torch.uint8)
    found = cache_file.read(path, key, count, form, room)
    if found is None:
        return None
    table = found[1].view(count, form[1] * 4).view(torch.float32)
    return table if place == "disk" else table.to(runtime.device)
