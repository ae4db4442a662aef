"""BatchNorm with its activation in few kernels, for training on a GPU without compiling.

torch's kernels read or write a layer's activations thirteen times per step, those of the activation included; these do
it eight times, in wide loads: EfficientNet-Lite0 adapts 1.3 times as fast (docs/performance.md). The maths is torch's,
in float32 (x of N·H·W = M rows and C channels, a clamp [lo, hi] that holds ReLU, ReLU6 and nothing at all):

    v = (x − μ) / √(σ² + ε) · w + b        y = min(max(v, lo), hi)
    g = dy where lo < v < hi, else 0       dw = Σ g x̂,  db = Σ g
    dx = w / √(σ² + ε) · (g − (db + x̂ dw) / M)

Sums go in two rounds: a share of the rows in each program, then over the shares. So they are the same in every run.
The variance is that of x − x₀, with x₀ the first row: a large mean takes no digits.

`triton` comes with torch if torch has CUDA; `fuse_norms` tries the kernels against torch's own and leaves the
layers alone if they do not run. Layers change their class, not their contents, as in `sync_norm`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from usfan.models.classifier import batch_norms

log = logging.getLogger(__name__)

ALIGNED = 8
"""Channels come in multiples of this: sixteen bytes of bfloat16, which a thread loads at once."""
TRIED = (3, 40, 80, 83)
"""Shape that the kernels are tried on, with enough rows that a program sums several tiles."""
BOUNDS: dict[type, tuple[float, float]] = {
    nn.ReLU: (0.0, math.inf),
    nn.ReLU6: (0.0, 6.0),
    nn.Identity: (-math.inf, math.inf),
}


TIMMS = ("timm.layers.norm_act", "BatchNormAct2d")


def kernels() -> ModuleType:
    from usfan.engine.accelerate import norm_kernels

    return norm_kernels


class NormClamp(torch.autograd.Function):
    """y by the batch's own statistics; running statistics and the count of batches move in place."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        layer: Any,
        low: float,
        high: float,
    ) -> Tensor:
        mean, variance = kernels().batch_statistics(inputs, layer)
        ctx.save_for_backward(inputs, mean, variance, weight, bias)
        ctx.eps = layer.eps
        ctx.bounds = (low, high)
        result: Tensor = kernels().transformed(
            inputs, (mean, variance, weight, bias, layer.eps), low, high
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *numbers = ctx.saved_tensors
        # Hooks that keep tensors elsewhere may change their layout.
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        grad = grad.contiguous(memory_format=torch.channels_last)
        gradients = kernels().gradients(inputs, grad, (*numbers, ctx.eps), *ctx.bounds)
        return *gradients, None, None, None


def norm_clamp(inputs: Tensor, layer: Any, low: float, high: float) -> Tensor:
    """BatchNorm and a clamp, by the layer's mode."""
    if layer.training:
        result: Tensor = NormClamp.apply(inputs, layer.weight, layer.bias, layer, low, high)
    else:
        numbers = (layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.eps)
        result = kernels().transformed(inputs, numbers, low, high)
    return result


class FusedNorm:
    """Put before a kind of BatchNorm: fused if the layer and its inputs allow it, else that kind's own forward."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        if not takes(inputs, self) or (torch.is_grad_enabled() and not self.training):
            return super().forward(inputs)  # type: ignore[misc, no-any-return]
        act = getattr(self, "act", None)
        low, high = BOUNDS.get(type(act), BOUNDS[nn.Identity])
        result = norm_clamp(inputs, self, low, high)
        return result if act is None or type(act) in BOUNDS else act(result)


def takes(inputs: Tensor, layer: Any) -> bool:
    return (
        inputs.is_cuda
        and inputs.device.index == torch.cuda.current_device()
        and inputs.ndim == 4
        and inputs.numel() > inputs.shape[1]
        and inputs.shape[1] == layer.num_features
        and inputs.shape[1] % ALIGNED == 0
        and inputs.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and inputs.is_contiguous(memory_format=torch.channels_last)
    )


def worth_fusing(layer: nn.Module) -> bool:
    """A two-dimensional BatchNorm as networks have it, alone or as timm has it, with an activation and without drop.
    Subclasses may do anything, and are left alone."""
    timms = (type(layer).__module__, type(layer).__name__) == TIMMS
    return (
        isinstance(layer, nn.BatchNorm2d)
        and (type(layer) is nn.BatchNorm2d or timms)
        and layer.affine
        and layer.weight.dtype == torch.float32
        and layer.track_running_stats
        and isinstance(layer.running_mean, Tensor)
        and layer.momentum is not None
        and isinstance(getattr(layer, "drop", nn.Identity()), nn.Identity)
    )


@functools.cache
def fused_kind(kind: type) -> type:
    return type(f"Fused{kind.__name__}", (FusedNorm, kind), {})


def fuse_norms(
    module: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Make its BatchNorms use the kernels, if the kernels run on the device with that type of activations."""
    layers = [layer for layer in batch_norms(module) if worth_fusing(layer)]
    if layers and kernels_run(device, dtype):
        for layer in layers:
            layer.__class__ = fused_kind(type(layer))  # type: ignore[arg-type]


@functools.cache
def kernels_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can be built here and agree with torch."""
    tolerance = 1e-3 if dtype == torch.float32 else 0.03
    reason = "their result is not torch's"
    try:
        agree = largest_error(device, dtype) < tolerance  # false for NaN
    except (
        Exception
    ) as error:  # no compiler, an old GPU, another triton: all of it only costs speed
        agree = False
        reason = str(error).partition("\n")[0] or type(error).__name__
    if not agree:
        log.warning("fused BatchNorm kernels are not used, which costs speed only: %s", reason)
    return agree


def largest_error(device: torch.device, dtype: torch.dtype) -> float:
    """Against torch's BatchNorm and ReLU6: outputs, gradients, running statistics, in training and in test mode."""
    generator = torch.Generator().manual_seed(0)
    inputs = trial_values(generator, device, dtype)
    grad = trial_values(generator, device, dtype)
    ours = trial(inputs, grad, lambda values, layer: norm_clamp(values, layer, 0.0, 6.0))
    torchs = trial(inputs, grad, lambda values, layer: F.relu6(layer(values.float())).to(dtype))
    errors = [
        (one - two).abs().max() / (1 + two.abs().max())
        for one, two in zip(ours, torchs, strict=True)
    ]
    return float(torch.stack(errors).max())  # keeps NaN, which Python's max would lose


def trial_values(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A few distinct values, none within rounding of a bound."""
    values = torch.randn(TRIED, generator=generator) * 2 + 1
    values = (values * 4).round() / 4
    return values.to(device, dtype).contiguous(memory_format=torch.channels_last)


def trial(
    inputs: Tensor, grad: Tensor, forward: Callable[[Tensor, nn.BatchNorm2d], Tensor]
) -> list[Tensor]:
    """Everything that a training step and a test pass of a layer give, in float64."""
    channels = inputs.shape[1]
    layer = nn.BatchNorm2d(channels, device=inputs.device)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 3, channels))
        layer.bias.copy_(torch.linspace(-2, 2, channels))
    x = inputs.clone().requires_grad_()
    y = forward(x, layer)
    tested = forward(inputs, layer.eval())
    y.backward(grad)
    gradients = (x.grad, layer.weight.grad, layer.bias.grad)
    results = (y, tested, *gradients, layer.running_mean, layer.running_var)
    return [result.detach().double() for result in results if result is not None]
