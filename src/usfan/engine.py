"""The step that both stages take, replayed as a CUDA graph on a GPU, and the pass over all of a data set.

On a GPU the first steps of each batch size run eagerly (they are real steps, and warm up), then the whole step (view,
forward, loss, backward, update) is captured once and replayed: nothing waits for the host inside an epoch. Where
capture fails the step goes on eagerly, and says so.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from usfan.data.cache import PixelStore, open_store
from usfan.data.views import InputSpec, test_view, train_view
from usfan.errors import ArtifactError
from usfan.models.classifier import Classifier
from usfan.progress import bar
from usfan.run import Checkpoint, RunFolder
from usfan.runtime import Runtime, permutation

log = logging.getLogger(__name__)

WARM_UP = 3
WORTH_CAPTURING = 50
WORTH_COMPILING = 30_000
"""Steps from which capturing and compiling pay under compile="auto"."""
TRY_KERNELS = False
"""Let cuDNN time its kernels for compiled steps."""


class Stepper:
    """Calls `step(*inputs)`; on a GPU, where it pays, replays it as a CUDA graph, one per batch size."""

    def __init__(self, step: Callable[..., Tensor], runtime: Runtime, steps: int) -> None:
        self.step, self.device = step, runtime.device
        self.capture = runtime.fast and (runtime.compile != "auto" or steps >= WORTH_CAPTURING)
        self.calls: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor]] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.capture:
            return self.step(*inputs)
        size = len(inputs[0])
        if size in self.graphs:
            graph, static, result = self.graphs[size]
            for there, here in zip(static, inputs, strict=True):
                there.copy_(here, non_blocking=True)
            graph.replay()
            return result.clone()
        self.calls[size] = self.calls.get(size, 0) + 1
        if self.calls[size] <= WARM_UP:
            return self._on_side_stream(inputs)
        return self._record(inputs)

    def _on_side_stream(self, inputs: tuple[Tensor, ...]) -> Tensor:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = self.step(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

    def _record(self, inputs: tuple[Tensor, ...]) -> Tensor:
        static = tuple(t.clone() for t in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize(self.device)
            gc.collect()  # an old graph freed in the middle of a capture would break it
            with torch.cuda.graph(graph):
                result = self.step(*static)
        except Exception as error:
            log.warning("the step could not be captured as a CUDA graph and runs eagerly: %s", error)
            self.capture = False
            torch.cuda.synchronize(self.device)
            return self.step(*inputs)
        self.graphs[len(inputs[0])] = (graph, static, result)
        graph.replay()
        return result.clone()


class Feeder:
    """Training views of a store: gathered on the device where the pixels lie there, else staged batch by batch."""

    def __init__(self, store: PixelStore, spec: InputSpec, seed: int, runtime: Runtime) -> None:
        self.store, self.spec, self.seed, self.device = store, spec, seed, runtime.device
        self.resident = store.pixels.device.type == runtime.device.type
        self.epoch = torch.zeros((), dtype=torch.long, device=runtime.device)

    def inputs(self, samples: Tensor) -> tuple[Tensor, ...]:
        """What the step is called with: sample numbers and, where they must be brought, their pixels."""
        samples = samples.to(self.device)
        return (samples,) if self.resident else (samples, self.store.batch(samples, self.device))

    def view(self, samples: Tensor, staged: Tensor | None = None) -> Tensor:
        if len(samples) == 0:  # fewer samples in the last batch than processes
            return torch.empty(0, self.spec.channels, self.spec.size, self.spec.size, device=self.device)
        if staged is None:
            return train_view(self.store.pixels, samples, samples, self.spec, self.seed, self.epoch)
        rows = torch.arange(len(samples), device=self.device)
        return train_view(staged, rows, samples, self.spec, self.seed, self.epoch)


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
            decode=runtime.decode,
        )


def worth_compiling(runtime: Runtime, steps: int) -> bool:
    return runtime.fast and (runtime.compile == "on" or (runtime.compile == "auto" and steps >= WORTH_COMPILING))


@functools.cache
def compiled_forward() -> Callable:
    """One compiled extractor for all classifiers: networks of the same shape, in either stage, share its code."""
    torch._dynamo.config.recompile_limit = 64  # a study has several networks
    return torch.compile(lambda classifier, images: classifier.extract(images), dynamic=False)


def forward(
    classifier: Classifier, images: Tensor, runtime: Runtime, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """(features, logits) in float32, whatever the precision of the network."""
    if runtime.device.type == "cuda":
        images = images.contiguous(memory_format=torch.channels_last)
        torch.backends.cudnn.benchmark = compiled and TRY_KERNELS
    with runtime.autocast():
        features = compiled_forward()(classifier, images) if compiled else classifier.extract(images)
    features = features.float()
    return features, classifier.head(features)


def prepare(classifier: Classifier, runtime: Runtime) -> Classifier:
    """On the device, channels last where that is faster; with several processes, BatchNorm over the global batch."""
    classifier = classifier.to(runtime.device)
    if runtime.device.type == "cuda":
        classifier = classifier.to(memory_format=torch.channels_last)
    if runtime.world > 1:
        from usfan.models.sync_norm import sync_batch_norms

        sync_batch_norms(classifier)
    return classifier


def load_checkpoint(run: RunFolder | None, runtime: Runtime) -> Checkpoint | None:
    """The newest checkpoint of the run folder, which every process reads; None where there is none."""
    found = None if run is None else run.load_checkpoint()
    if not runtime.agree(found[0] if found else 0):
        raise ArtifactError(
            "the processes found different checkpoints: the run folder must lie where all nodes can read it"
        )
    return found


def epoch_batches(count: int, batch_size: int, seed: int, epoch: int, runtime: Runtime) -> Iterator[tuple[Tensor, int]]:
    """This process's rows of each global batch, with the size of the global batch.

    The last batch is filled up with the first samples of the epoch: batches are all of one size, which a GPU sets up
    once (seconds for each new size), and the diversity of a handful of samples is never asked for.
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


