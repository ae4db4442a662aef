"""Views one image at a time, with Python's integers: what `usfan.data.views` does in one gather."""

from __future__ import annotations

import math

import torch
from torch import Tensor

WORD = 1 << 64


def mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned 64-bit numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def draw(seed: int, epoch: int, sample: int, stream: int) -> int:
    golden = 0x9E3779B97F4A7C15
    x = mix((seed + golden) % WORD)
    x = mix((x + epoch * golden + stream) % WORD)
    return mix((x + sample * golden) % WORD) % (1 << 63)


def uniform(seed: int, epoch: int, sample: int, stream: int) -> float:
    return (draw(seed, epoch, sample, stream) >> 39) / (1 << 24)


def crop_flip(image: Tensor, size: int, seed: int, epoch: int, sample: int) -> Tensor:
    """One image C×R×R → C×S×S, pixel by pixel."""
    room = image.shape[-1] - size + 1
    top, left = (draw(seed, epoch, sample, stream) % room for stream in (0, 1))
    flip = draw(seed, epoch, sample, 2) % 2 == 1
    view = torch.empty(len(image), size, size, dtype=image.dtype)
    for y in range(size):
        for x in range(size):
            view[:, y, x] = image[:, top + y, left + (size - 1 - x if flip else x)]
    return view


def box(seed: int, epoch: int, sample: int) -> tuple[float, float, float, float]:
    """Left, top, width and height as shares of the side: 60–100 % of the area, aspect 3/4–4/3."""
    u = [uniform(seed, epoch, sample, stream) for stream in range(4)]
    area = 0.6 + 0.4 * u[0]
    aspect = math.exp((2 * u[1] - 1) * math.log(4 / 3))
    width = min(1.0, math.sqrt(area * aspect))
    height = min(1.0, math.sqrt(area / aspect))
    return u[2] * (1 - width), u[3] * (1 - height), width, height


def resized_crop(
    image: Tensor, size: int, seed: int, epoch: int, sample: int, *, flips: bool
) -> Tensor:
    """One float image C×R×R → C×S×S by bilinear interpolation between pixel centres, the edge repeated."""
    left, top, width, height = box(seed, epoch, sample)
    flip = flips and uniform(seed, epoch, sample, 4) < 0.5
    side = image.shape[-1]
    view = torch.empty(len(image), size, size, dtype=torch.float64)
    for y in range(size):
        for x in range(size):
            across = (x + 0.5) / size
            across = 1 - across if flip else across
            at_x = (left + width * across) * side - 0.5
            at_y = (top + height * (y + 0.5) / size) * side - 0.5
            view[:, y, x] = bilinear(image.double(), at_y, at_x)
    return view


def shift_turn(image: Tensor, size: int, seed: int, epoch: int, sample: int) -> Tensor:
    """One float image C×R×R, black beyond its edges: moved by whole pixels, turned about its centre. All of it, R×R."""
    side = image.shape[-1]
    most = round(size / 7)
    across, down = (
        draw(seed, epoch, sample, stream) % (2 * most + 1) - most for stream in (0, 1)
    )
    angle = (2 * uniform(seed, epoch, sample, 2) - 1) * math.pi / 18
    wide = torch.nn.functional.pad(image.double(), (side,) * 4)
    middle = (side - 1) / 2
    view = torch.empty(len(image), side, side, dtype=torch.float64)
    for y in range(side):
        for x in range(side):
            at_x = (
                middle
                + math.cos(angle) * (x - middle)
                - math.sin(angle) * (y - middle)
                + across
            )
            at_y = (
                middle + math.sin(angle) * (x - middle) + math.cos(angle) * (y - middle) + down
            )
            view[:, y, x] = bilinear(wide, at_y + side, at_x + side)
    return view


def bilinear(image: Tensor, y: float, x: float) -> Tensor:
    side = image.shape[-1]
    y = min(max(y, 0.0), side - 1.0)
    x = min(max(x, 0.0), side - 1.0)
    y0 = math.floor(y)
    x0 = math.floor(x)
    y1 = min(y0 + 1, side - 1)
    x1 = min(x0 + 1, side - 1)
    dy = y - y0
    dx = x - x0
    upper = (1 - dx) * image[:, y0, x0] + dx * image[:, y0, x1]
    lower = (1 - dx) * image[:, y1, x0] + dx * image[:, y1, x1]
    return (1 - dy) * upper + dy * lower
