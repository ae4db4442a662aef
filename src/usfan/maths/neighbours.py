"""Nearest neighbours among the samples of a target, by cosine.

Shapes: N samples, D features, B queries, k neighbours. Rows of similarities are computed a chunk at a time: nothing
holds N × N.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from usfan.threads import threads_for

CPU_ROWS = 128
GPU_ROWS = 512
"""Rows of similarities at a time: fewer on a CPU, which saves memory."""

SIMILARITIES = 1 << 25
"""Similarities of a batch with a bank that are held at once: 128 MiB of them."""


def unit_features(features: Tensor) -> Tensor:
    """[z, 1] scaled to length 1."""
    with_one = pad(features.float(), (0, 1), value=1.0)
    return normalize(with_one, dim=1)


def nearest_neighbours(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions N×k and cosines N×k of each sample's nearest neighbours, without itself."""
    return nearest_rows(unit_features(features), k)


def nearest_rows(phi: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by the products of rows N×D as they are."""
    k = min(k, len(phi) - 1)
    positions = []
    similarities = []
    chunk = CPU_ROWS if phi.device.type == "cpu" else GPU_ROWS
    with threads_for(chunk * phi.numel()):
        for start in range(0, len(phi), chunk):
            similarity = phi[start : start + chunk] @ phi.T
            rows = torch.arange(len(similarity), device=phi.device)
            similarity[rows, rows + start] = -torch.inf
            top = similarity.topk(k, dim=1)
            positions.append(top.indices)
            similarities.append(top.values)
    return torch.cat(positions), torch.cat(similarities)


def nearest_in_bank(
    queries: Tensor,
    bank: Tensor,
    k: int,
    samples: Tensor | None = None,
) -> Tensor:
    """Positions B×k of the rows of the bank N×D that are nearest to each query B×D, all of length 1. `samples` (B) is
    the row of each query itself, which is excluded. Sizes alone decide the steps, so a CUDA graph can hold them."""
    k = min(k, len(bank) - (samples is not None))
    rows = max(1, SIMILARITIES // len(bank))
    positions = []
    for start in range(0, max(1, len(queries)), rows):
        part = slice(start, start + rows)
        similarity = queries[part] @ bank.T
        if samples is not None:
            similarity.scatter_(1, samples[part, None], -torch.inf)
        positions.append(similarity.topk(k, dim=1).indices)
    return torch.cat(positions)
