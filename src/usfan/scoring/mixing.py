"""Several classifiers of the same classes as one: a mixture whose weights are those of each sample.

Source s says p_s (point estimate) and p̂_s (predictive of its uncertainty) of a sample, with certainty
c_s = exp(−H(p̂_s)). The mixture is

    p = Σ_s w_s p_s,    p̂ = Σ_s w_s p̂_s,    Σ_s w_s = 1

    evidence     w_s ∝ κ_s / (1 − κ_s), the odds of the structure κ_s of the target that the predictions of source s
                 explain before it was adapted (`scoring.structure`): a source that knows this target counts more
    certainty    w_s ∝ c_s / c̄_s, c̄_s the mean over the target: each sample goes to the source that is surer of it
                 than of others. Without c̄_s the source with the most data, whose posterior is narrowest, would win
    mean         w_s = 1 / S
    learned      the weights of DECISION (Ahmed et al. 2021): the w on the simplex that minimises the information
                 maximisation loss of the mixture over the target, mean H(p) − H(mean p)

The mutual information of the mixture, H(p̂) − Σ_s w_s (H(p̂_s) − I_s), also counts what the sources disagree about.

Shapes: N samples, B batch, K classes, S sources, D_s features of source s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.errors import DataError
from usfan.posterior.predictive import certainty_weights, entropy
from usfan.scoring.neighbours import nearest_neighbours, unit_features
from usfan.scoring.outputs import Outputs
from usfan.scoring.structure import NEIGHBOURS, evenly_spaced, kappa

EXPLAINED = (0.01, 0.99)
"""Range of κ whose odds are taken."""
STEPS = 500
"""Steps by which the weights of the sources are learned: a handful of numbers."""


def reordered(outputs: Outputs, order: Tensor) -> Outputs:
    """The same with class k where `order[k]` was."""
    tables = {name: getattr(outputs, name)[:, order] for name in ("logits", "probs", "posterior_probs")}
    return dataclasses.replace(outputs, **tables)


def source_weights(outputs: Sequence[Outputs], shares: Tensor, *, by_certainty: bool) -> Tensor:
    """w, B × S."""
    weights = torch.ones_like(outputs[0].probs[:, :1]) * shares.to(outputs[0].probs)
    if by_certainty:
        weights = weights * torch.stack([certainty_weights(out.posterior_probs) for out in outputs], dim=1)
    return weights / weights.sum(dim=1, keepdim=True)


def mixed(outputs: Sequence[Outputs], weights: Tensor) -> Outputs:
    """The mixture as one classifier; its features are those of all sources side by side, its logits log p."""
    probs, predictive = (
        torch.stack([getattr(out, name) for out in outputs], dim=1).mul(weights[:, :, None]).sum(dim=1)
        for name in ("probs", "posterior_probs")
    )
    within = torch.stack([entropy(out.posterior_probs) - out.mutual_information for out in outputs], dim=1)
    information = (entropy(predictive) - (weights * within).sum(dim=1)).clamp_min(0)
    features = torch.cat([out.features for out in outputs], dim=1)
    logits = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return Outputs(features, logits, probs, predictive, information)


def choose_shares(mixing: str, before: Sequence[Outputs], after: Sequence[Outputs]) -> Tensor:
    """α, S, from what every source says of the target before and after it was adapted."""
    if mixing == "evidence":
        return evidence_shares([out.probs.argmax(dim=1) for out in before], [out.features for out in before])
    if mixing == "learned":
        return learned_shares([out.probs for out in after])
    weights = torch.ones(len(after), dtype=torch.float64)
    if mixing == "certainty":
        weights = torch.stack([1 / certainty_weights(out.posterior_probs).double().mean() for out in after]).cpu()
    return weights / weights.sum()


def evidence_shares(predicted: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
    """The odds of κ of each source's predicted classes N, divided by their sum. Neighbours are those in the features
    N × D_s of all sources side by side, each of length 1."""
    rows = evenly_spaced(len(predicted[0])).to(predicted[0].device)
    seen = torch.cat([unit_features(part[rows]) for part in features], dim=1)
    if len(rows) < 2:
        return torch.full((len(predicted),), 1 / len(predicted), dtype=torch.float64)
    near = nearest_neighbours(seen, min(NEIGHBOURS, len(rows) - 1))[0]
    classes = 1 + max(int(labels.max()) for labels in predicted)
    explained = torch.stack([kappa(labels[rows], near, classes)[0] for labels in predicted]).cpu()
    odds = explained.clamp(*EXPLAINED) / (1 - explained.clamp(*EXPLAINED))
    return odds / odds.sum()


def learned_shares(probs: Sequence[Tensor]) -> Tensor:
    """α, S, from the point estimates N × K of every source: DECISION's weights."""
    if len({tuple(p.shape) for p in probs}) != 1:
        raise DataError("the sources must say something of the same images and classes")
    table = torch.stack([p.detach().double() for p in probs])
    logits = torch.zeros(len(probs), dtype=torch.float64, device=table.device, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimiser.zero_grad()
            information_loss(table, logits.softmax(dim=0)).backward()
            optimiser.step()
    return logits.detach().softmax(dim=0).cpu()


def information_loss(probs: Tensor, shares: Tensor) -> Tensor:
    """mean H(p) − H(mean p) of the mixture, from probs S × N × K and α."""
    mixture = torch.einsum("s,snk->nk", shares, probs)
    return entropy(mixture).mean() - entropy(mixture.mean(dim=0))
