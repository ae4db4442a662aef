"""Decode once: all readable images of a set as uint8 N×C×S×S, on the GPU, in host memory, or on the disk.

Their size decides where they go: on the device if they fit into half of its free memory, else in host memory under the
same share, else in a file that is mapped into memory. Later runs over the same images and settings use a file under
`cache_dir` again (see `row_cache`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import PIL
import torch
from torch import Tensor

from usfan.data import row_cache
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.memory import choose_place
from usfan.data.row_cache import RowCache, Skips
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.stream import stream


def open_store(
    data: ImageData,
    *,
    size: int,
    channels: int = 3,
    resampling: str = "bilinear",
    device: torch.device | str = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Decode all images of `data` to size×size, or read them from the cache of an earlier run.

    Without `cache_dir` the images go to a file only if they do not fit in memory: under $USFAN_CACHE, or
    ~/.cache/usfan. `workers` and `progress` are those of `stream`.
    """
    device = torch.device(device)
    shape = (channels, size, size)
    readable: set[int] = set()

    def batches(skips: Skips) -> Iterator[Tensor]:
        for index, pixels in stream(
            data,
            size=size,
            channels=channels,
            resampling=resampling,
            batch_size=row_cache.CHECKED,
            workers=workers,
            progress=progress,
        ):
            readable.update(index.tolist())
            yield pixels
        for position in range(len(data)):
            if position not in readable:
                skips.append((position, data.unreadable[data.where(position)]))

    if cache_dir is None:
        place = choose_place(len(data) * channels * size * size, device)
        if place is not None:
            room = torch.empty((len(data), *shape), dtype=torch.uint8, device=place)
            skips: Skips = []
            count = 0
            for batch in batches(skips):
                room[count : count + len(batch)] = batch
                count += len(batch)
            return _store(data, room[:count], skips, None)
    settings: list[object] = [
        data.fingerprint(),
        shape,
        row_cache.VERSION,
        ["pillow", PIL.__version__],
    ]
    if resampling != "bilinear":
        settings.append(resampling)
    key = row_cache.digest(settings)
    cache = RowCache(row_cache.cache_folder(cache_dir), key, len(data), shape, torch.uint8)
    values, skips = cache.read_or_build(device, batches)
    if progress is not None and not readable:
        progress(len(data))
    return _store(data, values, skips, key)


def _store(
    data: ImageData,
    values: Tensor,
    skips: Skips,
    key: str | None,
) -> Store:
    unreadable = {data.where(position): reason for position, reason in skips}
    if unreadable and data.strict:
        raise UnreadableImage(*next(iter(unreadable.items())))
    data.unreadable.update(unreadable)
    lost = {position for position, _ in skips}
    positions = torch.tensor([i for i in range(len(data)) if i not in lost])
    return store_of(data, values, positions, key)


def store_of(
    data: ImageData, values: Tensor, positions: Tensor, key: str | None = None
) -> Store:
    """The rows of the images at these positions; all others cannot be read, and `data.unreadable` says why."""
    part = data.subset(positions)
    lost = sorted(set(range(len(data))).difference(positions.tolist()))
    unreadable = {data.where(i): data.unreadable[data.where(i)] for i in lost}
    return Store(values, positions, part.labels, data.classes, part.paths, unreadable, key)
