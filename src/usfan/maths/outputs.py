"""The outputs of a model: of a pass over a data set, and predictions for a user."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.errors import ArtifactError

MOST_ROWS = 20
"""Rows of a prediction that a notebook shows."""


@dataclass(frozen=True)
class Prediction:
    """One row per image. `probs` and `label` are the point estimate's, as in the paper; the rest is the posterior's."""

    probs: Tensor
    """B × K."""
    label: Tensor
    """B class indices; K, the number of classes, for an image of no known class."""
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
        counts = Counter(self.names)
        parts = [f"{count} {name}" for name, count in counts.most_common(3)]
        if len(counts) > 3:
            parts.append("…")
        certainty = float(self.weight.mean())
        return f"Prediction({len(self)} images: {', '.join(parts)}; mean certainty {certainty:.2f})"

    @property
    def names(self) -> list[str]:
        """The class names of `label`, or "unknown"."""
        numbers = map(str, range(self.probs.shape[1]))
        names = [*(self.classes or numbers), "unknown"]
        return [names[label] for label in self.label.tolist()]

    def _repr_html_(self) -> str:
        """The first rows as a table, in a notebook."""
        rows = ["<tr><th></th><th>label</th><th>confidence</th><th>certainty</th></tr>"]
        names = self.names[:MOST_ROWS]
        best = self.probs.amax(dim=1)
        for i, name in enumerate(names):
            figures = f"<td>{float(best[i]):.2f}</td><td>{float(self.weight[i]):.2f}</td>"
            rows.append(f"<tr><th>{i}</th><td>{html.escape(name)}</td>{figures}</tr>")
        more = f"<p>and {len(self) - len(names)} more</p>" if len(self) > len(names) else ""
        return f"<p>{html.escape(repr(self))}</p><table>{''.join(rows)}</table>{more}"


@dataclass(frozen=True)
class Outputs:
    """Outputs of a pass over a data set, N rows in the order of the data."""

    features: Tensor
    """N × D."""
    logits: Tensor
    """N × K."""
    probs: Tensor
    """N × K, of the point estimate."""
    posterior_probs: Tensor
    """N × K, of the posterior predictive."""
    mutual_information: Tensor
    """N."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def is_finite(self) -> bool:
        finite = torch.isfinite(self.logits).all() & torch.isfinite(self.posterior_probs).all()
        return bool(finite)

    def rows(self, index: Tensor) -> Outputs:
        """The outputs of some samples."""
        index = index.to(self.logits.device)
        return Outputs(
            self.features[index],
            self.logits[index],
            self.probs[index],
            self.posterior_probs[index],
            self.mutual_information[index],
        )


def check_finite(outputs: Outputs) -> None:
    """Finite weights can still give predictions that are not finite."""
    if not outputs.is_finite:
        raise ArtifactError(
            "the model's predictions are not finite numbers: its weights are too large for these images; "
            "check where the model comes from, or whether its training diverged"
        )
