"""1×1 convolutions as matrix products: the same sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from usfan.engine.accelerate.layers import plain_layers
from usfan.engine.accelerate.pointwise import PointwiseConv2d, is_pointwise, multiply_pointwise


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 8, 5, 7), (1, 8, 1, 1), (0, 8, 4, 4)], ids=str)
def test_outputs_and_gradients_are_the_convolutions(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 5, 1, bias=bias).double().to(memory_format=torch.channels_last)
    images = (
        torch.randn(shape, dtype=torch.float64)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    expected = layer(images)
    grad = torch.randn_like(expected)
    parts = (images, *layer.parameters())
    gradients = torch.autograd.grad(expected, parts, grad)
    multiply_pointwise(layer)
    assert type(layer) is PointwiseConv2d
    found = layer(images)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, parts, grad), gradients)


def test_channels_first_goes_through_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("usfan.engine.accelerate.pointwise.F.linear")
    layer = PointwiseConv2d(8, 5, 1)
    images = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(
        layer(images), nn.functional.conv2d(images, layer.weight, layer.bias)
    )


def test_only_plain_ones_are_taken_and_given_back() -> None:
    others = [nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1, stride=2), nn.Conv2d(8, 8, 1, groups=2)]
    others.append(nn.Conv2d(8, 8, 1, padding=1))
    assert not any(map(is_pointwise, others))
    net = nn.Sequential(nn.Conv2d(8, 8, 1), *others)
    multiply_pointwise(net)
    assert [type(layer) for layer in net] == [PointwiseConv2d, *[nn.Conv2d] * 4]
    plain_layers(net)
    assert [type(layer) for layer in net] == [nn.Conv2d] * 5
