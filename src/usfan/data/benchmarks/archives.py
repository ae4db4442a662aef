"""Benchmarks that are published as arrays: MNIST, USPS, SVHN, CIFAR-10 and STL-10, each in the formats it comes in.

A path (of the training file, or of the folder with all files) identifies the format. It has two functions, for split
`train` or `test`: `labels` (quick, for checks) and `pixels`, uint8 N×H×W or N×H×W×3. CIFAR-10's Python version is a
pickle, and pickles are never read: its binary version holds the same images.

CIFAR9 and STL9 share nine classes, in CIFAR's order. Images of the tenth (frog in one, monkey in the other) have the
label −1 here, for the caller to leave out.
"""

import bz2
import gzip
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from usfan.budget import allowed, check_cost
from usfan.errors import DataError, shown

CIFAR9_OF_CIFAR10 = np.array([0, 1, 2, 3, 4, 5, -1, 6, 7, 8])
"""CIFAR-10: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck."""
CIFAR9_OF_STL10 = np.array([0, 2, 1, 3, 4, 5, 6, -1, 7, 8])
"""STL-10, from label 1: airplane, bird, car, cat, deer, dog, horse, monkey, ship, truck."""

_CIFAR_RECORD = 1 + 3 * 32 * 32
_STL_IMAGE = 3 * 96 * 96


@dataclass(frozen=True)
class Format:
    """How one format is read. Both functions take the path and the split."""

    labels: Callable[[Path, str], np.ndarray]
    pixels: Callable[[Path, str], np.ndarray]


def read_labels(place: Path, split: str) -> np.ndarray:
    """int64 N; −1 for images that the benchmark leaves out."""
    with _reading(place):
        return format_of(place).labels(place, split).astype(np.int64)


def read_images(place: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of one split, in the order of the file, without the images that the benchmark leaves out."""
    labels = read_labels(place, split)
    with _reading(place):
        pixels = format_of(place).pixels(place, split)
    if len(pixels) != len(labels):
        raise DataError(f"{place}: {len(pixels)} {split} images, but {len(labels)} labels: the copy is damaged")
    kept = labels >= 0
    return (pixels, labels) if kept.all() else (pixels[kept], labels[kept])


def format_of(place: Path) -> Format:
    """The format of a file or folder, by its name."""
    for ending, known in FORMATS.items():
        if place.name.removesuffix(".gz").endswith(ending):
            return known
    raise DataError(f"{place} is in no format that is read here; known are {', '.join(FORMATS)}")


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Turns what damaged files raise into one clear error."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{error.filename or place} is missing: unpack the whole archive there") from error
    except Exception as error:  # numpy, scipy and the unpackers raise nearly every type there is
        reason = f"{type(error).__name__}: {shown(error, 200)}"
        raise DataError(f"cannot read {place} ({reason}): fetch it again") from error


MOST_BYTES = 1 << 30
"""Limit of an unpacked file: four times SVHN's."""
MOST_RATIO = 50
"""How much smaller a packed file may be than what it holds: MNIST's labels come to 3, its images to 5."""
FREE_BYTES = 1 << 20
MOST_ROWS = 1_000_000


def bounded_size(path: Path, unpacked_size: int, packed_size: int) -> None:
    limit = min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * packed_size))
    check_cost(f"{path} unpacks to", unpacked_size, limit, "bytes", DataError)


def unpacked(file: Path) -> bytes:
    """The content of a plain, .gz or .bz2 file: no more of it is unpacked than the limit."""
    size = os.stat(file).st_size
    kinds: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open}
    most = allowed(min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * size)))
    with kinds.get(file.suffix, open)(file, "rb") as content:
        raw: bytes = content.read(most + 1)
    bounded_size(file, len(raw), size)
    return raw


def check_mat(file: Path) -> None:
    """The parts of a MATLAB file are packed one by one: unpack each and discard it before scipy trusts its sizes."""
    size, total = os.stat(file).st_size, 0
    with open(file, "rb") as content:
        content.seek(128)
        while len(tag := content.read(8)) == 8:
            kind, length = struct.unpack("<II", tag)
            if kind != 15:  # not packed: its size is that of the file
                content.seek(length, os.SEEK_CUR)
                continue
            unpacker, left = zlib.decompressobj(), length
            while left > 0 and (piece := content.read(min(left, 1 << 16))):
                left -= len(piece)
                while piece:
                    total += len(unpacker.decompress(piece, 1 << 20))
                    piece = unpacker.unconsumed_tail
                    bounded_size(file, total, size)


def _npz(path: Path, name: str) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            bounded_size(path, entry.file_size, entry.compress_size)
    with np.load(path) as arrays:
        if name not in arrays:
            raise DataError(f"{path} holds {', '.join(arrays.files)}; expected x_train, y_train, x_test, y_test")
        found: np.ndarray = arrays[name]
        return found


