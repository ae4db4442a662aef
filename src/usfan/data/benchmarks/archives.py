"""Benchmarks that are published as arrays: MNIST, USPS, SVHN, CIFAR-10 and STL-10, each in the formats it comes in.

A path (of the training file, or of the folder with all files) identifies the format. Its function reads the pixels,
uint8 N×H×W or N×H×W×3, and the labels of the split `train` or `test`. CIFAR-10's Python version is a pickle, and
pickles are never read: its binary version holds the same images.

CIFAR9 and STL9 share nine classes, in CIFAR's order. Images of the tenth (frog in one, monkey in the other) are left
out.
"""

import bz2
import gzip
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from usfan.budget import allowed, check_cost
from usfan.errors import DataError, printable

CIFAR9_OF_CIFAR10 = np.array([0, 1, 2, 3, 4, 5, -1, 6, 7, 8])
"""CIFAR-10: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck."""
CIFAR9_OF_STL10 = np.array([0, 2, 1, 3, 4, 5, 6, -1, 7, 8])
"""STL-10, from label 1: airplane, bird, car, cat, deer, dog, horse, monkey, ship, truck."""

PixelsAndLabels = tuple[np.ndarray, np.ndarray]


def read_images(place: Path, split: str) -> PixelsAndLabels:
    """Pixels and int64 labels of one split, in the order of the file, without the images that the benchmark leaves
    out."""
    try:
        pixels, labels = _reader(place)(place, split)
    except DataError:
        raise
    except FileNotFoundError as error:
        file = error.filename or place
        raise DataError(f"{file} is missing: unpack the whole archive there") from error
    except (
        Exception
    ) as error:  # numpy, scipy and the unpackers raise nearly every type there is
        reason = f"{type(error).__name__}: {printable(error, 200)}"
        raise DataError(f"cannot read {place} ({reason}): fetch it again") from error
    if len(pixels) != len(labels):
        counts = f"{len(pixels)} {split} images, but {len(labels)} labels"
        raise DataError(f"{place}: {counts}: the copy is damaged")
    wanted = labels >= 0
    return (pixels, labels) if wanted.all() else (pixels[wanted], labels[wanted])


def _reader(place: Path) -> Callable[[Path, str], PixelsAndLabels]:
    for ending, reader in READERS.items():
        if place.name.removesuffix(".gz").endswith(ending):
            return reader
    raise DataError(
        f"{place} is in no format that is read here; known are {', '.join(READERS)}"
    )


MOST_BYTES = 1 << 30
"""Limit of an unpacked file: four times SVHN's."""
MOST_RATIO = 50
"""Limit of the ratio of unpacked to packed size: MNIST's labels come to 3, its images to 5."""
FREE_BYTES = 1 << 20
MOST_ROWS = 1_000_000


def limit_of(packed_size: int) -> int:
    """The bytes that a packed file of this size may unpack to."""
    return min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * packed_size))


def check_size(path: Path, unpacked_size: int, packed_size: int) -> None:
    check_cost(f"{path} unpacks to", unpacked_size, limit_of(packed_size), "bytes", DataError)


def unpacked(file: Path) -> bytes:
    """The content of a plain, .gz or .bz2 file: no more of it is unpacked than the limit."""
    size = os.stat(file).st_size
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(file.suffix, open)(file, "rb") as content:
        raw: bytes = content.read(allowed(limit_of(size)) + 1)
    check_size(file, len(raw), size)
    return raw


def check_mat(file: Path) -> None:
    """The parts of a MATLAB file are packed one by one: unpack each and discard it before scipy trusts its sizes."""
    size = os.stat(file).st_size
    total = 0
    with open(file, "rb") as content:
        content.seek(128)
        while len(tag := content.read(8)) == 8:
            kind, length = struct.unpack("<II", tag)
            if kind != 15:  # not packed: its size is that of the file
                content.seek(length, os.SEEK_CUR)
                continue
            unpacker = zlib.decompressobj()
            end = content.tell() + length
            while piece := content.read(min(end - content.tell(), 1 << 16)):
                while piece:
                    total += len(unpacker.decompress(piece, 1 << 20))
                    piece = unpacker.unconsumed_tail
                    check_size(file, total, size)


