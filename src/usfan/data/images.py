"""The pictures of an `ImageData`: in files or parts of them, in an array, or in a dataset object.

Each kind of `Images` gives a picture, upright, in mode RGB or L (`picture`; `side` is that of
`decode_file`), names a bad one by its file or place
(`where`), takes some of the pictures (`take`), and digests its content (`digest`), which keys the cache.

Arrays and tensors are N×H×W, N×H×W×C or N×C×H×W with C = 1 or 3; uint8, or floats in [0, 1].
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from usfan.data.decoding.decode import (
    FilePart,
    UnreadableImage,
    convert,
    decode_bytes,
    decode_file,
    decode_part,
)
from usfan.data.labels import LabelValues
from usfan.errors import DataError

ArrayLike = np.ndarray | torch.Tensor
CONTENT_SAMPLES = 32
"""Files that are read for the fingerprint of a folder or list; of the others, only name, size and time count."""


BROKEN_FILE = (OSError, SyntaxError, Image.DecompressionBombError)
"""The errors that Pillow raises for broken files."""


Normalisation = tuple[torch.Tensor, torch.Tensor]
"""Mean and standard deviation, C×1×1."""


class Content(NamedTuple):
    """Images of a source, with names and labels."""

    images: Images
    labels: LabelValues | None = None
    classes: Sequence[str] | None = None
    """The names of numbered labels."""


class FileImages:
    """Pictures in files."""

    def __init__(self, paths: list[str]):
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def files(self) -> Sequence[str]:
        """What a decoding process is given."""
        return self.paths

    def picture(self, i: int, channels: int, side: int | None = None) -> Image.Image:
        return decode_file(self.paths[i], channels, side)

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
        step = max(1, len(self.paths) // CONTENT_SAMPLES)
        for i, path in enumerate(self.paths):
            hashed.update(os.fsencode(path.removeprefix(folder)))
            try:
                status = os.stat(path)
                hashed.update(f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
                if i % step == 0:
                    with open(path, "rb") as file:
                        hashed.update(file.read(2**20))
            except OSError:
                hashed.update(b"\0unreadable\0")
        return hashed.hexdigest()


class PackedImages:
    """Pictures in parts of files."""

    def __init__(self, files: Sequence[FilePart]):
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def picture(self, i: int, channels: int, side: int | None = None) -> Image.Image:
        return decode_part(self.files[i], channels, side)

    def where(self, i: int) -> str:
        return self.files[i].label

    def take(self, indices: Sequence[int]) -> PackedImages:
        return PackedImages([self.files[i] for i in indices])

    def digest(self) -> str:
        """That of the files, and the place and name of each picture in them."""
        paths = sorted({part.path for part in self.files})
        numbers = {path: number for number, path in enumerate(paths)}
        hashed = blake2b(FileImages(paths).digest().encode(), digest_size=16)
        for part in self.files:
            place = f"{numbers[part.path]} {part.offset} {part.size} {part.name}\0"
            hashed.update(place.encode())
        return hashed.hexdigest()


class SelectedImages:
    """Pictures at some positions of an array or a dataset."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.indices = np.arange(count)

    def __len__(self) -> int:
        return len(self.indices)

    def where(self, i: int) -> str:
        return f"{self.name}[{self.indices[i]}]"

    def take(self, indices: Sequence[int]) -> Self:
        part = copy.copy(self)
        part.indices = self.indices[np.asarray(indices, dtype=np.int64)]
        return part


class ArrayImages(SelectedImages):
    """Pictures in one uint8 array, N×H×W or N×H×W×3."""

    def __init__(self, pixels: np.ndarray, name: str) -> None:
        super().__init__(name, len(pixels))
        self.pixels = pixels

    def picture(self, i: int, channels: int, side: int | None = None) -> Image.Image:
        return convert(Image.fromarray(self.pixels[self.indices[i]]), self.where(i), channels)

    def fits(self, size: int, channels: int) -> bool:
        """Whether the pictures have this form already."""
        shape = (size, size) if channels == 1 else (size, size, 3)
        return self.pixels.shape[1:] == shape

    def planes(self, i: int) -> bytes:
        """The pixels channel by channel, of pictures that need no conversion."""
        picture: np.ndarray = self.pixels[self.indices[i]]
        return picture.tobytes() if picture.ndim == 2 else np.moveaxis(picture, -1, 0).tobytes()

    def digest(self) -> str:
        """Digest of the shape and every byte."""
        hashed = blake2b(f"{len(self)}{self.pixels.shape[1:]}".encode(), digest_size=16)
        for start in range(0, len(self), 1024):
            hashed.update(self.pixels[self.indices[start : start + 1024]].tobytes())
        return hashed.hexdigest()


class DatasetImages(SelectedImages):
    """Pictures that a dataset object hands out, one item at a time: `dataset[i]` is an image, a tuple or a dict."""

    def __init__(
        self, dataset: Any, name: str, normalisation: Normalisation | None = None
    ) -> None:
        super().__init__(name, len(dataset))
        self.dataset = dataset
        self.normalisation = normalisation

    def picture(self, i: int, channels: int, side: int | None = None) -> Image.Image:
        where = self.where(i)
        try:
            image, _ = image_and_label(self.dataset[int(self.indices[i])])
            return as_picture(plain(image, self.normalisation), where, channels)
        except BROKEN_FILE as error:
            raise UnreadableImage(where, str(error) or type(error).__name__) from error

    def digest(self) -> str:
        """Decodes every picture."""
        hashed = blake2b(f"{len(self)}".encode(), digest_size=16)
        for i in range(len(self)):
            try:
                picture = self.picture(i, 3)
                hashed.update(f"{picture.size}".encode() + picture.tobytes())
            except UnreadableImage as error:
                hashed.update(f"unreadable {error.reason}".encode())
        return hashed.hexdigest()