def _idx(path: Path, split: str, what: str) -> np.ndarray:
    """MNIST's own format: two zero bytes, type (8: uint8), number of axes, sizes (big-endian), values."""
    stem = {"train": "train", "test": "t10k"}[split]
    file = path.with_name(f"{stem}-{what}-ubyte{path.suffix if path.suffix == '.gz' else ''}")
    raw = unpacked(file)
    zeros, kind, axes = struct.unpack(">HBB", raw[:4])
    if (zeros, kind) != (0, 8):
        raise DataError(f"{file} does not begin as an idx file of bytes: fetch it again")
    shape = struct.unpack(f">{axes}I", raw[4 : 4 + 4 * axes])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def _libsvm(path: Path, split: str) -> list[str]:
    """USPS at LIBSVM: lines of `label 1:value … 256:value`, labels 1 to 10 for digits 0 to 9, values in [−1, 1]."""
    file = path if split == "train" else path.with_name("usps.t.bz2")
    raw = unpacked(file)
    check_cost(f"{file}: lines", raw.count(b"\n"), MOST_ROWS, "in number", DataError)
    return raw.decode("ascii").splitlines()


def _libsvm_labels(path: Path, split: str) -> np.ndarray:
    return np.array([int(float(line.split(maxsplit=1)[0])) - 1 for line in _libsvm(path, split)])


def _libsvm_pixels(path: Path, split: str) -> np.ndarray:
    lines = _libsvm(path, split)
    values = np.zeros((len(lines), 256))  # a value that is left out is nought
    for row, line in zip(values, lines, strict=True):
        for pair in line.split()[1:]:
            index, value = pair.split(":")
            row[int(index) - 1] = float(value)
    return np.clip(np.round((values + 1) * 127.5), 0, 255).astype(np.uint8).reshape(-1, 16, 16)


def _mat(path: Path, split: str, name: str) -> np.ndarray:
    from scipy.io import loadmat

    file = path.with_name(f"{split}_32x32.mat")
    check_mat(file)
    found: np.ndarray = loadmat(file, variable_names=[name])[name]
    return found


def _cifar(folder: Path, split: str) -> np.ndarray:
    """Records of CIFAR-10's binary version: one byte of label, then the red, green and blue planes."""
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    parts = []
    for name in names:
        raw = np.fromfile(folder / name, np.uint8)
        if raw.size % _CIFAR_RECORD:
            raise DataError(f"{folder / name} is cut short: {raw.size} bytes are not a multiple of {_CIFAR_RECORD}")
        parts.append(raw.reshape(-1, _CIFAR_RECORD))
    return np.concatenate(parts)


def _stl_pixels(folder: Path, split: str) -> np.ndarray:
    """STL-10 writes each plane column by column, so the last two axes are width and height."""
    file = folder / f"{split}_X.bin"
    raw = np.fromfile(file, np.uint8)
    if raw.size % _STL_IMAGE:
        raise DataError(f"{file} is cut short: {raw.size} bytes are not a multiple of {_STL_IMAGE}")
    return raw.reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)


def _aligned(labels: np.ndarray, table: np.ndarray, place: Path) -> np.ndarray:
    wrong = labels[(labels < 0) | (labels >= len(table))]
    if wrong.size:
        raise DataError(f"{place} has a label that is none of its ten ({wrong[0]}): fetch it again")
    aligned: np.ndarray = table[labels]
    return aligned


FORMATS: dict[str, Format] = {
    ".npz": Format(lambda p, s: _npz(p, f"y_{s}").reshape(-1), lambda p, s: _npz(p, f"x_{s}")),
    "-idx3-ubyte": Format(lambda p, s: _idx(p, s, "labels-idx1"), lambda p, s: _idx(p, s, "images-idx3")),
    "usps.bz2": Format(_libsvm_labels, _libsvm_pixels),
    # SVHN writes the digit 0 as 10, and its images as 32×32×3×N.
    "_32x32.mat": Format(
        lambda p, s: _mat(p, s, "y").reshape(-1).astype(np.int64) % 10,
        lambda p, s: np.ascontiguousarray(_mat(p, s, "X").transpose(3, 0, 1, 2)),
    ),
    "cifar-10-batches-bin": Format(
        lambda p, s: _aligned(_cifar(p, s)[:, 0].astype(np.int64), CIFAR9_OF_CIFAR10, p),
        lambda p, s: _cifar(p, s)[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1),
    ),
    "stl10_binary": Format(
        lambda p, s: _aligned(np.fromfile(p / f"{s}_y.bin", np.uint8).astype(np.int64) - 1, CIFAR9_OF_STL10, p),
        _stl_pixels,
    ),
}
"""End of the path's name → how it is read."""
