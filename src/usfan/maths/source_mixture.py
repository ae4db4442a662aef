"""Several classifiers of the same classes as one: a mixture whose weights say how well each of them fits the target.

Source s predicts p_s (point estimate) and p̂_s (predictive of its uncertainty) for a sample. The mixture is

    p = Σ_s α_s p_s,    p̂ = Σ_s α_s p̂_s,    Σ_s α_s = 1

α_s ∝ κ_s / (1 − κ_s), the odds of the structure κ_s of the target that the predictions of source s explain before it
was adapted (`maths.agreement`): a source that knows this target counts more.

The mutual information of the mixture, H(p̂) − Σ_s α_s (H(p̂_s) − I_s), also counts what the sources disagree about.

Shapes: N samples, B batch, K classes, S sources, D_s features of source s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from usfan.maths.agreement import NEIGHBOURS, kappa, sample_rows
from usfan.maths.neighbours import nearest_neighbours, unit_features
from usfan.maths.objectives import entropy
from usfan.maths.outputs import Outputs

LEAST_KAPPA = 0.01
"""κ counts as at least this, and as at most 1 − this: its odds are finite."""


def reordered(outputs: Outputs, order: Tensor) -> Outputs:
    """The same with class k where `order[k]` was."""
    return dataclasses.replace(
        outputs,
        logits=outputs.logits[:, order],
        probs=outputs.probs[:, order],
        posterior_probs=outputs.posterior_probs[:, order],
    )


def mixed(outputs: Sequence[Outputs], shares: Tensor) -> Outputs:
    """The mixture by shares S as one classifier; its features are those of all sources side by side, its logits
    log p."""
    weights = shares.to(outputs[0].probs)
    weights = weights / weights.sum()
    probs = weighted_sum([out.probs for out in outputs], weights)
    predictive = weighted_sum([out.posterior_probs for out in outputs], weights)
    within = [entropy(out.posterior_probs) - out.mutual_information for out in outputs]
    information = entropy(predictive) - weighted_sum(within, weights)
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
    """Σ_s α_s t_s of S tables of one shape."""
    weighted = torch.stack(tables, dim=-1) * weights
    return weighted.sum(dim=-1)


def evidence_shares(before: Sequence[Outputs]) -> Tensor:
    """α, S: the odds of κ of each source's predictions before it was adapted, divided by their sum. Neighbours are
    those in the features N × D_s of all sources side by side, each of length 1."""
    predicted = torch.stack([out.probs.argmax(dim=1) for out in before])
    sources, count = predicted.shape
    if count < 2:
        return torch.full((sources,), 1 / sources, dtype=torch.float64)
    rows = sample_rows(count).to(predicted.device)
    joined = torch.cat([unit_features(out.features[rows]) for out in before], dim=1)
    near, _ = nearest_neighbours(joined, NEIGHBOURS)
    classes = before[0].probs.shape[1]
    kappas = [float(kappa(labels, near, classes)) for labels in predicted[:, rows]]
    explained = torch.tensor(kappas, dtype=torch.float64)
    explained = explained.clamp(LEAST_KAPPA, 1 - LEAST_KAPPA)
    odds = explained / (1 - explained)
    return odds / odds.sum()
