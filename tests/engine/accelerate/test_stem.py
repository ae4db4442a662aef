"""The blocked first layer against the plain one, in float64: values, gradients, and which layers it is for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from usfan.engine.accelerate.layers import plain_layers
from usfan.engine.accelerate.stem import BlockedConv2d, block_stems


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sides", [(16, 16), (8, 22), (15, 16), (7, 7)])
def test_blocked_is_plain(channels: int, bias: bool, sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(channels, 5, 7, 2, 3, bias=bias).double()
    blocked = copy.deepcopy(plain)
    block_stems(blocked)
    assert type(blocked) is BlockedConv2d
    one = torch.randn(2, channels, *sides, dtype=torch.float64, requires_grad=True)
    two = one.detach().clone().requires_grad_()
    values = [plain(one), blocked(two)]
    torch.testing.assert_close(*values, rtol=0, atol=1e-12)
    for value in values:
        (value * torch.arange(value.numel()).view_as(value).cos()).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-12)
    for a, b in zip(plain.parameters(), blocked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


def test_other_layers_are_left_alone() -> None:
    others = nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.Conv2d(3, 4, 5, 2, 2),
        nn.Conv2d(3, 4, 7, 1, 3),
        nn.Conv2d(3, 4, 7, 2, 0),
        nn.Conv2d(8, 4, 7, 2, 3),
        nn.Conv2d(3, 3, 7, 2, 3, groups=3),
        nn.Conv2d(3, 4, 7, 2, 3, padding_mode="reflect"),
    )
    block_stems(others)
    assert {type(layer) for layer in others} == {nn.Conv2d}


def test_it_can_be_undone_and_keeps_its_weights() -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet18", num_classes=0)
    names = list(net.state_dict())
    kinds = [type(m) for m in net.modules()]
    block_stems(net)
    assert sum(type(m) is BlockedConv2d for m in net.modules()) == 1
    assert list(net.state_dict()) == names
    assert type(copy.deepcopy(net).conv1) is BlockedConv2d
    plain_layers(net)
    assert [type(m) for m in net.modules()] == kinds