Images = FileImages | PackedImages | ArrayImages | DatasetImages


def plain(image: Any, normalisation: Normalisation | None) -> Any:
    """An image without the normalisation of the dataset's transforms, which only tensors have."""
    if normalisation is None or not isinstance(image, torch.Tensor):
        return image
    mean, std = normalisation
    return (image * std + mean).clamp(0, 1)


def normalisation_of(dataset: Any) -> Normalisation | None:
    """Mean and standard deviation, C×1×1, of the last `Normalize` in the transforms of a dataset."""
    while isinstance(dataset, (Subset, DataLoader)):
        dataset = dataset.dataset
    steps = [getattr(dataset, "transform", None)]
    while steps:
        step = steps.pop()
        if type(step).__name__ == "Normalize":
            mean, std = (
                torch.as_tensor(getattr(step, name), dtype=torch.float32).view(-1, 1, 1)
                for name in ("mean", "std")
            )
            return mean, std
        steps += getattr(step, "transforms", [])
    return None


def image_and_label(item: Any) -> tuple[Any, Any]:
    """The image in an item of a dataset, and its label or None."""
    if isinstance(item, (tuple, list)) and item:
        return item[0], item[1] if len(item) > 1 else None
    if not isinstance(item, dict):
        return item, None
    label = item.get("label", item.get("labels"))
    for name in ("image", "img", "pixel_values", "jpg", "png"):
        if name in item:
            return item[name], label
    if "bytes" in item or "path" in item:
        return item, label
    fields = sorted(map(str, item))
    raise DataError(f"no image in an item with the fields {fields}: expected one named 'image'")


def as_picture(
    value: Any,
    where: str,
    channels: int,
) -> Image.Image:
    """A Pillow image, a path, the bytes of a file, Hugging Face's {bytes, path}, a tensor or an array."""
    if isinstance(value, Image.Image):
        return convert(value, where, channels)
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


def image_array(source: ArrayLike, name: str) -> np.ndarray:
    """uint8 N×H×W (grey) or N×H×W×3, from any of the layouts above. uint8 input is not copied.

    If both the second and the last axis could hold the channels, a tensor is read as N×C×H×W, an array as N×H×W×C.
    """
    array, channels_first = _numpy(source)
    if array.ndim not in (3, 4):
        raise DataError(f"{name} has shape {_shape(array)}: expected N×H×W, N×H×W×C or N×C×H×W")
    if array.ndim == 3 and len(array) > 1 and array.shape[-1] == 3 and array.shape[1] != 3:
        raise DataError(
            f"{name} has shape {_shape(array)}, which looks like one image: give N×H×W×3 (array[None])"
        )
    if 0 in array.shape:
        raise DataError(f"{name} holds no images, or no pixels: its shape is {_shape(array)}")
    return _as_uint8(_channels_last(array, channels_first, name), name)


def one_image(source: ArrayLike, where: str) -> np.ndarray:
    """uint8 H×W or H×W×3, from one item of a dataset."""
    if not isinstance(source, ArrayLike):
        raise DataError(
            f"{where} is a {type(source).__name__}: expected a Pillow image, an array, a tensor or a path"
        )
    image: np.ndarray = image_array(source[None], where)[0]
    return image


def _as_uint8(array: np.ndarray, name: str) -> np.ndarray:
    """uint8 as it is; floats in [0, 1] times 255, rounded. Anything else is refused: its scale is unknown."""
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise DataError(f"{name} is {array.dtype}: expected uint8, or floats in [0, 1]")
    low = array.min()
    high = array.max()
    if not (low >= 0 and high <= 1):  # NaN is neither
        raise DataError(
            f"{name} holds floats from {low:.3g} to {high:.3g}: expected floats in [0, 1], or uint8; "
            "rescale them, and take the normalisation out of the transforms: it is part of the model, "
            "spec=usfan.InputSpec(mean=…, std=…) in usfan.attach_posterior"
        )
    result = np.empty(array.shape, np.uint8)
    for row, image in zip(result, array, strict=True):  # one by one: no second copy in floats
        row[:] = np.round(image.astype(np.float32) * 255)
    return result


def _numpy(source: ArrayLike) -> tuple[np.ndarray, bool]:
    """The values as numpy, and whether the channels more likely come first."""
    if isinstance(source, np.ndarray):
        return source, False
    tensor = source.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy(), True


def _channels_last(
    array: np.ndarray,
    channels_first: bool,
    name: str,
) -> np.ndarray:
    """N×H×W (grey) or N×H×W×3."""
    if array.ndim == 3:
        return array
    first = array.shape[1] in (1, 3)
    last = array.shape[3] in (1, 3)
    if not first and not last:
        raise DataError(
            f"{name} has shape {_shape(array)}: expected 1 or 3 channels, N×H×W×C or N×C×H×W"
        )
    if first and (channels_first or not last):
        array = array.transpose(0, 2, 3, 1)
    return array[..., 0] if array.shape[3] == 1 else array


def _shape(array: np.ndarray) -> str:
    return "×".join(map(str, array.shape)) or "()"
