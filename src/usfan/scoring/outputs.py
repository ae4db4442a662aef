"""The outputs of a model: of a pass over a data set, and predictions for a user."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from usfan.errors import ArtifactError


@dataclass(frozen=True)
class Prediction:
    """One row per image. `probs` and `label` are the point estimate's, as in the paper; the rest is the posterior's."""

    probs: Tensor
    """B × K."""
    label: Tensor
    """B class indices."""
    entropy: Tensor
    """B, of the posterior predictive, in nats."""
    weight: Tensor
    """B, its certainty exp(−H): 1 is certain, 1/K is uniform."""
    unknown: Tensor
    """B booleans: judged to be of no known class. All false for a model without an unknown rule."""
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.label)

    def __repr__(self) -> str:
        counts = Counter(self.names).most_common(3)
        told = ", ".join(f"{count} {name}" for name, count in counts) + (", …" if len(set(self.names)) > 3 else "")
        unknown = f", {int(self.unknown.sum())} unknown" if bool(self.unknown.any()) else ""
        return f"Prediction({len(self)} images: {told}{unknown}; mean certainty {float(self.weight.mean()):.2f})"

    @property
    def names(self) -> list[str]:
        """The class names of `label`."""
        return [self.classes[i] if self.classes else str(i) for i in self.label.tolist()]


@dataclass(frozen=True)
class Outputs:
    """What a pass over a data set gives, N rows in the order of the data."""

    features: Tensor
    logits: Tensor
    probs: Tensor
    posterior_probs: Tensor
    mutual_information: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    def rows(self, index: Tensor) -> Outputs:
        """Those of some samples."""
        index = index.to(self.logits.device)
        return Outputs(*(getattr(self, item.name)[index] for item in fields(self)))


def check_finite(logits: Tensor, posterior_probs: Tensor) -> None:
    """Finite weights can still give predictions that are not finite."""
    if not bool(torch.isfinite(logits).all() & torch.isfinite(posterior_probs).all()):
        raise ArtifactError(
            "the model's predictions are not finite numbers: its weights are too large for these images; "
            "check where the model comes from, or whether its training diverged"
        )
