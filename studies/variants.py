"""Variants that were tried to improve on a method (docs/studies/spoilt-source.md): each changes one thing.

A variant is a row: a method of the library with other settings, or with parts of `studies.terms` in place of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from studies.terms import (
    CertainCentroids,
    GaussianLabels,
    LastingLabels,
    LateLabels,
    MixedLabels,
)

from usfan.adaptation.methods import METHODS, Method


@dataclass(frozen=True)
class Variant:
    name: str
    method: str
    what: str
    settings: dict[str, Any] = field(default_factory=dict)
    parts: tuple[type, ...] = ()
    """Each takes the place of the part that it is a kind of, with its settings."""
    settles: bool = False

    def row(self) -> Method:
        base = METHODS[self.method]
        certainty, split, *terms = (self.changed(part) for part in base.parts)
        changes = {
            "certainty": certainty,
            "split": split,
            "terms": tuple(terms),
            "settles": self.settles,
        }
        return dataclasses.replace(base, name=self.name, summary=self.what, **changes)

    def changed(self, part: Any) -> Any:
        kinds = [kind for kind in self.parts if issubclass(kind, type(part))]
        return kinds[0](**dataclasses.asdict(part)) if kinds else part


DEFAULT = {"balance": True, "diversity_memory": 0.9}
OWN = {"balance": None, "diversity_memory": None}
OWN_ANNEALED = {**OWN, "anneal": True}
CROPS = {**DEFAULT, "augment": "resized-crop-flip"}
VARIANTS: tuple[Variant, ...] = (
    Variant("shot-im", "shot-im", "no weights"),
    Variant("u-sfan", "u-sfan", "weights per epoch, mean 1, evidence prior, τ 0.4"),
    Variant("shot", "shot", "centroid pseudo-labels"),
    Variant(
        "u-sfan balanced", "u-sfan", "mean 1 within each predicted class", {"balance": True}
    ),
    Variant("u-sfan default", "u-sfan", "balanced, memory", DEFAULT),
    Variant("u-sfan+ default", "u-sfan+", "balanced, memory", DEFAULT),
    Variant("shot crops", "shot", "stronger views", {"augment": "resized-crop-flip"}),
    Variant("u-sfan crops", "u-sfan", "balanced, memory, stronger views", CROPS),
    Variant("u-sfan+ crops", "u-sfan+", "balanced, memory, stronger views", CROPS),
    Variant(
        "u-sfan+ certain centroids",
        "u-sfan+",
        "centroids of the certain",
        DEFAULT,
        (CertainCentroids,),
    ),
    Variant(
        "u-sfan+ lasting labels",
        "u-sfan+",
        "labels from the running mean",
        DEFAULT,
        (LastingLabels,),
    ),
    Variant("u-sfan+ settled", "u-sfan+", "BatchNorm settled first", DEFAULT, settles=True),
    Variant(
        "u-sfan+ settled crops", "u-sfan+", "the same, stronger views", CROPS, settles=True
    ),
    Variant(
        "u-sfan+ mixed views",
        "u-sfan+",
        "pseudo-label loss on mixtures",
        DEFAULT,
        (MixedLabels,),
    ),
    Variant("u-sfan+ own gaussian", "u-sfan+", "labels by Gaussians", OWN, (GaussianLabels,)),
    Variant("u-sfan+ own annealed", "u-sfan+", "power 2 to 0", OWN_ANNEALED),
    Variant(
        "u-sfan+ own annealed late",
        "u-sfan+",
        "the same, pseudo-labels after a third",
        OWN_ANNEALED,
        (LateLabels,),
    ),
    Variant("u-sfan own annealed", "u-sfan", "power 2 to 0", OWN_ANNEALED),
    Variant("u-sfan own settled", "u-sfan", "BatchNorm settled first", OWN, settles=True),
    Variant("u-sfan own settled annealed", "u-sfan", "both", OWN_ANNEALED, settles=True),
    Variant("u-sfan+ own settled", "u-sfan+", "BatchNorm settled first", OWN, settles=True),
    Variant(
        "u-sfan+ own late labels", "u-sfan+", "pseudo-labels after a third", OWN, (LateLabels,)
    ),
    Variant("u-sfan+ own settled late", "u-sfan+", "both", OWN, (LateLabels,), settles=True),
    Variant("u-sfan own", "u-sfan", "balance and memory as the program chooses", OWN),
    Variant("u-sfan+ own", "u-sfan+", "balance and memory as the program chooses", OWN),
)
