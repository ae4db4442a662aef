"""Labels that the user gave for a few target images, which replace the run's own predictions.

Shapes: L labelled images, N target samples, K classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from usfan.scoring.outputs import Outputs

SURE = 1e-6
"""Probability left to all other classes of an image whose label is given."""


@dataclass(frozen=True, eq=False)
class Given:
    """The labels of a few target images."""

    rows: Tensor
    """L sample numbers."""
    labels: Tensor
    """L classes."""

    @classmethod
    def of_table(cls, table: Tensor, device: torch.device) -> Given:
        """From N labels, −1 for none."""
        rows = (table >= 0).nonzero().flatten()
        return cls(rows.to(device), table[rows].to(device))

    def __len__(self) -> int:
        return len(self.rows)

    def without(self, held: Tensor) -> Given:
        """The same but for these (L booleans)."""
        return Given(self.rows[~held], self.labels[~held])

    def pin(self, table: Tensor) -> None:
        """Write the labels into a table of N labels, or of N × K probabilities."""
        table[self.rows] = self.labels if table.ndim == 1 else one_hot(self.labels, table.shape[1]).to(table)

    def told(self, outputs: Outputs) -> Outputs:
        """The outputs of a pass over the target, with labels in place of predictions."""
        classes = outputs.probs.shape[1]
        sure = one_hot(self.labels, classes) * (1 - SURE * classes) + SURE
        probs, posterior, logits = (t.clone() for t in (outputs.probs, outputs.posterior_probs, outputs.logits))
        probs[self.rows], posterior[self.rows] = sure.to(probs), sure.to(posterior)
        logits[self.rows] = sure.log().to(logits)
        information = outputs.mutual_information.index_fill(0, self.rows, 0.0)
        return dataclasses.replace(
            outputs, logits=logits, probs=probs, posterior_probs=posterior, mutual_information=information
        )
