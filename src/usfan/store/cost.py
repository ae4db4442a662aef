"""The cost of one image for a network, from a sketch of it on torch's meta device: nothing is allocated.

A config of a few kilobytes can request any input size. A network may cost twice what it costs at the size it is
made for, or the floor below, whichever is more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from usfan.budget import check_cost
from usfan.data.views import InputSpec

FLOOR_BYTES = 16 << 20
"""A batch of 64 such images takes 1 GiB."""
FLOOR_OPERATIONS = 4e9
"""Operations of a ResNet-50 at 224×224."""
TIMES = 2


class Cost(NamedTuple):
    bytes: int
    """The largest layer's input and output, and the pixels."""
    operations: float
    """Multiplications in convolutions, linear layers and attention."""


def cost_of(network: nn.Module, spec: InputSpec) -> Cost:
    """Cost of one image. Errors of the network are passed on."""
    largest = 0

    def measure(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal largest
        tensors = [value for value in (*inputs, output) if isinstance(value, Tensor)]
        largest = max(largest, sum(tensor.numel() for tensor in tensors))

    leaves = [module for module in network.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(measure) for module in leaves]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(torch.zeros(1, *spec.shape, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    pixels = spec.channels * (5 * spec.resize**2 + 8 * spec.size**2)
    return Cost(4 * largest + pixels, counter.get_total_flops() / 2)


def check_image_cost(
    network: nn.Module, spec: InputSpec, native: InputSpec, place: str
) -> None:
    """Raise if an image costs out of proportion to what the network is made for."""
    cost = cost_of(network, spec)
    base = Cost(0, 0.0)
    if cost.bytes > FLOOR_BYTES or cost.operations > FLOOR_OPERATIONS:
        base = cost_of(network, native)
    size = f"{place}: input: images of {spec.shape_text} (resized to {spec.resize})"
    most_bytes = max(FLOOR_BYTES, TIMES * base.bytes)
    most_operations = max(FLOOR_OPERATIONS, TIMES * base.operations)
    check_cost(f"{size} need memory", cost.bytes, most_bytes, "bytes each")
    check_cost(f"{size} need", cost.operations, most_operations, "operations each")
