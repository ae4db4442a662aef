"""Several classifiers of the same classes as one: a mixture with its own weights for each sample.

Source s predicts p_s (point estimate) and p̂_s (predictive of its uncertainty) for a sample, with certainty
c_s = exp(−H(p̂_s)). The mixture is

    p = Σ_s w_s p_s,    p̂ = Σ_s w_s p̂_s,    Σ_s w_s = 1

    evidence     w_s ∝ κ_s / (1 − κ_s), the odds of the structure κ_s of the target that the predictions of source s
                 explain before it was adapted (`maths.agreement`): a source that knows this target counts more
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
from usfan.maths.agreement import NEIGHBOURS, evenly_spaced, kappa
from usfan.maths.neighbours import nearest_neighbours, unit_features
from usfan.maths.objectives import certainty_weights, entropy
from usfan.maths.outputs import Outputs

LEAST_KAPPA = 0.01
LARGEST_KAPPA = 0.99
"""Range of κ whose odds are taken."""
STEPS = 500
"""Steps by which the weights of the sources are learned: a handful of numbers."""


def reordered(outputs: Outputs, order: Tensor) -> Outputs:
    """The same with class k where `order[k]` was."""
    return dataclasses.replace(
        outputs,
        logits=outputs.logits[:, order],
        probs=outputs.probs[:, order],
        posterior_probs=outputs.posterior_probs[:, order],
    )


def source_weights(
    outputs: Sequence[Outputs],
    shares: Tensor,
    *,
    by_certainty: bool,
) -> Tensor:
    """w, B × S."""
    probs = outputs[0].probs
    weights = torch.ones_like(probs[:, :1]) * shares.to(probs)
    if by_certainty:
        certainties = [certainty_weights(out.posterior_probs) for out in outputs]
        weights = weights * torch.stack(certainties, dim=1)
    return weights / weights.sum(dim=1, keepdim=True)


def mixed(outputs: Sequence[Outputs], weights: Tensor) -> Outputs:
    """The mixture as one classifier; its features are those of all sources side by side, its logits log p."""
    probs = weighted_sum([out.probs for out in outputs], weights)
    predictive = weighted_sum([out.posterior_probs for out in outputs], weights)
    within = [entropy(out.posterior_probs) - out.mutual_information for out in outputs]
    mean_within = weights * torch.stack(within, dim=1)
    information = entropy(predictive) - mean_within.sum(dim=1)
    features = torch.cat([out.features for out in outputs], dim=1)
    logits = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
    return Outputs(
        features,
        logits,
        probs,
        posterior_probs=predictive,
        mutual_information=information.clamp_min(0),
    )


def weighted_sum(tables: list[Tensor], weights: Tensor) -> Tensor:
    """Σ_s w_s p_s, B × K, from S tables B × K and w, B × S."""
    weighted = torch.stack(tables, dim=1) * weights[:, :, None]
    return weighted.sum(dim=1)


def choose_shares(
    mixing: str,
    before: Sequence[Outputs],
    after: Sequence[Outputs],
) -> Tensor:
    """α, S, from the outputs of every source on the target before and after it was adapted."""
    if mixing == "evidence":
        predicted = [out.probs.argmax(dim=1) for out in before]
        return evidence_shares(predicted, [out.features for out in before])
    if mixing == "learned":
        return learned_shares([out.probs for out in after])
    weights = torch.ones(len(after), dtype=torch.float64)
    if mixing == "certainty":
        means = [certainty_weights(out.posterior_probs).double().mean() for out in after]
        weights = 1 / torch.stack(means).cpu()
    return weights / weights.sum()


def evidence_shares(predicted: Sequence[Tensor], features: Sequence[Tensor]) -> Tensor:
    """The odds of κ of each source's predicted classes N, divided by their sum. Neighbours are those in the features
    N × D_s of all sources side by side, each of length 1."""
    table = torch.stack(list(predicted))
    sources, count = table.shape
    if count < 2:
        return torch.full((sources,), 1 / sources, dtype=torch.float64)
    rows = evenly_spaced(count).to(table.device)
    joined = torch.cat([unit_features(part[rows]) for part in features], dim=1)
    near, _ = nearest_neighbours(joined, NEIGHBOURS)
    classes = 1 + int(table.max())
    kappas = [float(kappa(labels, near, classes)) for labels in table[:, rows]]
    explained = torch.tensor(kappas, dtype=torch.float64)
    explained = explained.clamp(LEAST_KAPPA, LARGEST_KAPPA)
    odds = explained / (1 - explained)
    return odds / odds.sum()


def learned_shares(probs: Sequence[Tensor]) -> Tensor:
    """α, S, from the point estimates N × K of every source: DECISION's weights."""
    if len({tuple(p.shape) for p in probs}) != 1:
        raise DataError("the sources must say something of the same images and classes")
    table = torch.stack([p.detach().double() for p in probs])
    logits = table.new_zeros(len(table)).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.1)
    with torch.enable_grad():
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = information_loss(table, logits.softmax(dim=0))
            loss.backward()
            optimiser.step()
    return logits.detach().softmax(dim=0).cpu()


def information_loss(probs: Tensor, shares: Tensor) -> Tensor:
    """mean H(p) − H(mean p) of the mixture, from probs S × N × K and α."""
    mixture = torch.einsum("s,snk->nk", shares, probs)
    return entropy(mixture).mean() - entropy(mixture.mean(dim=0))
