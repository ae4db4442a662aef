"""What both stages share: batches, views, the forward pass, and the pass over all of a data set."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from usfan.compute.runtime import Runtime, permutation
from usfan.compute.stepper import Stepper, worth_capturing
from usfan.data.cache import PixelStore, open_store
from usfan.data.views import InputSpec, normalised_centres, normalised_crops, statistics, test_view, train_view
from usfan.models.classifier import Classifier, batch_norms, lay_out
from usfan.progress import bar
from usfan.threads import threads_for

log = logging.getLogger(__name__)

WORTH_COMPILING = 30_000
"""Number of steps that makes compiling worthwhile under compile="auto"."""
PASS_BATCH = 64
"""Batch size of a pass over a data set: the recipe's, for which a GPU is set up by training (a new size costs
seconds). On a CPU larger ones are slower."""
LARGE_PASS_BATCH = 256
"""About the size of a GPU's other passes: a compiled one, which sets up its own, and one that is not captured…"""
LARGE_PASS = 16_384
"""…over so many images."""
FEATURE_BATCH = 4_096
"""Batch size of a pass over cached features."""
SMALL_PICTURES = 64
"""Side of the pictures up to which pooling is most of a network's time."""


class Feeder:
    """Training views of a store: gathered on the device if the pixels are there, else staged batch by batch."""

    def __init__(self, store: PixelStore, spec: InputSpec, seed: int, runtime: Runtime) -> None:
        self.store, self.spec, self.seed, self.device = store, spec, seed, runtime.device
        self.resident = store.pixels.device.type == runtime.device.type
        self.epoch = torch.zeros((), dtype=torch.long, device=runtime.device)

    def inputs(self, samples: Tensor) -> tuple[Tensor, ...]:
        """What the step is called with: sample numbers and, if they are staged, their pixels."""
        samples = samples.to(self.device)
        return (samples,) if self.resident else (samples, self.store.batch(samples, self.device))

    def view(self, samples: Tensor, staged: Tensor | None = None, *, compiled: bool = False) -> Tensor:
        if len(samples) == 0 and self.store.pixels.ndim == 4:  # fewer samples in the last batch than processes
            return torch.empty(0, self.spec.channels, self.spec.size, self.spec.size, device=self.device)
        if self.store.pixels.ndim == 2:  # features of a frozen backbone
            return self.store.pixels[samples] if staged is None else staged
        rows = samples if staged is None else torch.arange(len(samples), device=self.device)
        pixels = self.store.pixels if staged is None else staged
        if compiled and self.spec.augment == "crop-flip":
            crops: Tensor = compiled_view(normalised_crops)(
                pixels, rows, samples, self.spec.size, self.seed, self.epoch, *statistics(self.spec, self.device)
            )
            return crops
        return train_view(pixels, rows, samples, self.spec, self.seed, self.epoch)


def engine_store(
    images: Any, spec: InputSpec, runtime: Runtime, progress: Callable[[int], None] | None = None
) -> PixelStore:
    """The decoded images of a data set, at the size that the network's views start from; a store is taken as it is."""
    if isinstance(images, PixelStore):
        return images
    with bar("decoding", len(images)) as shown:
        return open_store(
            images,
            size=spec.resize,
            channels=spec.channels,
            device=runtime.device,
            cache_dir=runtime.cache,
            workers=runtime.workers,
            progress=progress or shown.advance,
        )


def worth_compiling(runtime: Runtime, steps: int) -> bool:
    return runtime.fast and (runtime.compile == "on" or (runtime.compile == "auto" and steps >= WORTH_COMPILING))


@functools.cache
def compiled_forward() -> Callable[..., Any]:
    """One compiled extractor for all classifiers: networks of the same shape, in either stage, share its code."""
    torch._dynamo.config.recompile_limit = 64  # a study has several networks
    return torch.compile(lambda classifier, images: classifier.extract(images), dynamic=False)


