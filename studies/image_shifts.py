"""Synthetic shifts of photographs: pure PIL/numpy functions `(image, seed) -> image`, RGB in, RGB of the same size out.

Rules may be chosen on the shifts in CHOOSE. Those in JUDGE are used once, after a rule is fixed.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFilter, ImageOps


def blur(image: Image.Image, seed: int = 0) -> Image.Image:
    """Heavy Gaussian blur: radius 1/64 of the shorter side (4 pixels at 256)."""
    return image.filter(ImageFilter.GaussianBlur(min(image.size) / 64))


def dark(image: Image.Image, seed: int = 0) -> Image.Image:
    """A quarter of the light, then Gaussian noise of 12 grey levels."""
    pixels = np.asarray(image, dtype=np.float32) * 0.25
    pixels += np.random.default_rng(seed).normal(0.0, 12.0, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))


def lines(image: Image.Image, seed: int = 0) -> Image.Image:
    """A line drawing: strength of the grey gradient after a light blur, dark on white."""
    grey = np.asarray(image.convert("L").filter(ImageFilter.GaussianBlur(1)), dtype=np.float32)
    gy, gx = np.gradient(grey)
    strength = np.hypot(gx, gy)
    strength = strength / max(float(np.quantile(strength, 0.98)), 1e-6)
    drawn = (255 * (1 - strength.clip(0, 1))).round().astype(np.uint8)
    return Image.fromarray(drawn).convert("RGB")


def inverted(image: Image.Image, seed: int = 0) -> Image.Image:
    """Inverted colours."""
    return ImageOps.invert(image)


def posterised(image: Image.Image, seed: int = 0) -> Image.Image:
    """Two levels per channel."""
    pixels = np.asarray(image)
    return Image.fromarray(np.where(pixels >= 128, 255, 0).astype(np.uint8))


CHOOSE: dict[str, Callable[..., Image.Image]] = {"blur": blur, "dark": dark}
JUDGE: dict[str, Callable[..., Image.Image]] = {
    "lines": lines,
    "inverted": inverted,
    "posterised": posterised,
}
SHIFTS = {**CHOOSE, **JUDGE}


def decode(job: tuple[str, int, int, str | None]) -> np.ndarray:
    """One packed image as 3×256×256, under a shift."""
    file, start, length, shift = job
    with open(file, "rb") as packed:
        packed.seek(start)
        image = (
            Image.open(io.BytesIO(packed.read(length)))
            .convert("RGB")
            .resize((256, 256), Image.Resampling.BICUBIC)
        )
    if shift is not None:
        image = SHIFTS[shift](image, start)
    return np.asarray(image).transpose(2, 0, 1)