def set_mode(classifier: nn.Module, *, training: bool, batch_norm: str = "train") -> None:
    """train/eval, with BatchNorm kept at the source's statistics under batch_norm="frozen"."""
    classifier.train(training)
    if training and batch_norm == "frozen":
        from usfan.models.classifier import batch_norms

        for layer in batch_norms(classifier):
            layer.eval()


@torch.no_grad()
def forward_store(
    classifier: Classifier,
    store: PixelStore,
    spec: InputSpec,
    runtime: Runtime,
    *,
    rows: Tensor | None = None,
    batch_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """Features N×D and logits N×K of test views (of `rows`, or all), BatchNorm in test mode, on the device."""
    classifier.eval()
    if rows is None:
        rows = torch.arange(len(store), device=runtime.device)
    count = len(rows)
    parts: list[tuple[Tensor, Tensor]] = []
    own = range(runtime.rank * batch_size, count, runtime.world * batch_size)
    for start in own:
        batch = rows[start : start + batch_size]
        images = test_view(store.batch(pad_rows(batch, batch_size, runtime), runtime.device), spec)
        features, logits = forward(classifier, images, runtime)
        parts.append((features[: len(batch)], logits[: len(batch)]))
    if runtime.world == 1:
        return torch.cat([f for f, _ in parts]), torch.cat([z for _, z in parts])
    return gather_parts(classifier, parts, list(own), count, runtime)


def pad_rows(rows: Tensor, size: int, runtime: Runtime) -> Tensor:
    """On a GPU, `size` rows, the last one repeated: a new batch size costs it seconds. Elsewhere as they are."""
    if runtime.device.type != "cuda" or len(rows) == size:
        return rows
    return torch.cat([rows, rows[-1:].expand(size - len(rows))])


def gather_parts(
    classifier: Classifier, parts: list[tuple[Tensor, Tensor]], starts: list[int], count: int, runtime: Runtime
) -> tuple[Tensor, Tensor]:
    """Each process fills its own rows of a table of zeros; the sum of the tables is the whole."""
    weight, _ = classifier.head_tensors()
    features = torch.zeros(count, weight.shape[1], device=runtime.device)
    logits = torch.zeros(count, weight.shape[0], device=runtime.device)
    for start, (f, z) in zip(starts, parts, strict=True):
        features[start : start + len(f)], logits[start : start + len(z)] = f, z
    return runtime.total(features), runtime.total(logits)
