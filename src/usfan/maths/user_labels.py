"""Labels of a few target images, given by the user.

Shapes: L labelled images, N target samples, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.maths.outputs import Outputs

SURE = 1e-6
"""Probability left to all other classes of an image whose label is given."""


def no_rows() -> Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True, eq=False)
class UserLabels:
    """The labels of a few target images."""

    rows: Tensor
    """L sample numbers."""
    labels: Tensor
    """L classes."""
    new_rows: Tensor = field(default_factory=no_rows)
    """Images that are of no class of the model, by their sample numbers."""

    @classmethod
    def of_table(
        cls, table: Tensor, classes: int, device: torch.device | None = None
    ) -> UserLabels:
        """From N labels: −1 for none, K for an image that is of no class of the model."""
        rows = ((table >= 0) & (table < classes)).nonzero().flatten()
        new_rows = (table == classes).nonzero().flatten()
        return cls(rows.to(device), table[rows].to(device), new_rows.to(device))

    @classmethod
    def none(cls) -> UserLabels:
        return cls(no_rows(), no_rows())

    def to(self, device: torch.device) -> UserLabels:
        return UserLabels(
            self.rows.to(device), self.labels.to(device), self.new_rows.to(device)
        )

    @property
    def all_rows(self) -> Tensor:
        return torch.cat([self.rows, self.new_rows])

    def allowed(self, classes: int, clusters: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows, and the clusters that they may belong to (booleans, rows × clusters), of which the first are named by
        the classes. Images of new classes may be in any if every cluster is named."""
        if len(self.rows):
            yield self.rows, one_hot(self.labels, clusters).bool()
        if len(self.new_rows) and clusters > classes:
            unnamed = torch.arange(clusters, device=self.new_rows.device) >= classes
            yield self.new_rows, unnamed.expand(len(self.new_rows), clusters)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, mask: Tensor) -> UserLabels:
        """Those of the L labels that are marked."""
        return UserLabels(self.rows[mask], self.labels[mask])

    def pin(self, table: Tensor) -> None:
        """Write the labels into a table of N labels, or of N × K probabilities."""
        values = self.labels
        if table.ndim == 2:
            values = one_hot(values, table.shape[1])
        table[self.rows] = values.to(table)

    def pinned(self, table: Tensor) -> Tensor:
        """A copy of the table that holds the labels."""
        table = table.clone()
        self.pin(table)
        return table

    def replace_predictions(self, outputs: Outputs) -> Outputs:
        """The outputs of a pass over the target, with labels in place of predictions."""
        classes = outputs.probs.shape[1]
        sure = one_hot(self.labels, classes) * (1 - SURE * classes) + SURE
        posterior = outputs.posterior_probs
        return Outputs(
            outputs.features,
            outputs.logits.index_copy(0, self.rows, sure.log().to(outputs.logits)),
            outputs.probs.index_copy(0, self.rows, sure.to(outputs.probs)),
            posterior.index_copy(0, self.rows, sure.to(posterior)),
            outputs.mutual_information.index_fill(0, self.rows, 0.0),
        )
