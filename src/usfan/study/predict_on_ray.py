"""`predict` on Ray Data (extra usfan[cluster]): decoding and inference as two stages, on a cluster or on this machine.

    64 paths → decode: 64 × C·R·R bytes → infer: 64 records → the table, in the order of the images

A row of the data set is a batch of images. Decoding is a task, inference an actor that holds the model: one for each
core, or GPU. Ray repeats the batch of a worker that is lost, and starts another. The model's folder and the images must
lie where all machines can reach them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from usfan.budget import budget, multiplier
from usfan.config import RuntimeConfig
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.decoding.pool import decode_in_processes
from usfan.data.sources import ImageData
from usfan.data.views import InputSpec
from usfan.engine.runtime import Runtime, keep_freed_memory, start_runtime
from usfan.errors import ConfigError, DataError, UsfanError, option, printable
from usfan.maths.outputs import Outputs
from usfan.metrics.partial_table import BATCH, Record
from usfan.metrics.predictions import COLUMNS, batch_records
from usfan.progress import console
from usfan.store.model import SourceModel
from usfan.study.cluster import connected

INFERENCE = 0.5
DECODING = 0.25
"""Cores of a copy of the model, and of a task that decodes. Ray would join stages that ask for the same."""
OBJECT_STORE = 256 << 20
"""Bytes of shared memory of a local Ray: about twenty batches of pixels."""

Row = dict[str, Any]


def ray_records(
    address: str,
    computing: RuntimeConfig,
    load: Callable[[], SourceModel],
    model: SourceModel,
    data: ImageData,
    *,
    runtime: Runtime | None = None,
    total: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """As `prediction_records`. `load` loads the model in a worker."""
    if data.paths is None:
        raise ConfigError(f"{option('ray')} needs images in files")
    readable = 0
    decoding = functools.partial(decode, spec=model.spec)
    settings = (load, computing, total or len(data), multiplier())
    with contextlib.closing(rows(address, decoding, settings, data.paths)) as batches:
        for batch in batches:
            records = json.loads(batch["records"])
            if progress is not None:
                progress(len(records))
            for record in records:
                if record["error"] is None:
                    readable += 1
                elif data.strict:
                    raise UnreadableImage(record["path"], record["error"])
                else:
                    data.unreadable[record["path"]] = record["error"]
                yield record
    if not readable and total is None:
        raise DataError(f"none of the {len(data)} images of {data.name} can be read")


def rows(
    address: str,
    decoding: Callable[[Row], Row],
    settings: tuple[Callable[[], SourceModel], RuntimeConfig, int, float],
    paths: list[str],
) -> Generator[Row, None, None]:
    """The batches in order, from Ray. `settings` are those of `Inference`."""
    batches = []
    for start in range(0, len(paths), BATCH):
        batches.append({"paths": [os.fsencode(path) for path in paths[start : start + BATCH]]})
    with connected(address, OBJECT_STORE) as ray:
        data = ray_data()
        copies, shares = resources(ray, settings[1].device)
        decoded = data.from_items(batches, override_num_blocks=len(batches)).map(
            decoding, num_cpus=DECODING
        )
        predicted = decoded.map(
            Inference,
            fn_constructor_args=settings,
            concurrency=min(copies, len(batches)),
            **shares,
        )
        try:
            yield from predicted.iter_rows()
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UsfanError):
                raise cause from None
            last = str(error).strip().splitlines() or [""]
            raise OSError(f"{type(error).__name__}: {printable(last[-1], 300)}") from None


def resources(ray: Any, device: str) -> tuple[int, Mapping[str, float]]:
    """Number of copies of the model, and what each of them takes."""
    cluster = ray.cluster_resources()
    gpus = int(cluster.get("GPU", 0))
    if device == "cuda" and not gpus:
        raise ConfigError(f"{option('device', 'cuda')}: the Ray cluster has no GPU")
    if gpus and device != "cpu":
        return gpus, {"num_cpus": INFERENCE, "num_gpus": 1}
    return max(1, int(cluster.get("CPU", 1))), {"num_cpus": INFERENCE}


def ray_data() -> Any:
    """Ray Data, in order and without its displays."""
    try:
        data = importlib.import_module("ray.data")
    except ImportError:
        raise ConfigError(
            f"{option('ray')} needs Ray Data, which is not installed: pip install 'usfan[cluster]'"
        ) from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with warnings.catch_warnings():  # Ray warns of its own defaults
        warnings.simplefilter("ignore")
        context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    return data


def decode(row: Row, spec: InputSpec) -> Row:
    """In a task: the pixels of a batch, and why some of it cannot be read."""
    answers = list(
        decode_in_processes(
            [os.fsdecode(bytes(path)) for path in row["paths"]],
            size=spec.resize,
            channels=spec.channels,
            workers=1,
            resampling=spec.resampling,
        )
    )
    pixels = b"".join(answer for answer in answers if not isinstance(answer, str))
    reasons = [answer if isinstance(answer, str) else "" for answer in answers]
    return {"paths": row["paths"], "pixels": pixels, "reasons": reasons}


class Inference:
    """In an actor: a copy of the model, with the engine that it chose by its first batch."""

    def __init__(
        self,
        load: Callable[[], SourceModel],
        computing: RuntimeConfig,
        total: int,
        times: float,
    ) -> None:
        console.quiet = True
        self.runtime = start_runtime(computing)
        if self.runtime.device.type == "cpu":
            keep_freed_memory()
            torch.set_num_threads(1)
        self.load = load
        self.total = total
        self.times = times
        """What the user's --budget multiplies limits by."""
        self.stack = contextlib.ExitStack()
        self.outputs_of: Callable[[Tensor], Outputs] | None = None

    @functools.cached_property
    def model(self) -> SourceModel:
        """Loaded by the first batch: of an error in a constructor Ray does not say what it was."""
        model = self.load().to(self.runtime.device)
        model.classifier.eval()
        return model

    def __call__(self, row: Row) -> Row:
        with budget(self.times):
            return self.records_of(row)

    def records_of(self, row: Row) -> Row:
        paths = [os.fsdecode(bytes(path)) for path in row["paths"]]
        errors = [str(reason) for reason in row["reasons"]]
        readable = [path for path, error in zip(paths, errors, strict=True) if not error]
        predicted = iter(self.predicted(bytes(row["pixels"]), readable))
        records = []
        for path, error in zip(paths, errors, strict=True):
            lost = dict.fromkeys(COLUMNS) | {"path": path, "error": error}
            records.append(lost if error else next(predicted))
        return {"records": json.dumps(records)}

    @torch.no_grad()
    def predicted(self, content: bytes, paths: list[str]) -> Iterable[Record]:
        """A record for each picture."""
        if not paths:
            return ()
        spec = self.model.spec
        pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels = pixels.view(len(paths), spec.channels, spec.resize, spec.resize)
        pixels = pixels.to(self.runtime.device)
        if self.outputs_of is None:
            opened = self.model.outputs_pass(self.runtime, pixels, self.total)
            self.outputs_of = self.stack.enter_context(opened)
        return batch_records(self.model, self.outputs_of(pixels), paths)
