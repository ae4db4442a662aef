"""Views of a picture for the network: crops and flips on the device, drawn per sample, in one gather.

A draw is a function of (seed, epoch, sample number): the same in one process or eight, resumed or not, CPU or GPU.
It comes from a 64-bit mixing function on integer tensors, not from a generator that would have to be carried along.

Shapes: pixels N×C×R×R uint8; a view B×C×S×S float.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.config import RESAMPLING, VIEWS
from usfan.config_checks import one_of
from usfan.errors import ConfigError


@dataclass(frozen=True)
class InputSpec:
    """The input that a network takes."""

    channels: int = 3
    """3 for colour, 1 for grey."""
    size: int = 224
    """Side of the square input of the network."""
    resize: int = 256
    """Side of the square that images are resized to before the crop."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Subtracted from pixels in 0…1, per channel."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Divides after the subtraction, per channel."""
    augment: str = "crop-flip"
    """View in training: "crop-flip" (SHOT), "resized-crop-flip" (CIFAR9→STL9), "resized-crop", "shift-turn" (USPS as a
    source, SHOT) or "none" (digits)."""

    resampling: str = "bilinear"
    """How images are brought to that square: bilinear, bicubic, lanczos or nearest squash them; with "-crop" at the end
    their shorter side is resized, and the middle is kept."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one input of the network."""
        return self.channels, self.size, self.size

    @property
    def shape_text(self) -> str:
        return "×".join(map(str, self.shape))

    def __post_init__(self) -> None:
        for name in ("channels", "size", "resize"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                expected = "a whole number from 1 on"
                raise ConfigError(f"InputSpec: {name} must be {expected}; got {value!r}")
        for name, kind in (("mean", "numbers"), ("std", "positive numbers")):
            numbers = tuple(float(number) for number in getattr(self, name))
            object.__setattr__(self, name, numbers)
            is_valid = all(math.isfinite(x) and (name == "mean" or x > 0) for x in numbers)
            if len(numbers) != self.channels or not is_valid:
                expected = f"{self.channels} {kind}, one per channel"
                raise ConfigError(f"InputSpec: {name} must hold {expected}; got {numbers}")
        if self.resize < self.size:
            raise ConfigError(f"InputSpec: resize must be at least the size; got {self.resize}")
        one_of("InputSpec: augment", self.augment, VIEWS)
        one_of("InputSpec: resampling", self.resampling, RESAMPLING)


_MASK = (1 << 63) - 1
_ADD = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MULTIPLY_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLY_2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; products wrap around, shifts are made logical by a mask."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLY_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLY_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def keyed_integers(
    seed: int,
    epoch: int | Tensor,
    sample: Tensor,
    stream: int,
) -> Tensor:
    """One non-negative integer per sample, from (seed, epoch, sample, stream)."""
    if isinstance(epoch, int):  # times _ADD it may not fit in 64 bits; a tensor wraps around
        epoch = torch.full_like(sample, epoch)
    x = _mix(torch.full_like(sample, seed) + _ADD)
    x = _mix(x + epoch * _ADD + stream)
    return _mix(x + sample * _ADD) & _MASK


def keyed_uniform(
    seed: int,
    epoch: int | Tensor,
    sample: Tensor,
    stream: int,
) -> Tensor:
    """One number in [0, 1) per sample."""
    return (keyed_integers(seed, epoch, sample, stream) >> 39).float() / (1 << 24)


