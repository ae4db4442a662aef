"""Layers that a GPU computes faster, in and out by one context manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from usfan.engine.accelerate.fused_norm import FusedNorm, fuse_norms
from usfan.engine.accelerate.stem import BlockedConv2d, block_stems
from usfan.engine.passes import worth_compiling
from usfan.engine.runtime import Runtime
from usfan.engine.stepper import worth_capturing
from usfan.models.classifier import Classifier, plain_layout


@contextlib.contextmanager
def accelerated(classifier: Classifier, runtime: Runtime, steps: int) -> Iterator[Classifier]:
    """Rewritten layers while it trains, if this many steps pay for them. Afterwards it has its own layers again,
    is in test mode, and lies in memory as a loaded model does, so that the same bits come out of it."""
    try:
        if classifier.channels_last and worth_capturing(runtime, steps):
            if worth_compiling(runtime, steps):
                block_stems(classifier)
            else:
                dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
                fuse_norms(classifier, runtime.device, dtype)
        yield classifier
    finally:
        plain_layers(classifier)
        settle_layout(classifier, runtime)


def plain_layers(module: nn.Module) -> None:
    """Every rewritten layer is of its own class again: the one behind the class that was put before it."""
    for layer in module.modules():
        if isinstance(layer, (BlockedConv2d, FusedNorm)):
            layer.__class__ = type(layer).__mro__[2 if isinstance(layer, FusedNorm) else 1]


def settle_layout(classifier: Classifier, runtime: Runtime) -> None:
    """Test mode, and on a CPU the layout in memory that a loaded model has."""
    if runtime.device.type == "cpu":
        plain_layout(classifier)
    classifier.eval()
