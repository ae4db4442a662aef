"""Runs the fused kernels of BatchNorm on the device named, and compares them with float64."""

from __future__ import annotations

import copy
import math
import sys

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from usfan.engine.accelerate import fused_norm, norm_kernels
from usfan.engine.accelerate.fused_norm import fused_kind, norm_clamp, worth_fusing
from usfan.engine.accelerate.layers import plain_layers

DEVICE = torch.device(sys.argv[1])
if DEVICE.type == "cpu":
    norm_kernels.PROGRAMS = 12  # so that a program sums several tiles of these small layers, as it does of large ones
    fused_norm.TRIED = (2, 16, 21, 20)
    fused_norm.takes = lambda *_: True  # the interpreter takes what a GPU would
Parts = dict[str, Tensor]


def batch_norm(
    layer: nn.BatchNorm2d, inputs: Tensor, grad: Tensor, low: float, high: float, fused: bool
) -> Parts:
    """Everything that a step and a test-mode pass after it give."""
    x = inputs.clone().requires_grad_()
    y = norm_clamp(x, layer, low, high) if fused else layer(x).clamp(low, high)
    y.backward(grad)
    layer.eval()
    with torch.no_grad():
        tested = (
            norm_clamp(inputs, layer, low, high) if fused else layer(inputs).clamp(low, high)
        )
    parts = {
        "y": y,
        "dx": x.grad,
        "dw": layer.weight.grad,
        "db": layer.bias.grad,
        "tested": tested,
    }
    parts |= {
        "mean": layer.running_mean,
        "variance": layer.running_var,
        "batches": layer.num_batches_tracked,
    }
    return {name: part.detach().double() for name, part in parts.items() if part is not None}


def compare(
    shape: tuple[int, int, int, int], low: float, high: float, offset: float, dtype: torch.dtype
) -> None:
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
compare((1, 16, 40, 40), 0.0, 6.0, 0.0, torch.float32)  # several shares of the rows
compare(
    (4, 24, 3, 3), -math.inf, math.inf, 1000.0, torch.float32
)  # a mean far from 0 takes no digits of the variance
compare((2, 8, 1, 1), 0.0, 6.0, 0.0, torch.float32)
compare((2, 40, 9, 9), 0.0, 6.0, 0.0, torch.bfloat16)


def in_a_network(layer: nn.Module, act: nn.Module | None) -> None:
    """The layer as it stands in a network, with the activation that timm puts into it, both modes."""
    torch.manual_seed(0)
    x = 3 * torch.randn(4, 16, 5, 5, device=DEVICE).contiguous(
        memory_format=torch.channels_last
    )
    if act is not None:
        layer.act = act
    layer = layer.to(DEVICE)
    found = []
    for fused in (True, False):
        own = copy.deepcopy(layer)
        if fused:
            assert worth_fusing(own)
            own.__class__ = fused_kind(type(own))
        y = own.train()(x)
        with torch.no_grad():
            found.append((y, own.eval()(x), own.running_var))
        plain_layers(own)
        assert type(own) is type(layer)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    print("agrees", type(layer).__name__, type(act).__name__)


for act in (nn.Identity(), nn.ReLU(), nn.ReLU6(inplace=True), nn.SiLU()):
    in_a_network(BatchNormAct2d(16), act)
in_a_network(nn.BatchNorm2d(16), None)

assert fused_norm.kernels_run.__wrapped__(DEVICE, torch.bfloat16)
norm_kernels.gradients, plain = (
    (lambda *given: [t * math.nan for t in plain(*given)]),
    norm_kernels.gradients,
)
assert not fused_norm.kernels_run.__wrapped__(DEVICE, torch.float32)
norm_kernels.gradients = plain
print("agrees: kernels that give no numbers are not used")

layer = nn.BatchNorm2d(8, device=DEVICE)
spoiled = torch.randn(2, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
spoiled[0, 3, 1, 1] = math.nan
bad = norm_clamp(spoiled, layer, 0.0, 6.0).isnan().flatten(2).all(dim=2).all(dim=0)
assert bad.tolist() == [k == 3 for k in range(8)], bad
assert bool(
    norm_clamp(spoiled, layer.eval(), 0.0, 6.0)[:, 3].isnan().all()
)  # the running statistics took it up
print("agrees: what is not a number stays so, in its channel")
