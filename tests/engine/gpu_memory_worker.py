"""A process of its own for `test_gpu`: trains with room for the network and a batch of pixels, but not for all that the
backward pass keeps; then the same with room for everything. Prints what was said, and the largest difference."""

from __future__ import annotations

import json
import logging

import torch

from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.runtime import start_runtime
from usfan.training.source import train_source

ROOM = 3e9
"""Bytes; ResNet-50 at batch 64 in float32 wants more than twice that, and its largest layer a third."""


def main() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("usfan").addHandler(handler)
    runtime = start_runtime(RuntimeConfig(device="cuda", precision="32", compile="off"))
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.fp32_precision = "ieee"
    pixels = torch.randint(0, 256, (128, 3, 256, 256), dtype=torch.uint8)
    data = Store(pixels.cuda(), torch.arange(128), torch.arange(128) % 4, tuple("abcd"))
    settings = {
        "backbone": "resnet50",
        "pretrained": "none",
        "epochs": 1,
        "batch_size": 64,
        "validation_share": 0.0,
    }
    torch.cuda.set_per_process_memory_fraction(
        ROOM / torch.cuda.get_device_properties(0).total_memory
    )
    crowded = train_source(data, runtime=runtime, **settings)
    while_crowded = list(said)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.reset_peak_memory_stats()
    plain = train_source(data, runtime=runtime, **settings)
    one = crowded.classifier.state_dict()
    two = plain.classifier.state_dict()
    found = {
        "crowded": while_crowded,
        "plain": said[len(while_crowded) :],
        "plain_peak": torch.cuda.max_memory_reserved(),
        "difference": max(float((one[k].double() - two[k].double()).abs().max()) for k in one),
    }
    print("@" + json.dumps(found))


if __name__ == "__main__":
    main()
