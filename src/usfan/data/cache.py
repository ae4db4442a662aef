"""Decode once: all readable images of a set as uint8 N×C×S×S, on the GPU, in host memory, or on the disk.

Their size decides where they go: on the device if they fit into `memory_share` of its free memory, else in host memory
under the same share (pinned when the device is a GPU), else in a file that is mapped into memory. A file under
`cache_dir` is also kept, and used again by later runs over the same images and settings (see `cache_file`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import PIL
import torch
from torch import Tensor

from usfan.data import cache_file
from usfan.data.cache_file import Header
from usfan.data.decoding.decode import UnreadableImage
from usfan.data.memory import Place, choose_place
from usfan.data.sources import ImageData
from usfan.data.stream import Skipped, stream
from usfan.errors import ConfigError

Progress = Callable[[int], None] | None


@dataclass(frozen=True)
class PixelStore:
    """Decoded images, and what is known of each. N counts the readable ones."""

    pixels: Tensor
    """uint8 N×C×S×S, on `device`, in host memory, or mapped from a file."""
    kept: Tensor
    """LongTensor[N]: the positions of these images in the `ImageData`."""
    labels: Tensor | None = None
    """LongTensor[N], or None."""
    classes: tuple[str, ...] | None = None
    paths: list[str] | None = None
    skipped: list[Skipped] = field(default_factory=list)
    """The images that could not be read."""
    key: str | None = None
    """Names the images and how they were decoded, if they are kept in a cache folder."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        """Where the pixels lie."""
        return self.pixels.device

    def batch(self, index: Tensor, device: torch.device | str | None = None) -> Tensor:
        """uint8 B×C×S×S of the images at `index`, on `device` (by default where they lie).

        From host memory to a GPU the batch goes through pinned memory, and the copy does not wait.
        """
        device = self.device if device is None else torch.device(device)
        index = index.to(self.device)
        if self.device.type != "cpu" or device.type != "cuda":
            return self.pixels.index_select(0, index).to(device)
        gathered = torch.empty((len(index), *self.pixels.shape[1:]), dtype=torch.uint8, pin_memory=True)
        torch.index_select(self.pixels, 0, index, out=gathered)
        return gathered.to(device, non_blocking=True)


def open_store(
    data: ImageData,
    *,
    size: int,
    channels: int = 3,
    device: torch.device | str = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    memory_share: float = 0.5,
    workers: int | None = None,
    progress: Progress = None,
) -> PixelStore:
    """Decode all images of `data` to size×size, or take them from the file an earlier run kept.

    With `cache_dir` the decoded images are kept there. Without it they go to a file only when they do not fit in
    memory: under $USFAN_CACHE, or ~/.cache/usfan. `workers` and `progress` are those of `stream`.
    """
    if not 0 < memory_share <= 1:
        raise ConfigError(f"memory_share must be above 0 and at most 1, not {memory_share}")
    device = torch.device(device)
    build = _Build(data, size, channels, workers, progress)
    place = choose_place(len(data) * channels * size * size, device, memory_share)
    if cache_dir is None and place != "disk":
        return build.in_memory(_room(len(data), build.form, device, place))
    folder = Path(cache_dir or os.environ.get("USFAN_CACHE") or "~/.cache/usfan").expanduser()
    return build.from_file(folder, device, place)


class _Build:
    """One set of images with the settings they are decoded under."""

    def __init__(
        self,
        data: ImageData,
        size: int,
        channels: int,
        workers: int | None,
        progress: Progress,
    ):
        self.data = data
        self.form = (channels, size, size)
        self.workers = workers
        self.progress = progress

    def stream(self, skipped: list[Skipped]) -> Iterator[tuple[Tensor, Tensor]]:
        return stream(
            self.data,
            size=self.form[1],
            channels=self.form[0],
            batch_size=cache_file.CHECKED,
            workers=self.workers,
            skipped=skipped,
            progress=self.progress,
        )

    def in_memory(self, room: Tensor) -> PixelStore:
        skipped: list[Skipped] = []
        kept: list[Tensor] = []
        filled = 0
        for index, pixels in self.stream(skipped):
            room[filled : filled + len(index)] = pixels
            filled += len(index)
            kept.append(index)
        return self.store(room[:filled], torch.cat(kept), skipped)

    def from_file(self, folder: Path, device: torch.device, place: Place) -> PixelStore:
        key = self.key()
        path = folder / f"{key}.pixels"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(error, folder) from error
        with cache_file.locked(folder / f"{key}.lock") as alone:
            found = self.read(path, key, device, place)
            if found is not None:
                if self.progress is not None:
                    self.progress(len(self.data))
                return found
            self.write(path, key, alone)
            found = self.read(path, key, device, place)
        if found is None:
            raise OSError(errno.EIO, "the image cache cannot be read back right after it was written", str(path))
        return found

    def key(self) -> str:
        """Digest of the images and of everything that changes their pixels."""
        settings = [self.data.fingerprint(), self.form, cache_file.VERSION, ["pillow", PIL.__version__]]
        return blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    def read(self, path: Path, key: str, device: torch.device, place: Place) -> PixelStore | None:
        """The store in a kept file; None if there is none, or it is not what it should be."""
        room = None if place == "disk" else lambda count: _room(count, self.form, device, place)
        found = cache_file.read(path, key, len(self.data), self.form, room)
        return None if found is None else self.from_header(*found)

    def from_header(self, header: Header, pixels: Tensor) -> PixelStore:
        skipped = [Skipped(self.data.where(position), reason) for position, reason in header.dropped]
        if skipped and self.data.strict:
            raise UnreadableImage(*skipped[0])
        self.data.unreadable.update(skipped)
        keep = torch.ones(len(self.data), dtype=torch.bool)
        keep[[position for position, _ in header.dropped]] = False
        return self.store(pixels, keep.nonzero().flatten(), skipped, header.key)

    def write(self, path: Path, key: str, alone: bool) -> None:
        needed = len(self.data) * self.form[0] * self.form[1] * self.form[2]
        try:
            if alone:
                cache_file.remove_parts(path)
            free = shutil.disk_usage(path.parent).free
            if free < needed:
                what = f"No space left on device ({needed >> 20} MiB needed, {free >> 20} MiB free)"
                raise OSError(errno.ENOSPC, what)
            with cache_file.replacing(path) as file:
                self.fill(file, key)
        except OSError as error:
            raise _cannot_write(error, path) from error

    def fill(self, file: BinaryIO, key: str) -> None:
        writer = cache_file.Writer(file)
        skipped: list[Skipped] = []
        kept: list[Tensor] = []
        for index, pixels in self.stream(skipped):
            writer.append(pixels.cpu())
            kept.append(index)
        lost = sorted(set(range(len(self.data))) - set(torch.cat(kept).tolist()))
        writer.finish(key, self.form, [(i, entry.reason) for i, entry in zip(lost, skipped, strict=True)])

    def store(self, pixels: Tensor, kept: Tensor, skipped: list[Skipped], key: str | None = None) -> PixelStore:
        data = self.data
        labels = None if data.labels is None else data.labels[kept]
        paths = None if data.paths is None else [data.paths[i] for i in kept.tolist()]
        return PixelStore(pixels, kept, labels, data.classes, paths, skipped, key)


def _room(count: int, form: tuple[int, int, int], device: torch.device, place: Place) -> Tensor:
    where = device if place == "device" else torch.device("cpu")
    return torch.empty((count, *form), dtype=torch.uint8, device=where, pin_memory=place == "pinned")


def _cannot_write(error: OSError, path: Path) -> OSError:
    advice = "free some space, or choose another folder (cache_dir, or the variable USFAN_CACHE)"
    return OSError(error.errno, f"cannot write the image cache: {error.strerror or error}; {advice}", str(path))
