"""Decode a set of images once, in order, in parallel, with memory that does not grow with their number."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from usfan.data.decoding.decode import UnreadableImage, one_line, squared, to_tensor
from usfan.data.decoding.pool import CHUNK, can_start, decode_in_processes
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
        raise DataError(f"{data.name} has {len(data)} images: indices must be from 0 to {len(data) - 1}")
    lost: list[Skipped] = [] if skipped is None else skipped
    before = len(lost)
    with closing(_chunks(data, order, size, channels, workers)) as chunks:
        yield from _batches(chunks, data, batch_size, lost, progress)
    if order and len(lost) - before == len(order):
        path, reason = lost[before]
        raise NothingReadable(
            f"none of the {len(order)} images of {data.name} can be read: {one_line(path)} ({reason})"
        )


def report_skipped(unreadable: Mapping[str, str], total: int, most: int | None = None) -> list[str]:
    """Lines for the user: each file by name (the first `most`), and how many of how many at the end."""
    if not unreadable:
        return []
    lines = [f"cannot read {one_line(path)}: {reason}" for path, reason in itertools.islice(unreadable.items(), most)]
    if len(lines) < len(unreadable):
        lines.append(f"… and {len(unreadable) - len(lines)} more")
    return [*lines, f"skipped {len(unreadable)} unreadable file{'s' if len(unreadable) > 1 else ''} of {total} images"]


def worker_count(data: ImageData, count: int, workers: int | None) -> int:
    """How many processes to decode `count` images of the data with; 0 is this one."""
    if workers is not None and workers < 0:
        raise DataError(f"workers must be 0 or more, not {workers}")
    if not isinstance(data.images, FileImages) or not can_start():
        return 0
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if count < SMALL else min(cores, MOST_WORKERS)


def _batches(
    chunks: Iterator[_Chunk],
    data: ImageData,
    batch_size: int,
    lost: list[Skipped],
    progress: Callable[[int], None] | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Leave out what could not be read, and cut what remains into batches of one size."""
    index, pixels, filled = None, None, 0
    for chunk in chunks:
        for position, reason in zip(chunk.positions, chunk.reasons, strict=True):
            if reason is not None:
                if data.strict:
                    raise UnreadableImage(data.where(position), reason)
                lost.append(Skipped(data.where(position), reason))
                data.unreadable[data.where(position)] = reason
        good = [row for row, reason in enumerate(chunk.reasons) if reason is None]
        start = 0
        while start < len(good):
            if index is None or pixels is None:
                index = torch.empty(batch_size, dtype=torch.long)
                pixels = chunk.pixels.new_empty((batch_size, *chunk.pixels.shape[1:]))
            rows = good[start : start + batch_size - filled]
            end = filled + len(rows)
            index[filled:end] = torch.tensor([chunk.positions[row] for row in rows])
            whole = len(rows) == rows[-1] - rows[0] + 1  # mostly: then one copy does
            pixels[filled:end] = chunk.pixels[rows[0] : rows[-1] + 1] if whole else chunk.pixels[rows]
            start, filled = start + len(rows), end
            if filled == batch_size:
                yield index, pixels
                index, pixels, filled = None, None, 0
        if progress is not None:
            progress(len(chunk.positions))
    if index is not None and pixels is not None and filled:
        yield index[:filled], pixels[:filled]


def _chunks(
    data: ImageData, order: list[int], size: int, channels: int, workers: int | None
) -> Generator[_Chunk, None, None]:
    count = worker_count(data, len(order), workers)
    images = data.images
    if count and isinstance(images, FileImages):
        paths = [images.paths[i] for i in order]
        with closing(decode_in_processes(paths, size=size, channels=channels, workers=count)) as decoded:
            for at, reasons, pixels in decoded:
                yield _Chunk(order[at : at + len(reasons)], reasons, pixels)
        return
    plain = isinstance(images, ArrayImages) and images.fits(size, channels)
    step = 1024 if plain else CHUNK
    for at in range(0, len(order), step):
        positions = order[at : at + step]
        if isinstance(images, ArrayImages) and plain:
            yield _Chunk(positions, [None] * len(positions), images.rows(positions))
        else:
            yield _decoded_here(data, positions, size, channels)


def _decoded_here(data: ImageData, positions: list[int], size: int, channels: int) -> _Chunk:
    pixels = torch.empty((len(positions), channels, size, size), dtype=torch.uint8)
    reasons: list[str | None] = []
    for row, position in enumerate(positions):
        try:
            pixels[row] = to_tensor(squared(data.images.picture(position, channels), size))
            reasons.append(None)
        except UnreadableImage as error:
            reasons.append(error.reason)
    return _Chunk(positions, reasons, pixels)
