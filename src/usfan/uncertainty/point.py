"""The point estimate: one draw, f_1 = Wz + b, so I = 0. The class is uncertain, the weights are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.uncertainty.base import DrawsOfPart, Uncertainty


@dataclass(frozen=True, eq=False)
class PointEstimate(Uncertainty):
    """The head itself."""

    kind = "point"

    def part_draws(
        self,
        features: Tensor,
        temperature: float,
        samples: int,
        generator: torch.Generator | None = None,
    ) -> DrawsOfPart:
        return lambda part: self.logits(features[part])[:, None] / temperature

    def draw_size(self, samples: int) -> int:
        return len(self.weight)
