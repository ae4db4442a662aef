"""EfficientNet-Lite0 written out from the published weights' own names: what the mapping onto timm must agree with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, linear, pad, relu6

STRIDES = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
"""Of the 16 blocks: stages of 1, 2, 2, 3, 3, 4 and 1."""


def features_and_logits(state: dict[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """B×1280 and B×1000, in float64, for images scaled to −1…1."""
    s = {name: value.double() for name, value in state.items()}
    x = relu6(norm(s, "_bn0", same_conv(images.double(), s["_conv_stem.weight"], 2)))
    for number, stride in enumerate(STRIDES):
        block = f"_blocks.{number}."
        before = x
        if block + "_expand_conv.weight" in s:
            x = relu6(norm(s, block + "_bn0", conv2d(x, s[block + "_expand_conv.weight"])))
        x = relu6(
            norm(
                s,
                block + "_bn1",
                same_conv(x, s[block + "_depthwise_conv.weight"], stride, x.shape[1]),
            )
        )
        x = norm(s, block + "_bn2", conv2d(x, s[block + "_project_conv.weight"]))
        if x.shape == before.shape:
            x = x + before
    x = relu6(norm(s, "_bn1", conv2d(x, s["_conv_head.weight"]))).mean(dim=(2, 3))
    return x, linear(x, s["_fc.weight"], s["_fc.bias"])


def norm(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean, var, weight, bias = (
        state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return batch_norm(x, mean, var, weight, bias, eps=1e-3)


def same_conv(x: Tensor, weight: Tensor, stride: int, groups: int = 1) -> Tensor:
    """TensorFlow's "same" padding: the odd pixel goes to the right and below."""
    room = max((-(-x.shape[-1] // stride) - 1) * stride + weight.shape[-1] - x.shape[-1], 0)
    before = room // 2
    after = room - room // 2
    return conv2d(pad(x, [before, after, before, after]), weight, stride=stride, groups=groups)


def wave() -> Tensor:
    """A fixed smooth picture, 1×3×224×224 in −1…1."""
    y, x = torch.meshgrid(torch.arange(224.0), torch.arange(224.0), indexing="ij")
    return torch.stack([torch.sin(x / 9), torch.cos(y / 13), torch.sin((x + y) / 21)])[None]
