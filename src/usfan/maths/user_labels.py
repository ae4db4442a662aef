"""Labels of a few target images, given by the user.

Shapes: L labelled images, N target samples, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.maths.outputs import Outputs

SURE = 1e-6
"""Probability left to all other classes of an image whose label is given."""


@dataclass(frozen=True, eq=False)
class UserLabels:
    """The labels of a few target images."""

    rows: Tensor
    """L sample numbers."""
    labels: Tensor
    """L classes."""

    @classmethod
    def of_table(cls, table: Tensor, device: torch.device | None = None) -> UserLabels:
        """From N labels, −1 for none."""
        rows = (table >= 0).nonzero().flatten()
        return cls(rows.to(device), table[rows].to(device))

    @classmethod
    def none(cls) -> UserLabels:
        empty = torch.zeros(0, dtype=torch.long)
        return cls(empty, empty)

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