def _npz(path: Path, split: str) -> PixelsAndLabels:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            check_size(path, entry.file_size, entry.compress_size)
    with np.load(path, allow_pickle=False) as arrays:
        return arrays[f"x_{split}"], arrays[f"y_{split}"].reshape(-1).astype(np.int64)


def _idx(path: Path, split: str) -> PixelsAndLabels:
    stem = {"train": "train", "test": "t10k"}[split]
    ending = ".gz" if path.suffix == ".gz" else ""
    pixels = _idx_file(path.with_name(f"{stem}-images-idx3-ubyte{ending}"))
    labels = _idx_file(path.with_name(f"{stem}-labels-idx1-ubyte{ending}"))
    return pixels, labels.astype(np.int64)


def _idx_file(file: Path) -> np.ndarray:
    """MNIST's own format: two zero bytes, type (8: uint8), number of axes, sizes (big-endian), values."""
    raw = unpacked(file)
    axes = raw[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", raw[4:start])
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _libsvm(path: Path, split: str) -> PixelsAndLabels:
    """USPS at LIBSVM: lines of `label 1:value … 256:value`, labels 1 to 10 for digits 0 to 9, values in [−1, 1]."""
    from sklearn.datasets import load_svmlight_file

    file = path if split == "train" else path.with_name("usps.t.bz2")
    raw = unpacked(file)
    check_cost(f"{file}: lines", raw.count(b"\n"), MOST_ROWS, "in number", DataError)
    values, labels = load_svmlight_file(io.BytesIO(raw), n_features=256, zero_based=False)
    pixels = np.clip(np.round((values.toarray() + 1) * 127.5), 0, 255).astype(np.uint8)
    return pixels.reshape(-1, 16, 16), labels.astype(np.int64) - 1


def _svhn(path: Path, split: str) -> PixelsAndLabels:
    """SVHN writes the digit 0 as 10, and its images as 32×32×3×N."""
    from scipy.io import loadmat

    file = path.with_name(f"{split}_32x32.mat")
    check_mat(file)
    content = loadmat(file, variable_names=["X", "y"])
    pixels = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
    return pixels, content["y"].reshape(-1).astype(np.int64) % 10


def _records(file: Path, size: int) -> np.ndarray:
    """The bytes of a file as records of one size."""
    raw = np.fromfile(file, np.uint8)
    if raw.size % size:
        raise DataError(f"{file} is cut short: {raw.size} bytes are not a multiple of {size}")
    return raw.reshape(-1, size)


def _cifar(folder: Path, split: str) -> PixelsAndLabels:
    """Records of CIFAR-10's binary version: one byte of label, then the red, green and blue planes."""
    names = (
        ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    )
    records = np.concatenate([_records(folder / name, 1 + 3 * 32 * 32) for name in names])
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return pixels, CIFAR9_OF_CIFAR10[records[:, 0]]


def _stl(folder: Path, split: str) -> PixelsAndLabels:
    """STL-10 counts labels from 1, and writes each plane column by column: the last two axes are width and height."""
    labels = _records(folder / f"{split}_y.bin", 1)[:, 0]
    pixels = _records(folder / f"{split}_X.bin", 3 * 96 * 96)
    pixels = pixels.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
    return pixels, CIFAR9_OF_STL10[labels - 1]


READERS: dict[str, Callable[[Path, str], PixelsAndLabels]] = {
    ".npz": _npz,
    "-idx3-ubyte": _idx,
    "usps.bz2": _libsvm,
    "_32x32.mat": _svhn,
    "cifar-10-batches-bin": _cifar,
    "stl10_binary": _stl,
}
"""End of the path's name → how it is read: a function of the path and the split."""
