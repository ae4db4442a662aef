"""Predictions of a stream: each image once, as it comes, by the network in training mode, before the step it causes.

BatchNorm then takes the statistics of the batch. The last batch of an epoch is filled up with images of the first one,
whose first prediction counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.engine.runtime import Runtime


class StreamOutputs:
    """Features N×D and logits N×K of the images of the last epoch; at first those of the source model."""

    def __init__(self, features: Tensor, logits: Tensor, runtime: Runtime) -> None:
        self.features = features.clone()
        self.logits = logits.clone()
        self.runtime = runtime
        self.waiting = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        """N: images that this epoch has not predicted yet."""

    def begin_epoch(self) -> None:
        self.waiting.fill_(True)

    def write(self, samples: Tensor, features: Tensor, logits: Tensor) -> None:
        """The outputs of a batch, in place."""
        samples = self.runtime.gathered(samples)
        is_first = self.waiting[samples][:, None]
        for table, values in ((self.features, features), (self.logits, logits)):
            rows = self.runtime.gathered(values.detach().to(table.dtype))
            table[samples] = torch.where(is_first, rows, table[samples])
        self.waiting.index_fill_(
            0, samples, False
        )  # assigning copies from the CPU, which no CUDA graph can

    def outputs(self) -> tuple[Tensor, Tensor]:
        return self.features.clone(), self.logits.clone()

    def tensors(self) -> dict[str, Tensor]:
        return {"stream.features": self.features, "stream.logits": self.logits}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.features.copy_(tensors["stream.features"])
        self.logits.copy_(tensors["stream.logits"])
