"""BatchNorm whose statistics are those of the global batch, over any number of processes, on CPU and GPU alike.

torch's SyncBatchNorm takes GPU tensors only. Here sums, squares and counts are added over processes, forward and
backward, so that several processes normalise exactly as one would, with any number of samples in each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from usfan.models.classifier import batch_norms


class _Sum(torch.autograd.Function):
    """The sum over processes; its gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(values)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(grad)
        return total


def global_batch_norm(layer: Any, inputs: Tensor) -> Tensor:
    """Normalise with the mean and variance of the global batch, and move the running statistics as BatchNorm does."""
    dims = [0, *range(2, inputs.ndim)]
    values = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
    count = values.new_full((1,), values.numel() / values.shape[1])
    # Two rounds (mean first) keep the variance exact if the mean is large.
    sums = _Sum.apply(torch.cat([values.sum(dims), count]))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    shape = [1, -1] + [1] * (inputs.ndim - 2)
    centred = values - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(dims)) / total
    if layer.running_mean is not None:
        with torch.no_grad():
            layer.num_batches_tracked.add_(1)
            rate = layer.momentum
            if rate is None:
                rate = 1.0 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean), rate)
            unbiased = variance * (total / (total - 1).clamp_min(1))
            layer.running_var.lerp_(unbiased.to(layer.running_var), rate)
    result = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        result = result * layer.weight.view(shape) + layer.bias.view(shape)
    normalised: Tensor = result.to(inputs.dtype)
    return normalised


class GlobalNorm:
    """Put before a kind of BatchNorm: the global batch while training, else that kind's forward."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)  # type: ignore[misc, no-any-return]
        result = global_batch_norm(self, inputs)
        for name in ("drop", "act"):  # timm's BatchNorm has the activation in it
            part = getattr(self, name, None)
            if isinstance(part, nn.Module):
                result = part(result)
        return result


@functools.cache
def global_kind(kind: type) -> type:
    return type(f"Global{kind.__name__}", (GlobalNorm, kind), {})


def sync_batch_norms(module: nn.Module) -> None:
    """From now on every BatchNorm in the module uses the global batch while training; state dicts stay the same.

    The layers change their class, not their contents: a copy of the module works as the module does.
    """
    for layer in batch_norms(module):
        if not isinstance(layer, GlobalNorm):
            layer.__class__ = global_kind(type(layer))  # type: ignore[arg-type]