@functools.lru_cache(maxsize=64)
def statistics(spec: InputSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std in units of 0…255. Made once: a captured step must not bring values from the host."""
    mean, std = torch.tensor([spec.mean, spec.std], device=device) * 255
    return mean.view(-1, 1, 1), std.view(-1, 1, 1)


def normalise(pixels: Tensor, spec: InputSpec) -> Tensor:
    """uint8 → (x/255 − mean) / std, in float32."""
    mean, std = statistics(spec, pixels.device)
    return (pixels.float() - mean) / std


def centre(pixels: Tensor, size: int) -> Tensor:
    """The middle size×size of each picture."""
    top, left = ((side - size) // 2 for side in pixels.shape[-2:])
    return pixels[..., top : top + size, left : left + size]


def test_view(pixels: Tensor, spec: InputSpec) -> Tensor:
    """The centre crop, normalised."""
    return normalise(centre(pixels, spec.size), spec)


test_view.__test__ = False  # type: ignore[attr-defined]  # a view, not a test


def train_view(
    pixels: Tensor,
    rows: Tensor,
    samples: Tensor,
    spec: InputSpec,
    seed: int,
    epoch: int | Tensor,
) -> Tensor:
    """Random views of pixels[rows]; `samples` are the numbers that key the draws."""
    if spec.augment == "none":
        return test_view(pixels[rows], spec)
    if spec.augment in ("resized-crop", "resized-crop-flip"):
        return resized_crop(pixels[rows], samples, spec, seed, epoch)
    if spec.augment == "shift-turn":
        return shift_turn(pixels[rows], samples, spec, seed, epoch)
    return normalise(crop_flip(pixels, rows, samples, spec.size, seed, epoch), spec)


def crop_flip(
    pixels: Tensor,
    rows: Tensor,
    samples: Tensor,
    size: int,
    seed: int,
    epoch: int | Tensor,
) -> Tensor:
    """Per sample: a crop of size×size at a random place, flipped left to right with probability ½. One gather."""
    room = pixels.shape[-1] - size + 1
    top = keyed_integers(seed, epoch, samples, 0) % room
    start = keyed_integers(seed, epoch, samples, 1) % room
    flip = keyed_integers(seed, epoch, samples, 2) % 2 == 1
    span = torch.arange(size, device=pixels.device)
    columns = torch.where(flip[:, None], size - 1 - span, span) + start[:, None]
    lines = span + top[:, None]
    channels = torch.arange(pixels.shape[1], device=pixels.device)
    return pixels[
        rows[:, None, None, None],
        channels[:, None, None],
        lines[:, None, :, None],
        columns[:, None, None, :],
    ]


def resized_crop(
    pixels: Tensor,
    samples: Tensor,
    spec: InputSpec,
    seed: int,
    epoch: int | Tensor,
    smallest: float = 0.6,
) -> Tensor:
    """Per sample: a box of 60–100 % of the area, aspect 3/4–4/3, resized to size×size; the augmentation may flip it."""
    u = [keyed_uniform(seed, epoch, samples, stream) for stream in range(5)]
    area = smallest + (1 - smallest) * u[0]
    aspect = torch.exp((2 * u[1] - 1) * math.log(4 / 3))
    width = (area * aspect).sqrt().clamp(max=1)
    height = (area / aspect).sqrt().clamp(max=1)
    centre_x = (2 * u[2] - 1) * (1 - width)
    centre_y = (2 * u[3] - 1) * (1 - height)
    flip_share = 0.5 if spec.augment.endswith("flip") else 0.0
    sign = torch.where(u[4] < flip_share, -1.0, 1.0)
    zero = torch.zeros_like(width)
    box = [width * sign, zero, centre_x, zero, height, centre_y]
    return transform(normalise(pixels, spec), box, spec.size, padding="border")


def shift_turn(
    pixels: Tensor,
    samples: Tensor,
    spec: InputSpec,
    seed: int,
    epoch: int | Tensor,
) -> Tensor:
    """Per sample: moved by up to a seventh of the side (4 of 28 pixels) each way, turned by up to 10°; black beyond."""
    side = pixels.shape[-1]
    most = round(spec.size / 7)
    across = keyed_integers(seed, epoch, samples, 0) % (2 * most + 1) - most
    down = keyed_integers(seed, epoch, samples, 1) % (2 * most + 1) - most
    angle = (2 * keyed_uniform(seed, epoch, samples, 2) - 1) * math.radians(10)
    cos = angle.cos()
    sin = angle.sin()
    matrix = [cos, -sin, 2 * across / side, sin, cos, 2 * down / side]
    turned = transform(pixels.float(), matrix, side, padding="zeros")
    return normalise(centre(turned, spec.size), spec)


def transform(
    images: Tensor,
    matrix: list[Tensor],
    size: int,
    padding: str,
) -> Tensor:
    """Images at the points of an affine map: `matrix` holds its 2×3 entries row by row, each with one number per
    image."""
    theta = torch.stack(matrix, dim=1).view(-1, 2, 3)
    shape = [*images.shape[:2], size, size]
    grid = torch.nn.functional.affine_grid(theta, shape, align_corners=False)
    return torch.nn.functional.grid_sample(
        images, grid, padding_mode=padding, align_corners=False
    )
