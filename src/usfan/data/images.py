"""Where the pictures of an `ImageData` come from: files, an array, or a dataset object.

The three kinds share one small interface, `Images`. Each also names a bad picture (`where`), and can
digest its content, which keys the cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from usfan.data.arrays import one_image
from usfan.data.decoding.decode import UnreadableImage, convert, decode_bytes, decode_file
from usfan.errors import DataError

CONTENT_SAMPLES = 32
"""How many files are read for the fingerprint of a folder or list; of the others, only name, size and time count."""


class Images(Protocol):
    def __len__(self) -> int: ...

    def picture(self, i: int, channels: int) -> Image.Image:
        """Picture `i`, upright, in mode RGB or L."""

    def where(self, i: int) -> str:
        """The file, or the place in the dataset."""

    def take(self, indices: Sequence[int]) -> Images: ...

    def digest(self) -> str:
        """A hex digest of the content."""


class FileImages:
    """Pictures in files."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def picture(self, i: int, channels: int) -> Image.Image:
        return decode_file(self.paths[i], channels)

    def where(self, i: int) -> str:
        return self.paths[i]

    def take(self, indices: Sequence[int]) -> FileImages:
        return FileImages([self.paths[i] for i in indices])

    def digest(self) -> str:
        """Of every file: its path below the common folder, its size and its time of change; and of `CONTENT_SAMPLES`
        files, evenly spread, the first MiB. The samples tell apart two sets with the same names, sizes and times
        (bitmaps unpacked from archives). A single file replaced under the same size and time goes unseen."""
        hashed = blake2b(digest_size=16)
        folder = common_folder(self.paths)
        for path in self.paths:
            try:
                status = os.stat(path)
                facts = f"\0{status.st_size}\0{status.st_mtime_ns}\0"
            except OSError:
                facts = "\0missing\0"
            hashed.update(os.fsencode(below(path, folder)) + facts.encode())
        step = max(1, len(self.paths) // CONTENT_SAMPLES)
        for path in self.paths[::step]:
            try:
                with open(path, "rb") as file:
                    hashed.update(file.read(2**20))
            except OSError:
                hashed.update(b"\0unreadable\0")
        return hashed.hexdigest()


class ArrayImages:
    """Pictures in one uint8 array, N×H×W or N×H×W×3."""

    def __init__(self, pixels: np.ndarray, name: str, indices: np.ndarray | None = None):
        self.pixels = pixels
        self.name = name
        self.indices = np.arange(len(pixels)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, i: int, channels: int) -> Image.Image:
        return convert(Image.fromarray(self.pixels[self.indices[i]]), self.where(i), channels)

    def fits(self, size: int, channels: int) -> bool:
        """Whether the pictures have this form already."""
        return self.pixels.shape[1:] == ((size, size) if channels == 1 else (size, size, 3))

    def rows(self, positions: Sequence[int]) -> Tensor:
        """uint8 n×C×H×W at once, for pictures that need no conversion."""
        rows = torch.from_numpy(self.pixels[self.indices[np.asarray(positions, dtype=np.int64)]])
        return rows[:, None] if rows.ndim == 3 else rows.permute(0, 3, 1, 2)

    def where(self, i: int) -> str:
        return f"{self.name}[{self.indices[i]}]"

    def take(self, indices: Sequence[int]) -> ArrayImages:
        return ArrayImages(self.pixels, self.name, self.indices[np.asarray(indices, dtype=np.int64)])

    def digest(self) -> str:
        """Digest of the shape and every byte."""
        hashed = blake2b(f"{len(self)}{self.pixels.shape[1:]}".encode(), digest_size=16)
        for start in range(0, len(self), 1024):
            hashed.update(self.pixels[self.indices[start : start + 1024]].tobytes())
        return hashed.hexdigest()


class DatasetImages:
    """Pictures that a dataset object hands out, one item at a time: `dataset[i]` is an image, a tuple or a dict."""

    def __init__(self, dataset: Any, name: str, column: str | None = None, indices: Sequence[int] | None = None):
        self.dataset = dataset
        self.name = name
        self.column = column
        self.indices: Sequence[int] = range(len(dataset)) if indices is None else indices

    def __len__(self) -> int:
        return len(self.indices)

    def picture(self, i: int, channels: int) -> Image.Image:
        where = self.where(i)
        try:
            value = image_of(self.dataset[self.indices[i]], self.column)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises for broken files
            raise UnreadableImage(where, str(error) or type(error).__name__) from error
        return as_picture(value, where, channels)

    def where(self, i: int) -> str:
        return f"{self.name}[{self.indices[i]}]"

    def take(self, indices: Sequence[int]) -> DatasetImages:
        return DatasetImages(self.dataset, self.name, self.column, [self.indices[i] for i in indices])

    def digest(self) -> str:
        """Uses Hugging Face's own fingerprint if there is one, else decodes every picture."""
        hashed = blake2b(f"{len(self)}".encode(), digest_size=16)
        own = getattr(self.dataset, "_fingerprint", None)
        if isinstance(own, str):
            hashed.update(f"{own}{self.column}{list(self.indices)}".encode())
            return hashed.hexdigest()
        for i in range(len(self)):
            try:
                picture = self.picture(i, 3)
                hashed.update(f"{picture.size}".encode() + picture.tobytes())
            except UnreadableImage as error:
                hashed.update(f"unreadable {error.reason}".encode())
        return hashed.hexdigest()


def image_of(item: Any, column: str | None = None) -> Any:
    """The image in an item of a dataset."""
    if isinstance(item, dict):
        names = (column,) if column else ("image", "img", "pixel_values", "jpg", "png")
        for name in names:
            if name in item:
                return item[name]
        if "bytes" in item or "path" in item:
            return item
        raise DataError(f"no image in an item with the fields {sorted(map(str, item))}: expected one named 'image'")
    return item[0] if isinstance(item, (tuple, list)) and len(item) else item


def as_picture(value: Any, where: str, channels: int) -> Image.Image:
    """A Pillow image, a path, the bytes of a file, Hugging Face's {bytes, path}, a tensor or an array."""
    if isinstance(value, Image.Image):
        try:
            return convert(value, where, channels)
        except (OSError, SyntaxError) as error:
            raise UnreadableImage(where, str(error)) from error
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, (str, os.PathLike)):
        return decode_file(os.fspath(value), channels)
    if isinstance(value, (bytes, bytearray)):
        return decode_bytes(bytes(value), where, channels)
    return convert(Image.fromarray(one_image(value, where)), where, channels)


def common_folder(paths: list[str]) -> str:
    """The deepest folder that holds all files; absolute paths."""
    return os.path.commonpath([os.path.dirname(path) for path in paths])


def below(path: str, folder: str) -> str:
    """The part of an absolute path below a folder that holds it."""
    return path[len(folder) :].lstrip(os.sep)
