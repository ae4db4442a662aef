"""Nearest neighbours among the samples of a target, by cosine.

Shapes: N samples, D features, k neighbours. Rows of similarities are made a chunk at a time: nothing holds N × N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.posterior.fit import append_one
from usfan.threads import threads_for

CHUNK = {"cpu": 128}
"""Rows of similarities at a time on a CPU, which saves memory; a GPU takes 512."""

SIMILARITIES = 1 << 25
"""Similarities of a batch with a bank that are held at once: 128 MiB of them."""


def unit_features(features: Tensor) -> Tensor:
    """[z, 1] scaled to length 1."""
    return torch.nn.functional.normalize(append_one(features.float()), dim=1)


def nearest_neighbours(features: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions N×k and similarities N×k (clamped at 0) of each sample's nearest neighbours, itself left out."""
    phi = unit_features(features)
    k = min(k, len(phi) - 1)
    places, values = [], []
    chunk = CHUNK.get(phi.device.type, 512)
    with threads_for(chunk * phi.numel()):
        for start in range(0, len(phi), chunk):
            similarity = phi[start : start + chunk] @ phi.T
            rows = torch.arange(len(similarity), device=phi.device)
            similarity[rows, rows + start] = -torch.inf
            top = similarity.topk(k, dim=1)
            places.append(top.indices)
            values.append(top.values.clamp_min(0))
    return torch.cat(places), torch.cat(values)


def nearest_in_bank(queries: Tensor, bank: Tensor, k: int, own: Tensor) -> Tensor:
    """Positions B×k of the rows of the bank N×D that are nearest to each query B×D, all of length 1. `own` holds the
    row of each query itself, which is left out. Sizes alone decide the steps, so a CUDA graph can hold them."""
    k = min(k, len(bank) - 1)
    rows = max(1, SIMILARITIES // len(bank))
    found = [
        (query @ bank.T).scatter_(1, mine[:, None], -torch.inf).topk(k, dim=1).indices
        for query, mine in zip(queries.split(rows), own.split(rows), strict=True)
    ]
    return torch.cat(found)
