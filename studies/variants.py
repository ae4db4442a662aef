"""What was tried to make the posterior earn its place (docs/results.md): one change each, on top of a method.

Variants that are a setting of the library are that setting. The others are loops of `loops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from studies.loops import (
    AgreementWeights,
    Averaged,
    BalancedLabels,
    CertainCentroids,
    LastingLabels,
    LateLabels,
    MixedViews,
    PosteriorObjective,
    SettledFirst,
    SettledLate,
    SmoothCertainty,
    SpreadCertainty,
)

from usfan.adaptation.adapt import Adaptation


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    loop: type[Adaptation] = Adaptation
    full: bool = False


DEFAULT = {"balance": True, "diversity_memory": 0.9}
ANNEALED = {**DEFAULT, "anneal": True}
OWN = {"balance": None, "diversity_memory": None}
OWN_ANNEALED = {**OWN, "anneal": True}
GAUSSIAN = {**DEFAULT, "pseudo_label_source": "gaussian"}
CROPS = {**DEFAULT, "augment": "resized-crop-flip"}
CE_ONLY = {**DEFAULT, "weigh_entropy": False, "weigh_pseudo_labels": True}
VARIANTS = (
    Variant("shot-im", "shot-im", "no weights"),
    Variant("u-sfan", "u-sfan", "weights per epoch, mean 1, evidence prior, τ 0.4"),
    Variant("u-sfan memory", "u-sfan", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan posterior objective", "u-sfan", "IM of the posterior predictive", {}, PosteriorObjective),
    Variant("shot", "shot", "centroid pseudo-labels"),
    Variant("u-sfan+", "u-sfan+", "centroid pseudo-labels"),
    Variant("u-sfan+ propagation", "u-sfan+", "labels spread over neighbours", {"pseudo_label_source": "propagation"}),
    Variant("u-sfan+ memory", "u-sfan+", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot-im memory", "shot-im", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("u-sfan weighted L_div", "u-sfan", "weights inside L_div", {"weigh_diversity": True}),
    Variant("u-sfan smooth", "u-sfan", "certainty of the neighbourhood", {}, SmoothCertainty),
    Variant("u-sfan balanced", "u-sfan", "mean 1 within each predicted class", {"balance": True}),
    Variant("u-sfan epistemic", "u-sfan", "exp(−mutual information)", {"certainty": "epistemic"}),
    Variant("u-sfan power 2", "u-sfan", "squared weights", {"weight_power": 2.0}),
    Variant("u-sfan annealed", "u-sfan", "power 2 to 0 over the run", {"anneal": True}),
    Variant("u-sfan full GGN", "u-sfan", "no Kronecker factors", {}, Adaptation, full=True),
    Variant("u-sfan+ weighted CE", "u-sfan+", "certainty on the pseudo-label loss", {"weigh_pseudo_labels": True}),
    Variant(
        "u-sfan+ posterior centroid",
        "u-sfan+",
        "centroids from the posterior predictive",
        {"pseudo_label_source": "posterior-centroid"},
    ),
    Variant(
        "u-sfan+ propagation β 1",
        "u-sfan+",
        "labels spread over neighbours, β 1",
        {"pseudo_label_source": "propagation", "pseudo_label_weight": 1.0},
    ),
    Variant("u-sfan spread", "u-sfan", "certainty after spreading over neighbours", {}, SpreadCertainty),
    Variant("u-sfan τ 1", "u-sfan", "temperature 1", {"temperature": 1.0}),
    Variant(
        "u-sfan+ balanced CE only",
        "u-sfan+",
        "class-balanced certainty on the pseudo-label loss alone",
        {"balance": True, "weigh_entropy": False, "weigh_pseudo_labels": True},
    ),
    Variant(
        "u-sfan+ balanced CE only memory",
        "u-sfan+",
        "the same, L_div over the whole target",
        {"balance": True, "weigh_entropy": False, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
    ),
    Variant(
        "u-sfan+ balanced both memory",
        "u-sfan+",
        "class-balanced certainty on both losses, L_div over the whole target",
        {"balance": True, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
    ),
    Variant("shot memory", "shot", "L_div over the whole target", {"diversity_memory": 0.9}),
    Variant("shot averaged", "shot", "the recipe, its weights averaged too", {}, Averaged),
    Variant("u-sfan default", "u-sfan", "balanced, memory", DEFAULT, Averaged),
    Variant("u-sfan+ default", "u-sfan+", "balanced, memory", DEFAULT, Averaged),
    Variant("u-sfan+ resized crops", "u-sfan+", "balanced, memory, stronger views", CROPS, Averaged),
    Variant("shot-im crops", "shot-im", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("shot crops", "shot", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("u-sfan crops", "u-sfan", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ crops", "u-sfan+", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ certain centroids", "u-sfan+", "centroids of the certain", DEFAULT, CertainCentroids),
    Variant("u-sfan+ lasting labels", "u-sfan+", "labels from the running mean", DEFAULT, LastingLabels),
    Variant("u-sfan+ settled", "u-sfan+", "BatchNorm settled first", DEFAULT, SettledFirst),
    Variant("u-sfan+ settled crops", "u-sfan+", "the same, stronger views", CROPS, SettledFirst),
    Variant("u-sfan+ mixed views", "u-sfan+", "pseudo-label loss on mixtures", DEFAULT, MixedViews),
    Variant("u-sfan settled", "u-sfan", "balanced, memory, BatchNorm settled first", DEFAULT, SettledFirst),
    Variant("u-sfan default annealed", "u-sfan", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan+ default annealed", "u-sfan+", "balanced, memory, power 2 to 0", ANNEALED),
    Variant("u-sfan settled annealed", "u-sfan", "balanced, memory, settled, power 2 to 0", ANNEALED, SettledFirst),
    Variant("u-sfan+ settled annealed", "u-sfan+", "balanced, memory, settled, power 2 to 0", ANNEALED, SettledFirst),
    Variant("u-sfan+ late labels", "u-sfan+", "balanced, memory, pseudo-labels after a third", DEFAULT, LateLabels),
    Variant("u-sfan+ settled late", "u-sfan+", "balanced, memory, settled, the same", DEFAULT, SettledLate),
    Variant("shot late labels", "shot", "pseudo-labels after a third", {}, LateLabels),
    Variant("u-sfan+ annealed late", "u-sfan+", "power 2 to 0, pseudo-labels after a third", ANNEALED, LateLabels),
    Variant("u-sfan+ gaussian", "u-sfan+", "balanced, memory, labels by Gaussians with one covariance", GAUSSIAN),
    Variant("u-sfan+ own gaussian", "u-sfan+", "labels by Gaussians", {**OWN, "pseudo_label_source": "gaussian"}),
    Variant("u-sfan+ own annealed", "u-sfan+", "power 2 to 0", OWN_ANNEALED),
    Variant("u-sfan+ own annealed late", "u-sfan+", "the same, pseudo-labels after a third", OWN_ANNEALED, LateLabels),
    Variant("u-sfan own annealed", "u-sfan", "power 2 to 0", OWN_ANNEALED),
    Variant("u-sfan own settled", "u-sfan", "BatchNorm settled first", OWN, SettledFirst),
    Variant("u-sfan own settled annealed", "u-sfan", "both", OWN_ANNEALED, SettledFirst),
    Variant("u-sfan+ own settled", "u-sfan+", "BatchNorm settled first", OWN, SettledFirst),
    Variant("u-sfan+ own late labels", "u-sfan+", "pseudo-labels after a third", OWN, LateLabels),
    Variant("u-sfan+ own settled late", "u-sfan+", "both", OWN, SettledLate),
    Variant("u-sfan default full GGN", "u-sfan", "balanced, memory, no Kronecker factors", DEFAULT, full=True),
    Variant("u-sfan default τ 1", "u-sfan", "balanced, memory, temperature 1", {**DEFAULT, "temperature": 1.0}),
    Variant("u-sfan default epistemic", "u-sfan", "exp(−mutual information)", {**DEFAULT, "certainty": "epistemic"}),
    Variant("u-sfan+ default weighted CE", "u-sfan+", "both losses", {**DEFAULT, "weigh_pseudo_labels": True}),
    Variant(
        "u-sfan+ default posterior centroid",
        "u-sfan+",
        "balanced, memory, centroids from the posterior predictive",
        {**DEFAULT, "pseudo_label_source": "posterior-centroid"},
    ),
    Variant("u-sfan own", "u-sfan", "balance and memory as the program chooses", OWN),
    Variant("u-sfan+ own", "u-sfan+", "balance and memory as the program chooses", OWN),
    Variant("u-sfan+ balanced", "u-sfan+", "mean 1 within each predicted class", {"balance": True}),
    Variant("shot-im-entropy default", "shot-im-entropy", "point estimate, balanced, memory", DEFAULT),
    Variant("u-sfan+ balanced labels", "u-sfan+", "balanced, memory, labels of even shares", DEFAULT, BalancedLabels),
    Variant(
        "u-sfan+ agreement",
        "u-sfan+",
        "memory, pseudo-label loss weighted by the posterior's word on the label",
        {"weigh_entropy": False, "weigh_pseudo_labels": True, "diversity_memory": 0.9},
        AgreementWeights,
    ),
    Variant("u-sfan+ CE memory", "u-sfan+", "balanced certainty on CE alone, memory", CE_ONLY, Averaged),
    Variant("u-sfan+ CE memory β 1", "u-sfan+", "the same, β 1", {**CE_ONLY, "pseudo_label_weight": 1.0}, Averaged),
    Variant("shot propagation", "shot", "labels spread over neighbours", {"pseudo_label_source": "propagation"}),
    Variant("shot-im-entropy", "shot-im-entropy", "weights of the point estimate"),
    Variant("u-sfan step", "u-sfan", "weights every step, training mode", {"refresh": "step"}),
    Variant("u-sfan frozen BatchNorm", "u-sfan", "the source's statistics", {"batch_norm": "frozen"}),
    Variant("u-sfan prior 5e-4", "u-sfan", "the paper's literal prior", {"prior": 5e-4, "normalise_weights": False}),
)
