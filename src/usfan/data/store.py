"""Decoded images, or features of them, in one place: the form in which every stage reads its data.

Shapes: N images, C channels, S pixels to a side, F features.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Store:
    """The readable images of a data set, or the features of a frozen backbone for them."""

    values: Tensor
    """uint8 N×C×S×S (images) or float32 N×F (features), on a device, in host memory, or mapped from a file."""
    positions: Tensor
    """LongTensor[N]: the positions of these images in the `ImageData`."""
    labels: Tensor | None = None
    """LongTensor[N], or None."""
    classes: tuple[str, ...] | None = None
    paths: list[str] | None = None
    unreadable: dict[str, str] = field(default_factory=dict)
    """The images that could not be read, and why."""
    key: str | None = None
    """Names the images and how they were decoded, if they come from a cache folder."""
    batch_form: tuple[int, int] | None = None
    """Channels and side that `batch` converts images to; None: those of `values`."""
    engine: str = "torch"
    """The engine that computed the features, one of `engine.inference.engines`."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_features(self) -> bool:
        """Whether the rows are features of a frozen backbone instead of images."""
        return self.values.ndim == 2

    @property
    def device(self) -> torch.device:
        """The device that the values lie on."""
        return self.values.device

    def batch(self, index: Tensor, device: torch.device | str | None = None) -> Tensor:
        """The rows at `index`, on `device` (by default where they lie): uint8 B×C×S×S, or float32 B×F.

        From host memory to a GPU the batch goes through pinned memory, and the copy does not wait.
        """
        device = self.device if device is None else torch.device(device)
        index = index.to(self.device)
        if self.device.type == "cpu" and device.type == "cuda":
            shape = (len(index), *self.values.shape[1:])
            pinned = torch.empty(shape, dtype=self.values.dtype, pin_memory=True)
            torch.index_select(self.values, 0, index, out=pinned)
            rows = pinned.to(device, non_blocking=True)
        else:
            rows = self.values.index_select(0, index).to(device)
        if self.batch_form is None:
            return rows
        return resize(rows, *self.batch_form)

    def resized(self, channels: int, side: int) -> Store:
        """The same images, converted batch by batch; this store if they have that form already."""
        if self.values.shape[1:] == (channels, side, side):
            return self
        return dataclasses.replace(self, batch_form=(channels, side))


def resize(
    images: Tensor,
    channels: int,
    side: int,
) -> Tensor:
    """uint8 B×channels×side×side; a grey image is repeated over the channels."""
    if images.shape[-1] != side:
        scaled = torch.nn.functional.interpolate(
            images.float(), size=(side, side), mode="bilinear", antialias=True
        )
        images = scaled.round().clamp(0, 255).to(torch.uint8)
    return images.expand(-1, channels, -1, -1)
