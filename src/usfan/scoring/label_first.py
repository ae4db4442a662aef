"""Which images to label first: those whose labels would help most, by the posterior.

An image is worth a label if the model is unsure of it, if many others are like it, and if no image like it is chosen
already. All three at once: k-means of the features φ (N×D, unit length) into as many clusters as there are labels to
give, each image weighted by its uncertainty u = H(p̂), the entropy of the posterior predictive of Eq. 6. It minimises

    Σ_n u_n ‖φ_n − μ_c(n)‖²,

so cluster centres lie where uncertain images are many, and apart from each other. The image nearest to each centre is
chosen (the weighted clustering of CLUE, Prabhu et al., 2021, with the posterior's entropy in place of the softmax's).
"""

from __future__ import annotations

import torch
from torch import Tensor

from usfan.errors import ConfigError
from usfan.posterior.predictive import entropy
from usfan.scoring.outputs import Outputs


def label_first(outputs: Outputs, count: int, *, labelled: Tensor | None = None, seed: int = 0) -> Tensor:
    """Positions (LongTensor) of the `count` images to label, the most urgent first.

    `labelled` are positions that have a label already: they are not chosen. With fewer images left, all are.
    """
    if count < 1:
        raise ConfigError(f"the number of images to label must be at least 1; got {count}")
    if outputs.features.shape[1] == 0:
        raise ConfigError("these outputs hold no features: label_first needs them")
    free = torch.ones(len(outputs), dtype=torch.bool)
    if labelled is not None:
        free[labelled.cpu()] = False
    rows = free.nonzero().flatten()
    features = torch.nn.functional.normalize(outputs.features.detach().float().cpu()[rows], dim=1)
    doubt = entropy(outputs.posterior_probs.detach().double().cpu()[rows]).clamp_min(0) + 1e-6
    if count >= len(rows):
        return rows[doubt.argsort(descending=True)]
    chosen, weight = nearest_to_centres(features, doubt, count, seed)
    return rows[chosen[weight.argsort(descending=True)]]


def nearest_to_centres(features: Tensor, doubt: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """For each cluster, the image nearest to its centre and the doubt in the cluster."""
    import warnings

    from sklearn.cluster import KMeans

    with warnings.catch_warnings():  # fewer different images than clusters: the gaps are filled below
        warnings.simplefilter("ignore")
        found = KMeans(count, n_init=3, random_state=seed).fit(features.numpy(), sample_weight=doubt.numpy())
    cluster = torch.from_numpy(found.labels_).long()
    distance = (features - torch.from_numpy(found.cluster_centers_).float()[cluster]).square().sum(dim=1)
    order = distance.argsort()
    first = {int(cluster[i]): i for i in reversed(order.tolist())}  # the nearest overwrites those behind it
    taken = set(first.values())
    rest = (i for i in doubt.argsort(descending=True).tolist() if i not in taken)
    chosen = [first[k] if k in first else next(rest) for k in range(count)]
    weight = torch.zeros(count, dtype=torch.float64).index_add_(0, cluster, doubt)
    return torch.tensor(chosen), weight
