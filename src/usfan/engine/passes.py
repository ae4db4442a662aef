"""Batches, views, the forward pass, and the pass over all of a data set, for both stages."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from usfan.data.cache import open_store
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.views import InputSpec, test_view, train_view
from usfan.engine.runtime import Runtime, permutation
from usfan.engine.stepper import Stepper, worth_capturing
from usfan.models.classifier import Classifier, batch_norms, lay_out
from usfan.progress import bar
from usfan.threads import threads_for

log = logging.getLogger(__name__)


class Extractor(Protocol):
    """A network that gives features: a `Classifier`, or a backbone alone."""

    channels_last: bool

    def extract(self, images: Tensor) -> Tensor: ...


WORTH_COMPILING = 30_000
"""Number of steps that makes compiling worthwhile under compile="auto"."""
PASS_BATCH = 64
"""Batch size of a pass over a data set: the recipe's, for which a GPU is set up by training (a new size costs
seconds). On a CPU larger ones are slower."""
FEATURE_BATCH = 4_096
"""Batch size of a pass over cached features."""
SECOND_DRAW = 1 << 20
"""Added to the number of the epoch for a second draw of the same images: no run has so many epochs."""
SMALL_PICTURES = 64
"""Side of the pictures up to which pooling is most of a network's time."""


class Feeder:
    """Training views of a store: gathered on the device if the pixels are there, else staged batch by batch."""

    def __init__(self, store: Store, spec: InputSpec, seed: int, runtime: Runtime) -> None:
        self.store = store
        self.spec = spec
        self.seed = seed
        self.device = runtime.device
        self.resident = store.device.type == runtime.device.type
        self.epoch = torch.zeros((), dtype=torch.long, device=runtime.device)

    def inputs(self, samples: Tensor) -> tuple[Tensor, ...]:
        """Arguments of a step: sample numbers and, if they are staged, their pixels."""
        samples = samples.to(self.device)
        return (
            (samples,) if self.resident else (samples, self.store.batch(samples, self.device))
        )

    def view(
        self, samples: Tensor, staged: Tensor | None = None, *, again: bool = False
    ) -> Tensor:
        """Views of these samples in this epoch; `again`: another draw of them."""
        spec = self.spec
        if self.store.is_features:
            return self.store.values[samples] if staged is None else staged
        if len(samples) == 0:  # fewer samples in the last batch than processes
            return torch.empty(0, spec.channels, spec.size, spec.size, device=self.device)
        pixels = self.store.values
        rows = samples
        if staged is not None:
            pixels = staged
            rows = torch.arange(len(samples), device=self.device)
        epoch = self.epoch + SECOND_DRAW if again else self.epoch
        return train_view(pixels, rows, samples, spec, self.seed, epoch)


def engine_store(
    images: ImageData | Store,
    spec: InputSpec,
    runtime: Runtime,
) -> Store:
    """The decoded images of a data set, at the size that the network's views start from; a store is taken as it is."""
    if isinstance(images, Store):
        return images
    with bar("decoding", len(images)) as display:
        return open_store(
            images,
            size=spec.resize,
            channels=spec.channels,
            resampling=spec.resampling,
            device=runtime.device,
            cache_dir=runtime.cache,
            workers=runtime.workers,
            progress=display.advance,
        )


def worth_compiling(runtime: Runtime, steps: int) -> bool:
    enough = runtime.compile == "on" or (runtime.compile == "auto" and steps >= WORTH_COMPILING)
    return runtime.fast and enough


@functools.cache
def compiled_forward() -> Callable[..., Tensor]:
    """One compiled extractor for all classifiers: networks of the same shape, in either stage, share its code."""
    torch._dynamo.config.recompile_limit = 64  # a study has several networks
    return torch.compile(lambda classifier, images: classifier.extract(images), dynamic=False)


