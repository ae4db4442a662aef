"""1×1 convolutions as matrix products.

With the channels last the pixels of a batch are the rows of a matrix, and nothing is moved. cuDNN sets up each
convolution for each batch size, three times over (forward, and two gradients); a matrix product needs no set-up. Steps
are as fast with as without; the first comes seconds earlier.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PointwiseConv2d(nn.Conv2d):
    """A 1×1 `Conv2d` that multiplies matrices if the channels of its inputs come last."""

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_contiguous(memory_format=torch.channels_last):
            return super().forward(images)
        rows = F.linear(images.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
        return rows.permute(0, 3, 1, 2)


def is_pointwise(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.kernel_size == (1, 1)
        and layer.stride == (1, 1)
        and layer.padding in ((0, 0), "same", "valid")
        and layer.groups == 1
    )


def multiply_pointwise(module: nn.Module) -> None:
    for layer in module.modules():
        if is_pointwise(layer):
            layer.__class__ = PointwiseConv2d
