"""Variants that were tried to improve on a method (docs/studies/certainty-weights.md): each changes one thing.

A variant is a row: a method of the library with other settings, with parts of `studies.terms` in place of its own, or
with one term more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from studies.terms import (
    AgreementLabels,
    AveragedWeights,
    BalancedLabels,
    CertainCentroids,
    EpistemicCertainty,
    GaussianLabels,
    LastingLabels,
    LateLabels,
    MixedLabels,
    PlainEntropy,
    PosteriorCentroids,
    PosteriorInformation,
    PropagatedLabels,
    SmoothCertainty,
    SpreadCertainty,
    SquaredCertainty,
    WeightedDiversity,
    WeightedLabels,
)

from usfan.adaptation.methods import METHODS, Method
from usfan.adaptation.terms.term import Term


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    parts: tuple[type, ...] = ()
    """Each takes the place of the part that it is a kind of, with its settings."""
    more: tuple[type[Term], ...] = ()
    settles: bool = False
    full: bool = False
    """The posterior with its whole covariance."""

    def row(self) -> Method:
        base = METHODS[self.method]
        certainty, split, *terms = (self.changed(part) for part in base.parts)
        terms += [kind() for kind in self.more]
        changes = {"certainty": certainty, "split": split, "terms": tuple(terms), "settles": self.settles}
        return dataclasses.replace(base, name=self.name, summary=self.what, **changes)

    def changed(self, part: Any) -> Any:
        kinds = [kind for kind in self.parts if issubclass(kind, type(part))]
        return kinds[0](**dataclasses.asdict(part)) if kinds else part


DEFAULT = {"balance": True, "diversity_memory": 0.9}
ANNEALED = {**DEFAULT, "anneal": True}
OWN = {"balance": None, "diversity_memory": None}
OWN_ANNEALED = {**OWN, "anneal": True}
CROPS = {**DEFAULT, "augment": "resized-crop-flip"}
CE_ONLY = (PlainEntropy, WeightedLabels)
AVERAGED: dict[str, Any] = {"more": (AveragedWeights,)}
VARIANTS: tuple[Variant, ...] = (
    Variant("shot-im", "shot-im", "no weights"),
    Variant("u-sfan", "u-sfan", "weights per epoch, mean 1, evidence prior, τ 0.4"),
    Variant("u-sfan memory", "u-sfan", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan posterior objective", "u-sfan", "IM of the posterior predictive", parts=(PosteriorInformation,)),
    Variant("shot", "shot", "centroid pseudo-labels"),
    Variant("u-sfan+", "u-sfan+", "centroid pseudo-labels"),
    Variant("u-sfan+ propagation", "u-sfan+", "labels spread over neighbours", parts=(PropagatedLabels,)),
    Variant("u-sfan+ memory", "u-sfan+", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot-im memory", "shot-im", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan weighted L_div", "u-sfan", "weights inside L_div", parts=(WeightedDiversity,)),
    Variant("u-sfan smooth", "u-sfan", "certainty of the neighbourhood", parts=(SmoothCertainty,)),
    Variant("u-sfan balanced", "u-sfan", "mean 1 within each predicted class", {"balance": True}),
    Variant("u-sfan epistemic", "u-sfan", "exp(−mutual information)", parts=(EpistemicCertainty,)),
    Variant("u-sfan power 2", "u-sfan", "squared weights", parts=(SquaredCertainty,)),
    Variant("u-sfan annealed", "u-sfan", "power 2 to 0 over the run", {"anneal": True}),
    Variant("u-sfan full GGN", "u-sfan", "no Kronecker factors", full=True),
    Variant("u-sfan+ weighted CE", "u-sfan+", "certainty on the pseudo-label loss", parts=(WeightedLabels,)),
    Variant(
        "u-sfan+ posterior centroid",
        "u-sfan+",
        "centroids from the posterior predictive",
        parts=(PosteriorCentroids,),
    ),
    Variant(
        "u-sfan+ propagation β 1",
        "u-sfan+",
        "labels spread over neighbours, β 1",
        {"pseudo_label_weight": 1.0},
        (PropagatedLabels,),
    ),
    Variant("u-sfan spread", "u-sfan", "certainty after spreading over neighbours", parts=(SpreadCertainty,)),
    Variant("u-sfan τ 1", "u-sfan", "temperature 1", {"temperature": 1.0}),
    Variant(
        "u-sfan+ balanced CE only",
        "u-sfan+",
        "class-balanced certainty on the pseudo-label loss alone",
        {"balance": True},
        CE_ONLY,
    ),
    Variant(
        "u-sfan+ balanced CE only memory",
        "u-sfan+",
        "the same, L_div over the whole target",
        DEFAULT,
        CE_ONLY,
    ),
    Variant(
        "u-sfan+ balanced both memory",
        "u-sfan+",
        "class-balanced certainty on both losses, L_div over the whole target",
        DEFAULT,
        (WeightedLabels,),
    ),
    Variant("shot memory", "shot", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot averaged", "shot", "the recipe, its weights averaged too", **AVERAGED),
    Variant("u-sfan default", "u-sfan", "balanced, memory", DEFAULT, **AVERAGED),
    Variant("u-sfan+ default", "u-sfan+", "balanced, memory", DEFAULT, **AVERAGED),
    Variant("u-sfan+ resized crops", "u-sfan+", "balanced, memory, stronger views", CROPS, **AVERAGED),
    Variant("shot-im crops", "shot-im", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("shot crops", "shot", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("u-sfan crops", "u-sfan", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ crops", "u-sfan+", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ certain centroids", "u-sfan+", "centroids of the certain", DEFAULT, (CertainCentroids,)),
    Variant("u-sfan+ lasting labels", "u-sfan+", "labels from the running mean", DEFAULT, (LastingLabels,)),
    Variant("u-sfan+ settled", "u-sfan+", "BatchNorm settled first", DEFAULT, settles=True),
    Variant("u-sfan+ settled crops", "u-sfan+", "the same, stronger views", CROPS, settles=True),
    Variant("u-sfan+ mixed views", "u-sfan+", "pseudo-label loss on mixtures", DEFAULT, (MixedLabels,)),
    Variant("u-sfan settled", "u-sfan", "balanced, memory, BatchNorm settled first", DEFAULT, settles=True),
    Variant("u-sfan default annealed", "u-sfan", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan+ default annealed", "u-sfan+", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan settled annealed", "u-sfan", "balanced, memory, settled, power 2 to 0", ANNEALED, settles=True),
    Variant("u-sfan+ settled annealed", "u-sfan+", "balanced, memory, settled, power 2 to 0", ANNEALED, settles=True),
    Variant("u-sfan+ late labels", "u-sfan+", "balanced, memory, pseudo-labels after a third", DEFAULT, (LateLabels,)),
    Variant(
        "u-sfan+ settled late", "u-sfan+", "balanced, memory, settled, the same", DEFAULT, (LateLabels,), settles=True
    ),
    Variant("shot late labels", "shot", "pseudo-labels after a third", parts=(LateLabels,)),
    Variant("u-sfan+ annealed late", "u-sfan+", "power 2 to 0, pseudo-labels after a third", ANNEALED, (LateLabels,)),
    Variant(
        "u-sfan+ gaussian",
        "u-sfan+",
        "balanced, memory, labels by Gaussians with one covariance",
        DEFAULT,
        (GaussianLabels,),
    ),
    Variant("u-sfan+ own gaussian", "u-sfan+", "labels by Gaussians", OWN, (GaussianLabels,)),
    Variant("u-sfan+ own annealed", "u-sfan+", "power 2 to 0", OWN_ANNEALED),
    Variant(
        "u-sfan+ own annealed late", "u-sfan+", "the same, pseudo-labels after a third", OWN_ANNEALED, (LateLabels,)
    ),
    Variant("u-sfan own annealed", "u-sfan", "power 2 to 0", OWN_ANNEALED),
    Variant("u-sfan own settled", "u-sfan", "BatchNorm settled first", OWN, settles=True),
    Variant("u-sfan own settled annealed", "u-sfan", "both", OWN_ANNEALED, settles=True),
    Variant("u-sfan+ own settled", "u-sfan+", "BatchNorm settled first", OWN, settles=True),
    Variant("u-sfan+ own late labels", "u-sfan+", "pseudo-labels after a third", OWN, (LateLabels,)),
    Variant("u-sfan+ own settled late", "u-sfan+", "both", OWN, (LateLabels,), settles=True),
    Variant("u-sfan default full GGN", "u-sfan", "balanced, memory, no Kronecker factors", DEFAULT, full=True),
    Variant("u-sfan default τ 1", "u-sfan", "balanced, memory, temperature 1", {**DEFAULT, "temperature": 1.0}),
    Variant("u-sfan default epistemic", "u-sfan", "exp(−mutual information)", DEFAULT, (EpistemicCertainty,)),
    Variant("u-sfan+ default weighted CE", "u-sfan+", "both losses", DEFAULT, (WeightedLabels,)),
    Variant(
        "u-sfan+ default posterior centroid",
        "u-sfan+",
        "balanced, memory, centroids from the posterior predictive",
        DEFAULT,
        (PosteriorCentroids,),
    ),
    Variant("u-sfan own", "u-sfan", "balance and memory as the program chooses", OWN),
    Variant("u-sfan+ own", "u-sfan+", "balance and memory as the program chooses", OWN),
    Variant("u-sfan+ balanced", "u-sfan+", "mean 1 within each predicted class", {"balance": True}),
    Variant("shot-im-entropy default", "shot-im-entropy", "point estimate, balanced, memory", DEFAULT),
    Variant(
        "u-sfan+ balanced labels",
        "u-sfan+",
        "balanced, memory, labels of even shares",
        DEFAULT,
        (BalancedLabels,),
        **AVERAGED,
    ),
    Variant(
        "u-sfan+ agreement",
        "u-sfan+",
        "memory, pseudo-label loss weighted by the posterior's word on the label",
        {"diversity_memory": 0.9},
        (PlainEntropy, AgreementLabels),
        **AVERAGED,
    ),
    Variant("u-sfan+ CE memory", "u-sfan+", "balanced certainty on CE alone, memory", DEFAULT, CE_ONLY, **AVERAGED),
    Variant(
        "u-sfan+ CE memory β 1",
        "u-sfan+",
        "the same, β 1",
        {**DEFAULT, "pseudo_label_weight": 1.0},
        CE_ONLY,
        **AVERAGED,
    ),
    Variant("shot propagation", "shot", "labels spread over neighbours", parts=(PropagatedLabels,)),
    Variant("shot-im-entropy", "shot-im-entropy", "weights of the point estimate"),
    Variant("u-sfan step", "u-sfan", "weights every step, training mode", {"refresh": "step"}),
    Variant("u-sfan prior 5e-4", "u-sfan", "the paper's literal prior", {"prior": 5e-4, "normalise_weights": False}),
)
