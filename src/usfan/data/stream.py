"""Decode a set of images once, in order, in parallel, with memory that does not grow with their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from usfan.data.decoding.decode import UnreadableImage, one_line, squared, to_tensor
from usfan.data.decoding.pool import CHUNK, decode_in_processes
from usfan.data.images import ArrayImages, FileImages
from usfan.data.sources import ImageData
from usfan.errors import DataError

SMALL = 256
"""Fewer images than this are decoded by one process: starting others would take longer. None are decoded here, where
no limit on time and memory holds."""
MOST_WORKERS = 8


class Skipped(NamedTuple):
    """An image that could not be decoded, and why."""

    path: str
    reason: str


class NothingReadable(DataError):
    """Not one of the images asked for can be decoded."""


class _Chunk(NamedTuple):
    positions: list[int]
    reasons: list[str | None]
    pixels: Tensor
    """uint8 n×C×S×S; rows with a reason hold nothing of use. May be overwritten once the next chunk is asked for."""


def stream(
    data: ImageData,
    *,
    size: int,
    channels: int = 3,
    batch_size: int = 64,
    workers: int | None = None,
    indices: Sequence[int] | Tensor | None = None,
    skipped: list[Skipped] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (LongTensor[B] positions in `data`, uint8 B×C×size×size), in the order of `indices` (all, if None).

    Images are squashed to size×size. All batches but the last are full. Unreadable images are left out, appended to
    `skipped` and noted in `data.unreadable`; with `data.strict` the first one is raised, and when none can be read
    `NothingReadable` is.
    Files are decoded by `workers` processes (None: one per core, at most 8, one for small sets; 0: in this process,
    where a file that stalls its decoder is not stopped).
    Arrays and dataset objects are always read in this process: they cannot be handed to another without copying them.
    `progress` is called with the number of images just dealt with.
    """
    if size < 1 or batch_size < 1:
        raise DataError(f"size and batch_size must be at least 1, not {size} and {batch_size}")
    if channels not in (1, 3):
        raise DataError(f"channels must be 1 or 3, not {channels}")
    order = list(range(len(data))) if indices is None else [int(i) for i in indices]
    if order and not 0 <= min(order) <= max(order) < len(data):
        raise DataError(
            f"{data.name} has {len(data)} images: indices must be from 0 to {len(data) - 1}"
        )
    lost: list[Skipped] = [] if skipped is None else skipped
    before = len(lost)
    with closing(_chunks(data, order, size, channels, workers)) as chunks:
        yield from _batches(chunks, data, batch_size, lost, progress)
    if order and len(lost) - before == len(order):
        path, reason = lost[before]
        raise NothingReadable(
            f"none of the {len(order)} images of {data.name} can be read: {one_line(path)} ({reason})"
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


def worker_count(
    data: ImageData,
    count: int,
    workers: int | None,
) -> int:
    """Number of processes that decode `count` images of the data; 0 is this process."""
    if workers is not None and workers < 0:
        raise DataError(f"workers must be 0 or more, not {workers}")
    if not isinstance(data.images, FileImages):
        return 0
    if workers is not None:
        return workers
    if count < SMALL:
        return 1
    cores = (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    return min(len(cores), MOST_WORKERS)


def _batches(
    chunks: Iterator[_Chunk],
    data: ImageData,
    batch_size: int,
    lost: list[Skipped],
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Leave out what could not be read, and cut what remains into batches of one size."""
    index = torch.empty(0, dtype=torch.long)
    pixels: list[Tensor] = []
    for chunk in chunks:
        readable = []
        for row, (position, reason) in enumerate(
            zip(chunk.positions, chunk.reasons, strict=True)
        ):
            if reason is None:
                readable.append(row)
                continue
            where = data.where(position)
            if data.strict:
                raise UnreadableImage(where, reason)
            lost.append(Skipped(where, reason))
            data.unreadable[where] = reason
        index = torch.cat([index, torch.tensor(chunk.positions)[readable]])
        pixels.append(chunk.pixels[readable])  # a copy: the chunk may be overwritten
        if len(index) >= batch_size:
            stop = len(index) - len(index) % batch_size
            rows = torch.cat(pixels)
            yield from zip(
                index[:stop].split(batch_size), rows[:stop].split(batch_size), strict=True
            )
            index = index[stop:]
            pixels = [rows[stop:]]
        if progress is not None:
            progress(len(chunk.positions))
    if len(index):
        yield index, torch.cat(pixels)


def _chunks(
    data: ImageData,
    order: list[int],
    size: int,
    channels: int,
    workers: int | None,
) -> Generator[_Chunk, None, None]:
    processes = worker_count(data, len(order), workers)
    images = data.images
    if processes and isinstance(images, FileImages):
        paths = [images.paths[i] for i in order]
        decoding = decode_in_processes(paths, size=size, channels=channels, workers=processes)
        with closing(decoding) as decoded:
            for start, reasons, pixels in decoded:
                yield _Chunk(order[start : start + len(reasons)], reasons, pixels)
    elif isinstance(images, ArrayImages) and images.fits(size, channels):
        for start in range(0, len(order), 1024):
            positions = order[start : start + 1024]
            yield _Chunk(positions, [None] * len(positions), images.rows(positions))
    else:
        for start in range(0, len(order), CHUNK):
            yield _decoded_here(data, order[start : start + CHUNK], size, channels)


def _decoded_here(
    data: ImageData,
    positions: list[int],
    size: int,
    channels: int,
) -> _Chunk:
    pixels = torch.empty((len(positions), channels, size, size), dtype=torch.uint8)
    reasons: list[str | None] = []
    for row, position in enumerate(positions):
        try:
            pixels[row] = to_tensor(squared(data.images.picture(position, channels), size))
            reasons.append(None)
        except UnreadableImage as error:
            reasons.append(error.reason)
    return _Chunk(positions, reasons, pixels)
