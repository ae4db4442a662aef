"""Layers that a GPU computes faster, in and out by one context manager."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from usfan.compute.accelerate.fused_norm import fuse_norms, plain_norms
from usfan.compute.accelerate.pointwise import multiply_pointwise, plain_pointwise
from usfan.compute.accelerate.stem import block_stems, plain_stems
from usfan.compute.passes import worth_compiling
from usfan.compute.runtime import Runtime
from usfan.compute.stepper import worth_capturing
from usfan.models.classifier import Classifier, plain_layout


@contextlib.contextmanager
def accelerated(classifier: Classifier, runtime: Runtime, steps: int) -> Iterator[Classifier]:
    """Rewritten layers while it trains, as far as so many steps pay for them. Afterwards it has its own layers again,
    is in test mode, and lies in memory as a loaded model does, so that the same bits come out of it."""
    try:
        if classifier.channels_last and worth_capturing(runtime, steps):
            if worth_compiling(runtime, steps):
                block_stems(classifier)
            else:
                dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
                fuse_norms(classifier, runtime.device, dtype)
                multiply_pointwise(classifier)
        yield classifier
    finally:
        plain_stems(classifier)
        plain_pointwise(classifier)
        plain_norms(classifier)
        settle_layout(classifier, runtime)


def settle_layout(classifier: Classifier, runtime: Runtime) -> None:
    """Test mode, and on a CPU the layout in memory that a loaded model has."""
    if runtime.device.type == "cpu":
        plain_layout(classifier)
    classifier.eval()
