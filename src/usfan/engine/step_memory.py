"""How much memory a training step takes on a CPU, reported before the first one.

What the backward pass needs grows with the batch, and is nearly all of it. It is measured on two images: the tensors
that autograd keeps, each storage once. The peak is about a quarter above that (EfficientNet-Lite0 at batch 16: 1.4 GB,
80 MB kept per image). The batch is not made smaller unasked: BatchNorm and the diversity of a batch depend on it.
"""

from __future__ import annotations

import copy
import logging

import torch
from torch import Tensor

from usfan.data.memory import free_host_memory
from usfan.data.views import InputSpec
from usfan.engine.runtime import Runtime
from usfan.models.classifier import Classifier
from usfan.progress import say

log = logging.getLogger(__name__)

ABOVE = 1.25
"""Peak over what autograd keeps."""
SHARE = 0.8
"""Share of the free memory above which a step may not fit."""
WORTH_SAYING = 2 << 30
"""Bytes from which a step's memory is said at all."""
SMALL = 8 << 20
"""Bytes of a batch's images up to which nothing is measured."""


def check_step_memory(
    classifier: Classifier, spec: InputSpec, batch_size: int, runtime: Runtime
) -> None:
    """Report the memory of a step if it is large, and warn if it may not fit. For a trained backbone on a CPU."""
    if runtime.device.type != "cpu" or 4 * batch_size * spec.channels * spec.size**2 < SMALL:
        return
    each = ABOVE * kept_per_image(classifier, spec)
    free = free_host_memory()
    needed = batch_size * each
    if needed > SHARE * free:
        fits = max(2, 1 << (int(SHARE * free / each) or 1).bit_length() - 1)
        log.warning(
            "a step of %d images takes about %s of memory, and %s are free: pass --batch-size %d, or --tune new",
            batch_size,
            gigabytes(needed),
            gigabytes(free),
            fits,
        )
    elif needed > WORTH_SAYING:
        say(
            f"a step of {batch_size} images takes about {gigabytes(needed)} of memory; less with a smaller --batch-size"
        )


def kept_per_image(classifier: Classifier, spec: InputSpec) -> float:
    """Bytes that autograd keeps of one image for the backward pass."""
    network = copy.deepcopy(classifier).train()
    for parameter in network.parameters():
        parameter.requires_grad_(True)
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        images = torch.zeros(2, spec.channels, spec.size, spec.size)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            network(images)
    for tensor in (*network.parameters(), *network.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 2


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
