"""Decode a set of images once, in order, in parallel, with memory that does not grow with their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing

import torch
from torch import Tensor

from usfan.data.decoding.decode import UnreadableImage, one_line, planes, squared
from usfan.data.decoding.pool import decode_in_processes
from usfan.data.images import ArrayImages, FileImages, Images, PackedImages
from usfan.data.sources import ImageData
from usfan.errors import DataError

SMALL = 256
"""Fewer images than this are decoded by one process: starting others would take longer. None are decoded here, where
no limit on time and memory holds."""
MOST_WORKERS = 8


def stream(
    data: ImageData,
    *,
    size: int,
    channels: int = 3,
    resampling: str = "bilinear",
    batch_size: int = 64,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (LongTensor[B] positions in `data`, uint8 B×C×size×size), in order.

    Images are squashed to size×size, or cropped to it (`InputSpec.resampling`). All batches but the last are full.
    Unreadable images are left out and noted in `data.unreadable`; with `data.strict` the first one is raised. It is
    an error if none can be read.
    Files are decoded by `workers` processes (None: one per core, at most 8, one for small sets; 0: in this process,
    where a file that stalls its decoder is not stopped).
    Arrays and dataset objects are always read in this process: they cannot be handed to another without copying them.
    `progress` is called with the number of images just dealt with.
    """
    if size < 1 or batch_size < 1:
        raise DataError(f"size and batch_size must be at least 1, not {size} and {batch_size}")
    if channels not in (1, 3):
        raise DataError(f"channels must be 1 or 3, not {channels}")
    processes = worker_count(data, workers)
    lost = 0
    index: list[int] = []
    batch: list[bytes | bytearray] = []
    with closing(_pictures(data.images, size, channels, resampling, processes)) as pictures:
        for position, picture in enumerate(pictures):
            if progress is not None:
                progress(1)
            if isinstance(picture, str):
                where = data.where(position)
                if data.strict:
                    raise UnreadableImage(where, picture)
                data.unreadable[where] = picture
                lost += 1
                continue
            index.append(position)
            batch.append(picture)
            if len(batch) == batch_size:
                yield torch.tensor(index), _tensor(batch, size, channels)
                index = []
                batch = []
    if batch:
        yield torch.tensor(index), _tensor(batch, size, channels)
    if lost == len(data):
        path = data.where(0)
        raise DataError(
            f"none of the {lost} images of {data.name} can be read: {one_line(path)} ({data.unreadable[path]})"
        )


def report_skipped(
    unreadable: Mapping[str, str],
    total: int,
    most: int | None = None,
) -> list[str]:
    """Lines for the user: each file by name (the first `most`), and how many of how many at the end."""
    if not unreadable:
        return []
    lines = [f"cannot read {one_line(path)}: {reason}" for path, reason in unreadable.items()]
    hidden = 0 if most is None else max(0, len(lines) - most)
    if hidden:
        lines[most:] = [f"… and {hidden} more"]
    noun = "file" if len(unreadable) == 1 else "files"
    return [*lines, f"skipped {len(unreadable)} unreadable {noun} of {total} images"]


def worker_count(data: ImageData, workers: int | None) -> int:
    """Number of processes that decode the images; 0 is this process."""
    if workers is not None and workers < 0:
        raise DataError(f"workers must be 0 or more, not {workers}")
    if not isinstance(data.images, (FileImages, PackedImages)):
        return 0
    if workers is not None:
        return workers
    if len(data) < SMALL:
        return 1
    cores = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    return min(len(cores), MOST_WORKERS)


def _tensor(batch: list[bytes | bytearray], size: int, channels: int) -> Tensor:
    """uint8 B×C×S×S. Bytes are joined by one thread; those of torch would wait for each other."""
    pixels = torch.frombuffer(bytearray().join(batch), dtype=torch.uint8)
    return pixels.view(-1, channels, size, size)


def _pictures(
    images: Images,
    size: int,
    channels: int,
    resampling: str,
    processes: int,
) -> Generator[bytes | bytearray | str, None, None]:
    """The C·S·S bytes of each image, or the reason why it cannot be read."""
    if processes and isinstance(images, (FileImages, PackedImages)):
        decoding = decode_in_processes(
            images.files, size=size, channels=channels, workers=processes, resampling=resampling
        )
        with closing(decoding) as answers:
            yield from answers
    elif isinstance(images, ArrayImages) and images.fits(size, channels):
        yield from map(images.planes, range(len(images)))
    else:
        for i in range(len(images)):
            try:
                picture = planes(squared(images.picture(i, channels, size), size, resampling))
            except UnreadableImage as error:
                yield error.reason
            else:
                yield picture
