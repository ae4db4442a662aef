"""Images given as arrays or tensors: N×H×W, N×H×W×C or N×C×H×W with C = 1 or 3; uint8, or floats in [0, 1]."""

from __future__ import annotations

import numpy as np
import torch

from usfan.errors import DataError

ArrayLike = np.ndarray | torch.Tensor


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
    return image_array(source[None], where)[0]


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
            "rescale them, and leave out any normalisation (the model brings its own)"
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
