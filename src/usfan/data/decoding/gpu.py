"""JPEG decoding on a GPU (torchvision's nvJPEG), for building the store where `--decode gpu` asks for it.

Only plain files go there: whole JPEGs of 8 bits in YCbCr that need no turning. All others, and batches that the GPU
refuses, are decoded as ever. The pixels are close to those of the CPU, not equal: nvJPEG rounds and enlarges the
colour planes in its own way, and the antialiased resize rounds once where Pillow rounds twice. The tests hold the mean
difference to `MEAN_DIFFERENCE` levels of 255. So the store's key names the decoder, and the CPU's is the default:
results do not depend on the machine unless one asks for it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image
from torch import Tensor

from usfan.data.decoding.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    UnreadableImage,
    decode_file,
    orientation,
    quiet,
    squared,
    to_tensor,
)
from usfan.errors import ConfigError

BATCH = 64
"""Files that are decoded at once."""
READERS = 8
"""Threads that read files."""
MEAN_DIFFERENCE = 2.0


def decode_batch(paths: Sequence[str], size: int, device: torch.device) -> tuple[list[str | None], Tensor]:
    """A reason or None per file, and uint8 n×3×size×size on the device; rows with a reason hold nothing of use."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:  # deprecated from 0.29 on, and some day gone
        raise ConfigError("--decode gpu: this torchvision decodes no JPEG; use --decode cpu") from None
    pixels = torch.empty((len(paths), 3, size, size), dtype=torch.uint8, device=device)
    with ThreadPoolExecutor(READERS) as readers:
        contents = list(readers.map(plain_jpeg, paths))
    rows = [row for row, content in enumerate(contents) if content is not None]
    done: set[int] = set()
    if rows:
        try:
            with quiet:
                pictures = decode_jpeg([contents[row] for row in rows], mode=ImageReadMode.RGB, device=device)
        except RuntimeError:  # of one file, which is not named: the CPU's decoder finds it
            pictures = []
        for row, picture in zip(rows, pictures, strict=False):
            pixels[row] = resized(picture, size)
            done.add(row)
    reasons: list[str | None] = [None] * len(paths)
    for row in set(range(len(paths))) - done:
        try:
            pixels[row] = to_tensor(squared(decode_file(paths[row]), size)).to(device)
        except UnreadableImage as error:
            reasons[row] = error.reason
    return reasons, pixels


def resized(picture: Tensor, size: int) -> Tensor:
    """uint8 3×H×W squashed to 3×size×size, antialiased, as Pillow's BILINEAR up to rounding."""
    values = torch.nn.functional.interpolate(picture[None].float(), (size, size), mode="bilinear", antialias=True)
    return values[0].round().clamp(0, 255).byte()


def plain_jpeg(path: str) -> Tensor | None:
    """The bytes of a file that the GPU decodes as the CPU does; None for any other."""
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES)
        with quiet, Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            components = [layer[0] for layer in getattr(image, "layer", [])]
            fits = image.width * image.height <= MAX_PIXELS and getattr(image, "bits", 8) == 8
            colours = image.mode == "RGB" and image.info.get("adobe_transform", 1) == 1
            plain = fits and colours and components != list(b"RGB") and orientation(image) == 1
    except Exception:  # missing or broken: the CPU's decoder says how
        return None
    whole = content.endswith(b"\xff\xd9")  # the marker of the end: a file cut short lacks it
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if plain and whole else None
