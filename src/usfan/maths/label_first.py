"""Which images to label first: those whose labels would help most, by the posterior.

A label helps most if the model is unsure of the image, if many others are like it, and if no image like it is chosen
already. One objective has all three: k-means of the features φ (N×D, unit length) into as many clusters as there are
labels to give, each image weighted by its uncertainty u = H(p̂), the entropy of the posterior predictive of Eq. 6:

    min Σ_n u_n ‖φ_n − μ_c(n)‖²

Cluster centres lie where uncertain images are many, and apart from each other. The image nearest to each centre is
chosen (the weighted clustering of CLUE, Prabhu et al., 2021, with the posterior's entropy in place of the softmax's).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from usfan.errors import ConfigError
from usfan.maths.objectives import entropy
from usfan.maths.outputs import Outputs


def label_first(
    outputs: Outputs,
    count: int,
    *,
    labelled: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Positions (LongTensor) of the `count` images to label, the most urgent first.

    `labelled` are positions that have a label already: they are not chosen. If fewer images remain, all are chosen.
    """
    if count < 1:
        raise ConfigError(f"the number of images to label must be at least 1; got {count}")
    if outputs.features.shape[1] == 0:
        raise ConfigError("these outputs hold no features: label_first needs them")
    free = torch.ones(len(outputs), dtype=torch.bool)
    if labelled is not None:
        free[labelled.cpu()] = False
    rows = free.nonzero().flatten()
    features = outputs.features.detach().float().cpu()[rows]
    features = torch.nn.functional.normalize(features, dim=1)
    probs = outputs.posterior_probs.detach().double().cpu()[rows]
    doubt = entropy(probs).clamp_min(0) + 1e-6
    if count >= len(rows):
        return rows[doubt.argsort(descending=True)]
    chosen, weight = nearest_to_centres(features, doubt, count, seed)
    return rows[chosen[weight.argsort(descending=True)]]


def nearest_to_centres(
    features: Tensor,
    doubt: Tensor,
    count: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """For each cluster, the image nearest to its centre and the doubt in the cluster."""
    from sklearn.cluster import KMeans

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer different images than clusters: see `rest`
        means = KMeans(count, n_init=3, random_state=seed)
        means.fit(features.numpy(), sample_weight=doubt.numpy())
    cluster = torch.from_numpy(means.labels_).long()
    centres = torch.from_numpy(means.cluster_centers_).float()
    distance = (features - centres[cluster]).square().sum(dim=1)
    nearest: dict[int, int] = {}
    for image in distance.argsort().tolist():
        nearest.setdefault(int(cluster[image]), image)
    chosen = set(nearest.values())
    by_doubt = doubt.argsort(descending=True).tolist()
    rest = (image for image in by_doubt if image not in chosen)
    images = [nearest[k] if k in nearest else next(rest) for k in range(count)]
    weight = doubt.new_zeros(count).index_add_(0, cluster, doubt)
    return torch.tensor(images), weight
