"""Small copies of each benchmark's layout on disk, with tiny pictures: every domain, every class, a few images each.

`make(name, root)` writes one. Pictures of a class share a colour and a stripe, so that a tiny network can tell them
apart; the colour differs a little from domain to domain.
"""

import bz2
import gzip
import io
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.decoding.decode import convert, squared, to_tensor

SIDE = 16


def to_square(image: Image.Image, size: int, channels: int = 3) -> torch.Tensor:
    """uint8 C×size×size of any Pillow image, as the package decodes it."""
    return to_tensor(squared(convert(image, "image", channels), size))


def picture(
    label: int, domain: int, number: int, side: int = SIDE, grey: bool = False
) -> np.ndarray:
    """uint8 side×side×3 (or side×side): a colour and a stripe told by the class, a brightness told by the domain."""
    rng = np.random.default_rng([label, 7])
    base = rng.integers(40, 200, size=3)
    image = np.broadcast_to(base, (side, side, 3)).astype(np.int64).copy()
    row = int(rng.integers(0, side - 2))
    image[row : row + 2] = 230 - base
    image += 12 * domain + np.random.default_rng([label, domain, number]).integers(
        -15, 16, size=image.shape
    )
    image = np.clip(image, 0, 255).astype(np.uint8)
    return image[..., 0].copy() if grey else image


@cache
def encoded(label: int, domain: int, number: int, kind: str) -> bytes:
    """The same as the bytes of a file."""
    buffer = io.BytesIO()
    Image.fromarray(picture(label, domain, number)).save(buffer, kind)
    return buffer.getvalue()


def make(
    name: str,
    root: Path,
    *,
    images: int = 3,
    classes_limit: int | None = None,
    formats: str = "npz",
) -> Path:
    """Write a look-alike of a benchmark with `images` per class (and split) below `root`, and return `root`.

    DomainNet needs two images per class, one for each list. `classes_limit` keeps the first classes only. `formats`,
    for digits: `npz`, or `published` for the formats that MNIST, USPS and SVHN are published in.
    """
    root.mkdir(parents=True, exist_ok=True)
    if name == "digits":
        _digits(root, images, formats)
    elif name == "cifar-stl":
        _cifar(root / "cifar-10-batches-bin", images)
        _stl(root / "stl10_binary", images)
    else:
        _folders(name, root, images, classes_limit)
    return root


def _folders(name: str, root: Path, images: int, classes_limit: int | None) -> None:
    entry = benchmark(name)
    classes = entry.classes[:classes_limit]
    kind, suffix = ("png", "png") if name == "visda-c" else ("jpeg", "jpg")
    for d, domain in enumerate(entry.domains):
        lines: dict[str, list[str]] = {split: [] for split in domain.counts}
        for label, class_name in enumerate(classes):
            folder = root / domain.name / class_name
            folder.mkdir(parents=True)
            for number in range(images):
                file = folder / f"{domain.name}_{label:03}_{number:06}.{suffix}"
                # Few different files: encoding six thousand would take longer than writing them.
                file.write_bytes(encoded(label % 16, d, number % 3, kind))
                # The last image of a class is its test image.
                split = list(domain.counts)[-1 if number == images - 1 else 0]
                if class_name not in domain.absent.get(split, ()):
                    lines[split].append(f"{file.relative_to(root).as_posix()} {label}")
        if entry.layout == "lists":
            for split, text in lines.items():
                (root / f"{domain.name}_{split}.txt").write_text(
                    "\n".join(text) + "\n", encoding="utf-8"
                )


def _labelled(
    classes: int, images: int, domain: int, side: int, grey: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels 0 … classes − 1, class by class in turn."""
    labels = np.tile(np.arange(classes), images)
    shots = [picture(int(label), domain, i, side, grey) for i, label in enumerate(labels)]
    return np.stack(shots), labels


def _cifar(folder: Path, images: int) -> None:
    """Labels in CIFAR-10's order, each file with `images` pictures per class."""
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        pixels, labels = _labelled(10, images, 0, 32, grey=False)
        planes = pixels.transpose(0, 3, 1, 2).reshape(len(labels), -1)
        (folder / name).write_bytes(
            np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1).tobytes()
        )


def _stl(folder: Path, images: int) -> None:
    """Labels 1 … 10 in STL-10's order; planes column by column."""
    folder.mkdir(parents=True)
    # STL-10's class k shows the picture of the CIFAR-10 class it means (car → automobile; monkey: none of them).
    cifar_class = [0, 2, 1, 3, 4, 5, 7, 10, 8, 9]
    for split in ("train", "test"):
        labels = np.tile(np.arange(10), images)
        pixels = np.stack(
            [picture(cifar_class[label], 1, i, 96) for i, label in enumerate(labels)]
        )
        (folder / f"{split}_X.bin").write_bytes(pixels.transpose(0, 3, 2, 1).tobytes())
        (folder / f"{split}_y.bin").write_bytes((labels + 1).astype(np.uint8).tobytes())


def _digits(root: Path, images: int, formats: str) -> None:
    writers: dict[str, tuple[Callable[..., None], int, bool]] = {
        "mnist": (_write_idx, 28, True),
        "usps": (_write_libsvm, 16, True),
        "svhn": (_write_mat, 32, False),
    }
    for d, (name, (writer, side, grey)) in enumerate(writers.items()):
        train = _labelled(10, images, d, side, grey)
        test = _labelled(10, images, d, side, grey)
        if formats == "npz":
            np.savez(
                root / f"{name}.npz",
                x_train=train[0],
                y_train=train[1],
                x_test=test[0],
                y_test=test[1],
            )
        else:
            writer(root, train, test)


def _write_idx(root: Path, *splits: tuple[np.ndarray, np.ndarray]) -> None:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for stem, (pixels, labels) in zip(("train", "t10k"), splits, strict=True):
        head = struct.pack(">HBB3I", 0, 8, 3, *pixels.shape)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(head + pixels.tobytes())
        )
        head = struct.pack(">HBBI", 0, 8, 1, len(labels))
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(head + labels.astype(np.uint8).tobytes())
        )


def _write_libsvm(root: Path, *splits: tuple[np.ndarray, np.ndarray]) -> None:
    for name, (pixels, labels) in zip(("usps.bz2", "usps.t.bz2"), splits, strict=True):
        lines = [
            " ".join(
                [
                    str(label + 1),
                    *(f"{i + 1}:{v / 127.5 - 1:.6f}" for i, v in enumerate(image.reshape(-1))),
                ]
            )
            for image, label in zip(pixels, labels, strict=True)
        ]
        (root / name).write_bytes(bz2.compress("\n".join(lines).encode()))


def _write_mat(root: Path, *splits: tuple[np.ndarray, np.ndarray]) -> None:
    from scipy.io import savemat

    for name, (pixels, labels) in zip(
        ("train_32x32.mat", "test_32x32.mat"), splits, strict=True
    ):
        digits = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        savemat(
            root / name, {"X": pixels.transpose(1, 2, 3, 0), "y": digits}, do_compression=True
        )
