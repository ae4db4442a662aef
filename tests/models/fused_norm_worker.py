"""Runs the fused kernels of BatchNorm on the device named, and compares them with float64."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

from usfan.models.fused_norm import norm_clamp

DEVICE = torch.device(sys.argv[1])
Parts = dict[str, Tensor]


def batch_norm(layer: nn.BatchNorm2d, inputs: Tensor, grad: Tensor, low: float, high: float, fused: bool) -> Parts:
    """Everything that a step and a test-mode pass after it give."""
    x = inputs.clone().requires_grad_()
    y = norm_clamp(x, layer, low, high) if fused else layer(x).clamp(low, high)
    y.backward(grad)
    layer.eval()
    with torch.no_grad():
        tested = norm_clamp(inputs, layer, low, high) if fused else layer(inputs).clamp(low, high)
    parts = {"y": y, "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad, "tested": tested}
    parts |= {"mean": layer.running_mean, "variance": layer.running_var, "batches": layer.num_batches_tracked}
    return {name: part.detach().double() for name, part in parts.items() if part is not None}


def compare(shape: tuple[int, int, int, int], low: float, high: float, offset: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(2))
    x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x * 3 + offset, grad))
    found = []
    for fused in (True, False):
        layer = nn.BatchNorm2d(shape[1], momentum=0.3, eps=1e-3, device=DEVICE)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-2, 3, shape[1]))
            layer.bias.copy_(torch.linspace(3, -2, shape[1]))
        given = (x, grad) if fused else (x.double(), grad.double())
        found.append(batch_norm(layer if fused else layer.double(), *given, low, high, fused))
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for name, expected in found[1].items():
        error = float((found[0][name] - expected).abs().max() / (1 + expected.abs().max()))
        assert error < tolerance, (shape, low, high, name, error)
    print("agrees", shape, low, high, offset, dtype)


compare((3, 8, 5, 7), -math.inf, math.inf, 0.0, torch.float32)
compare((2, 40, 9, 9), 0.0, 6.0, 0.0, torch.float32)
compare((2, 96, 6, 6), 0.0, math.inf, 0.0, torch.float32)
compare((1, 16, 70, 70), 0.0, 6.0, 0.0, torch.float32)  # several shares of the rows
compare((4, 24, 3, 3), -math.inf, math.inf, 1000.0, torch.float32)  # a mean far from 0 takes no digits of the variance
compare((2, 8, 1, 1), 0.0, 6.0, 0.0, torch.float32)
compare((2, 40, 9, 9), 0.0, 6.0, 0.0, torch.bfloat16)

layer = nn.BatchNorm2d(8, device=DEVICE)
spoiled = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
spoiled[0, 3, 1, 1] = math.nan
bad = norm_clamp(spoiled, layer, 0.0, 6.0).isnan().flatten(2).all(dim=2).all(dim=0)
assert bad.tolist() == [k == 3 for k in range(8)], bad
assert bool(norm_clamp(spoiled, layer.eval(), 0.0, 6.0)[:, 3].isnan().all())  # the running statistics took it up
print("agrees: what is not a number stays so, in its channel")