def forward(
    classifier: Classifier, images: Tensor, runtime: Runtime, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """(features, logits) in float32, whatever the precision of the network."""
    features = extract(classifier, images, runtime, compiled=compiled)
    return features, classifier.head(features)


def extract(
    network: Extractor, images: Tensor, runtime: Runtime, *, compiled: bool = False
) -> Tensor:
    """Features in float32."""
    if runtime.device.type == "cuda" and network.channels_last and images.ndim == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    with runtime.autocast():
        if compiled:
            return compiled_forward()(network, images).float()
        return network.extract(images).float()


def prepare(
    classifier: Classifier, spec: InputSpec, runtime: Runtime, *, steps: bool = False
) -> Classifier:
    """On the device, channels last if that is faster (`steps`: for training); with several processes, BatchNorm over
    the global batch."""
    classifier = classifier.to(runtime.device)
    if runtime.device.type == "cuda" or (steps and faster_laid_out(classifier, spec)):
        classifier = lay_out(classifier)
    if runtime.world > 1:
        from usfan.engine.accelerate.sync_norm import sync_batch_norms

        sync_batch_norms(classifier)
    return classifier


def faster_laid_out(module: nn.Module, spec: InputSpec) -> bool:
    """Whether it trains faster on a CPU with the channels last: convolutions of single channels do, and pooling, which
    takes most of the time of a network for small pictures."""
    for layer in module.modules():
        if isinstance(layer, nn.MaxPool2d) and spec.size <= SMALL_PICTURES:
            return True
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
            return True
    return False


def epoch_batches(
    count: int, batch_size: int, seed: int, epoch: int, runtime: Runtime
) -> Iterator[Tensor]:
    """This process's rows of each global batch.

    The last batch is filled up with the first samples of the epoch: batches are all of one size, which a GPU sets up
    once (seconds for each new size), and diversity is never computed on a handful of samples.
    """
    order = permutation(count, seed, epoch)
    if runtime.device.type == "cuda":
        order = order.to(runtime.device)
    size = min(batch_size, count)
    total = size * count_batches(count, batch_size)
    order = torch.cat([order, order[: total - count]])
    for start in range(0, total, size):
        yield order[start : start + size][runtime.rank :: runtime.world]


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
    store: Store,
    spec: InputSpec,
    runtime: Runtime,
    *,
    rows: Tensor | None = None,
    replay: Stepper | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Features N×D and logits N×K of test views (of `rows`, or all), BatchNorm in test mode, on the device. `replay` is
    the `replayed_pass` of this classifier and store; `progress` receives the images of each batch."""
    classifier.eval()
    if rows is None:
        rows = torch.arange(len(store), device=runtime.device)
    through = replay or functools.partial(
        pass_batch, classifier, store, spec=spec, runtime=runtime
    )
    batch_size = PASS_BATCH
    if store.is_features:
        batch_size = min(FEATURE_BATCH, max(1, len(rows)))
    weight, _ = classifier.head_tensors()
    classes, width = weight.shape
    features = torch.zeros(len(rows), width, device=runtime.device)
    logits = torch.zeros(len(rows), classes, device=runtime.device)
    multiplications = math.inf
    if store.is_features:
        multiplications = batch_size * store.values.shape[1] * width
    with threads_for(multiplications):
        for batch in own_batches(len(rows), batch_size, runtime):
            count = len(batch)
            samples = rows[batch]
            if (
                runtime.device.type == "cuda"
            ):  # a new size costs seconds: fill up the last batch
                samples = torch.cat([samples, samples[-1:].expand(batch_size - count)])
            values = through(samples)
            features[batch] = values[:count]
            logits[batch] = classifier.head(values)[:count]
            if progress is not None:
                progress(count)
    # each process filled its rows only
    return runtime.total(features), runtime.total(logits)


def own_batches(count: int, batch_size: int, runtime: Runtime) -> Iterator[Tensor]:
    """Positions of the batches of this process."""
    for start in range(0, count, batch_size)[runtime.rank :: runtime.world]:
        yield torch.arange(start, min(start + batch_size, count), device=runtime.device)


def replayed_pass(
    classifier: Classifier, store: Store, spec: InputSpec, runtime: Runtime, steps: int
) -> Stepper | None:
    """The batches of passes that run while `classifier` learns, captured if the step is. Only pixels
    that lie on the GPU can be gathered so."""
    if store.device.type != "cuda" or not worth_capturing(runtime, steps):
        return None
    batch = functools.partial(
        pass_batch,
        classifier,
        store,
        spec=spec,
        runtime=runtime,
        compiled=worth_compiling(runtime, steps),
    )
    return Stepper(batch, runtime, steps)


def pass_batch(
    network: Extractor,
    store: Store,
    rows: Tensor,
    spec: InputSpec,
    runtime: Runtime,
    *,
    compiled: bool = False,
) -> Tensor:
    """Features of one batch of a pass."""
    rows_of_batch = store.batch(rows, runtime.device)
    if store.is_features:
        return extract(network, rows_of_batch, runtime, compiled=compiled)
    return pass_images(network, rows_of_batch, spec, runtime, compiled=compiled)


def pass_images(
    network: Extractor,
    pictures: Tensor,
    spec: InputSpec,
    runtime: Runtime,
    *,
    compiled: bool = False,
) -> Tensor:
    """Features of the test views of pictures on the device; in halves if memory runs out."""
    try:
        return extract(network, test_view(pictures, spec), runtime, compiled=compiled)
    except torch.OutOfMemoryError:
        if len(pictures) < 2:
            raise
        log.warning(
            "the GPU ran out of memory on a batch of %d images: trying halves", len(pictures)
        )
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
    halves = pictures.split(-(-len(pictures) // 2))
    return torch.cat([pass_images(network, half, spec, runtime) for half in halves])
