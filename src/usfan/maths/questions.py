"""Which images to ask about: those whose labels settle the names of most images.

k-means of the view's points into as many groups as there will be labels, each image weighted by the entropy of its soft
labels, which holds the doubt about its cluster's name, plus 1/10 so that no image counts for nothing:

    min Σ_i (H(q_i) + 0.1) ‖u_i − μ_g(i)‖²

Groups lie where images in doubt are many, and apart from each other. Those that have no label yet are asked about, the
heaviest first, each by the image nearest to its middle (the weighted clustering of CLUE, Prabhu et al., 2021, with the
doubt of names in place of the softmax's entropy).

Shapes: N images, D directions, K classes.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from usfan.errors import ConfigError
from usfan.maths.objectives import entropy

WEIGHT_WITHOUT_DOUBT = 0.1


def name_questions(
    points: Tensor, soft_labels: Tensor, labelled: Tensor, count: int, seed: int = 0
) -> Tensor:
    """Rows of the `count` images to ask about, the most urgent first, or of all that have no label. `labelled`: rows
    that have one, or that the user skipped."""
    from sklearn.cluster import KMeans

    if count < 1:
        raise ConfigError(f"the number of images to ask about must be at least 1; got {count}")
    points = points.double().cpu()
    labelled = labelled.cpu()
    weight = entropy(soft_labels.double().cpu()).clamp_min(0) + WEIGHT_WITHOUT_DOUBT
    groups = min(len(labelled) + count, len(points))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different images than groups
        means = KMeans(groups, n_init=1, random_state=seed)
        means.fit(points.numpy(), sample_weight=weight.numpy())
    member = torch.from_numpy(means.labels_).long()
    centres = torch.from_numpy(means.cluster_centers_)
    distance = (points - centres[member]).square().sum(dim=1)
    distance[labelled] = math.inf
    mass = torch.zeros(groups, dtype=torch.float64).index_add_(0, member, weight)
    mass[member[labelled]] = 0
    chosen = []
    for group in mass.argsort(descending=True, stable=True)[:count].tolist():
        rows = (member == group).nonzero().flatten()
        if len(rows) and float(distance[rows].min()) < math.inf:
            row = int(rows[distance[rows].argmin()])
            chosen.append(row)
            distance[row] = math.inf
    rest = weight.masked_fill(distance.isinf(), -1)
    free = int(distance.isfinite().sum())
    missing = min(count - len(chosen), free)
    more = rest.argsort(descending=True, stable=True)[:missing].tolist()
    return torch.tensor([*chosen, *more], dtype=torch.long)