@functools.cache
def compiled_view(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Views as one kernel."""
    return torch.compile(view, dynamic=False)


def forward(
    classifier: Classifier, images: Tensor, runtime: Runtime, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """(features, logits) in float32, whatever the precision of the network."""
    features = extract(classifier, images, runtime, compiled=compiled)
    return features, classifier.head(features)


def extract(classifier: Any, images: Tensor, runtime: Runtime, *, compiled: bool = False) -> Tensor:
    """Features in float32."""
    if runtime.device.type == "cuda" and classifier.channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    with runtime.autocast():
        features: Tensor = compiled_forward()(classifier, images) if compiled else classifier.extract(images)
    return features.float()


def prepare(classifier: Classifier, spec: InputSpec, runtime: Runtime, *, steps: bool = False) -> Classifier:
    """On the device, channels last if that is faster (`steps`: for training); with several processes, BatchNorm over
    the global batch."""
    classifier = classifier.to(runtime.device)
    if runtime.device.type == "cuda" or (steps and faster_laid_out(classifier, spec)):
        classifier = lay_out(classifier, torch.zeros(2, spec.channels, spec.size, spec.size, device=runtime.device))
    if runtime.world > 1:
        from usfan.compute.accelerate.sync_norm import sync_batch_norms

        sync_batch_norms(classifier)
    return classifier


def faster_laid_out(module: nn.Module, spec: InputSpec) -> bool:
    """Whether it trains faster on a CPU with the channels last: convolutions of single channels do, and pooling, which
    takes most of the time of a network for small pictures."""
    pools = spec.size <= SMALL_PICTURES and any(isinstance(m, nn.MaxPool2d) for m in module.modules())
    return pools or any(isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1 for m in module.modules())


def epoch_batches(count: int, batch_size: int, seed: int, epoch: int, runtime: Runtime) -> Iterator[tuple[Tensor, int]]:
    """This process's rows of each global batch, with the size of the global batch.

    The last batch is filled up with the first samples of the epoch: batches are all of one size, which a GPU sets up
    once (seconds for each new size), and diversity is never computed on a handful of samples.
    """
    order = permutation(count, seed, epoch)
    if runtime.device.type == "cuda":
        order = order.to(runtime.device)
    size = min(batch_size, count)
    batches = count_batches(count, batch_size)
    order = torch.cat([order, order[: batches * size - count]])
    for start in range(0, batches * size, size):
        yield order[start : start + size][runtime.rank :: runtime.world], size


def count_batches(count: int, batch_size: int) -> int:
    return 0 if count < 2 else -(-count // batch_size)


def set_mode(classifier: Classifier, tune: str) -> None:
    """Training mode for what is trained. A frozen backbone ("new") stays in test mode: its BatchNorm statistics do
    not drift. Under "norm" and "affine" its BatchNorms train, and the rest of it (dropout) stays in test mode."""
    classifier.train()
    if tune != "all":
        classifier.backbone.eval()
    if tune in ("norm", "affine"):
        for layer in batch_norms(classifier.backbone):
            layer.train()


@torch.no_grad()
def forward_store(
    classifier: Classifier,
    store: PixelStore,
    spec: InputSpec,
    runtime: Runtime,
    *,
    rows: Tensor | None = None,
    compiled: bool = False,
    replay: Stepper | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Features N×D and logits N×K of test views (of `rows`, or all), BatchNorm in test mode, on the device. `replay` is
    the `replayed_pass` of this classifier and store; `progress` receives the images of each batch."""
    classifier.eval()
    if rows is None:
        rows = torch.arange(len(store), device=runtime.device)
    compiled = compiled and len(rows) >= PASS_BATCH
    if compiled:  # a code for each size: the size nearest to the usual one that divides the set without much to fill up
        batch_size = -(-len(rows) // max(1, round(len(rows) / LARGE_PASS_BATCH)))
    elif store.pixels.ndim == 2:
        batch_size = min(FEATURE_BATCH, max(1, len(rows)))
    else:
        large = runtime.device.type == "cuda" and replay is None and len(rows) >= LARGE_PASS
        batch_size = LARGE_PASS_BATCH if large else PASS_BATCH
    weight, _ = classifier.head_tensors()
    features, logits = (torch.zeros(len(rows), width, device=runtime.device) for width in reversed(weight.shape))
    small = store.pixels.ndim == 2
    with threads_for(batch_size * store.pixels.shape[1] * weight.shape[1] if small else math.inf):
        for start, own in own_batches(len(rows), batch_size, runtime):
            here, batch = slice(start, start + len(own)), rows[own]
            if runtime.device.type == "cuda":  # a size that is new costs seconds: the last batch is filled up
                batch = torch.cat([batch, batch[-1:].expand(batch_size - len(batch))])
            found = replay(batch) if replay else pass_batch(classifier, store, batch, spec, runtime, compiled=compiled)
            features[here] = found[: here.stop - start]
            logits[here] = classifier.head(found)[: here.stop - start]
            if progress is not None:
                progress(here.stop - start)
    if runtime.world > 1:  # each process filled its own rows
        features, logits = runtime.total(features), runtime.total(logits)
    return features, logits


def own_batches(count: int, batch_size: int, runtime: Runtime) -> Iterator[tuple[int, Tensor]]:
    """Start and positions of the batches of this process."""
    for start in range(0, count, batch_size)[runtime.rank :: runtime.world]:
        yield start, torch.arange(start, min(start + batch_size, count), device=runtime.device)


def replayed_pass(
    classifier: Classifier, store: PixelStore, spec: InputSpec, runtime: Runtime, steps: int
) -> Stepper | None:
    """The batches of passes that run while `classifier` learns, captured if the step is. Only pixels
    that lie on the GPU can be gathered so."""
    if store.pixels.device.type != "cuda" or not worth_capturing(runtime, steps):
        return None
    compiled = worth_compiling(runtime, steps)

    def batch(rows: Tensor) -> Tensor:
        return pass_batch(classifier, store, rows, spec, runtime, compiled=compiled)

    return Stepper(batch, runtime, steps, classifier)


def pass_batch(
    classifier: Any,
    store: PixelStore,
    rows: Tensor,
    spec: InputSpec,
    runtime: Runtime,
    *,
    compiled: bool = False,
) -> Tensor:
    """Features of one batch of a pass; in halves if memory runs out."""
    try:
        if store.pixels.ndim == 2:  # features of a frozen backbone
            images = store.batch(rows, runtime.device)
        elif compiled and store.pixels.device.type == runtime.device.type:
            view, numbers = compiled_view(normalised_centres), statistics(spec, runtime.device)
            images = view(store.pixels, rows, spec.size, *numbers, classifier.channels_last)
        else:
            images = test_view(store.batch(rows, runtime.device), spec)
        return extract(classifier, images, runtime, compiled=compiled)
    except torch.OutOfMemoryError:
        if len(rows) < 2:
            raise
        log.warning("the GPU ran out of memory on a batch of %d images: trying halves", len(rows))
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    return torch.cat([pass_batch(classifier, store, part, spec, runtime) for part in rows.split(-(-len(rows) // 2))])
