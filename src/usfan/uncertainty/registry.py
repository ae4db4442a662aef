"""The table of uncertainties. A new one is a subclass of `base.Uncertainty` in a module, and one row here.

Nothing heavy is imported until a class is needed: the command line reads the names.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from usfan.config_checks import one_of

if TYPE_CHECKING:
    from usfan.uncertainty.base import Uncertainty

UNCERTAINTIES = {
    "posterior": "usfan.uncertainty.kronecker:KroneckerPosterior",
    "point": "usfan.uncertainty.point:PointEstimate",
    "mc-dropout": "usfan.uncertainty.mc_dropout:MCDropout",
    "ensemble": "usfan.uncertainty.ensemble:Ensemble",
}
"""Module and class, by the name that users type."""


def find_uncertainty(name: str) -> type[Uncertainty]:
    """The class of a name in the table."""
    one_of("uncertainty", name, tuple(UNCERTAINTIES))
    uncertainty: type[Uncertainty] = pkgutil.resolve_name(UNCERTAINTIES[name])
    return uncertainty


def uncertainties_by_kind() -> dict[str, type[Uncertainty]]:
    """All classes, by the kind that a saved model names."""
    classes = [find_uncertainty(name) for name in UNCERTAINTIES]
    return {uncertainty.kind: uncertainty for uncertainty in classes}
