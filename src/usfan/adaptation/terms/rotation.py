"""SHOT++'s auxiliary task: by how many quarter turns was this picture turned?

    ρ · E[CE(r([z, z']), turns)]          z: features of the picture (no gradient), z': of the turned picture,
                                          r: a linear layer of the term, trained along with the network

The authors train r alone first, on frozen features; here it is trained along from the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from usfan.adaptation.terms.term import Batch, Context, Term
from usfan.config import number
from usfan.maths.objectives import smoothed_cross_entropy


@dataclass
class Rotation(Term):
    """Predicts by how much a picture was turned."""

    needs_pixels = True

    rotation_weight: float = number(0.6)
    """ρ, weight of the rotation loss."""

    def start(self, context: Context) -> None:
        self.turns = torch.zeros(context.count, dtype=torch.long, device=context.device)
        features = context.source.features
        width = 2 * features.shape[1]
        generator = torch.Generator().manual_seed(context.seed)
        weight = torch.randn(4, width, generator=generator) * (2 / (4 + width)) ** 0.5
        self.weight = weight.to(features).requires_grad_()
        self.bias = features.new_zeros(4).requires_grad_()

    def begin_epoch(self, epoch: int) -> None:
        draw = np.random.default_rng((self.context.seed, epoch, 2))
        self.turns.copy_(torch.from_numpy(draw.integers(4, size=len(self.turns))))

    def parameters(self) -> list[Tensor]:
        return [self.weight, self.bias]

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight.detach(), "bias": self.bias.detach()}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.weight.copy_(tensors["weight"])
        self.bias.copy_(tensors["bias"])

    def __call__(self, batch: Batch) -> Tensor:
        turns = self.turns[batch.samples]
        turned, _ = batch.forward(quarter_turns(batch.images, turns))
        both = torch.cat([batch.features.detach(), turned], dim=1)
        logits = both @ self.weight.T + self.bias
        loss = self.context.mean(smoothed_cross_entropy(logits, turns, 0.0))
        batch.notes["loss_rotation"] = loss
        return self.rotation_weight * loss


def quarter_turns(images: Tensor, turns: Tensor) -> Tensor:
    """Each of the square images B×C×S×S turned by its number of quarter turns."""
    turned = torch.stack([torch.rot90(images, k, dims=(2, 3)) for k in range(4)])
    return turned[turns, torch.arange(len(images), device=images.device)]
