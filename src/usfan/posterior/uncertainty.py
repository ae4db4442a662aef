"""What an uncertainty of the last layer can say. `KroneckerPosterior` is the first member; `kind` names it in a saved
model.

Shapes: B batch, K classes, D features, M draws.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Uncertainty(Protocol):
    """A distribution over predictions, given features."""

    kind: str

    def predictive(self, features: Any, temperature: float = 0.4, samples: int = 128) -> Tensor:
        """B × K probabilities, the mean over the draws (Eq. 6)."""

    def moments(self, features: Any, temperature: float = 0.4, samples: int = 128) -> tuple[Tensor, Tensor]:
        """The predictive B × K, and its mutual information B."""

    def certainty(self, features: Any, temperature: float = 0.4, samples: int = 128) -> Tensor:
        """B weights exp(−H) of the predictive (Algorithm 1)."""

    def draws(self, features: Any, samples: int) -> Tensor:
        """B × M × K logits, one column of draws for each of M heads."""

    def to(self, device: Any = None) -> Uncertainty:
        """The same on another device."""
