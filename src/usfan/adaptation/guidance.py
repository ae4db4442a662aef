"""Tables that guide an epoch, from one pass over the target: certainty weights, known samples, class shares.

They have a row per target sample. Terms read them by sample number; they are refreshed in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.certainty import Certainty
from usfan.adaptation.thresholds import CENTROID_LEAST
from usfan.config import Config, choice
from usfan.engine.loop import Batch
from usfan.engine.runtime import Runtime
from usfan.maths.objectives import diversity, global_mean, recipe_entropy
from usfan.maths.outputs import Outputs
from usfan.maths.unknown import SCORES, UnknownRule, split_unknown
from usfan.uncertainty.base import Uncertainty

UNEVEN = ("partial", "universal")
REJECTING = ("open", "universal")
"""Settings in which classes may be missing, and in which there may be new ones."""


@dataclass(frozen=True)
class Split(Config):
    """Open set: how known images are separated from unknown ones."""

    split: str = choice(*SCORES)
    """Score that tells known from unknown while adapting: entropy (recipe), posterior-entropy, mutual-information,
    max-softmax or energy."""
    decision: str = choice(*SCORES)
    """Score by which the adapted model calls an image unknown."""
    plain_split: bool = False
    """Split the scores by plain 2-means, as in SHOT's recipe, even if most samples are then unknown."""

    def rule(self, outputs: Outputs, score: str) -> UnknownRule:
        return split_unknown(outputs, score, recipe=self.plain_split)

    def unknown(self, outputs: Outputs) -> Tensor:
        """N booleans: judged unknown while adapting."""
        return self.rule(outputs, self.split).flag(outputs)

    def labels(self, outputs: Outputs) -> Tensor:
        """N predicted classes; K stands for unknown."""
        predicted = outputs.logits.argmax(dim=1)
        return predicted.masked_fill(self.unknown(outputs), outputs.logits.shape[1])


class Guidance:
    """Tables over the N target samples, on the device."""

    def __init__(
        self,
        count: int,
        certainty: Certainty,
        split: Split,
        setting: str,
        runtime: Runtime,
        uncertainty: Uncertainty,
        samples: int,
        *,
        separates: bool = False,
        new_rows: Tensor | None = None,
    ) -> None:
        """`new_rows`: images that the user calls new."""
        self.certainty = certainty
        self.split = split
        self.separates = separates
        self.runtime = runtime
        self.uncertainty = uncertainty
        self.samples = samples
        self.rejects = setting in REJECTING
        """Whether there may be new classes."""
        self.uneven = setting in UNEVEN
        """Whether classes may be missing."""
        self.weights = torch.ones(count, device=runtime.device)
        """N: weight in the entropy term."""
        self.new_rows = new_rows
        self.known = torch.ones(count, device=runtime.device)
        """N: 1 for samples judged known, else 0."""
        self.diverse = torch.ones(count, device=runtime.device)
        """N: weight in the mean of L_div."""
        self.shares: Tensor | None = None
        """K class shares that are the aim of L_div; None means equal shares."""
        self.leave_out_new()

    @property
    def rare(self) -> int:
        """A class with at most this many samples gets no centroid."""
        return CENTROID_LEAST if self.uneven else 0

    @property
    def known_mask(self) -> Tensor | None:
        return self.known if self.rejects else None

    def refresh(self, outputs: Outputs, epoch: int = 0, epochs: int = 1) -> None:
        """New tables from a pass over the target, after this many of all epochs."""
        if self.rejects:
            self.known.copy_((~self.split.unknown(outputs)).float())
        if self.certainty.is_due(epoch, epochs):
            done = min(epoch, epochs - 1) / max(1, epochs)
            self.weights.copy_(self.certainty.of_pass(outputs, self.known, done))
        if self.separates:
            self.diverse.copy_(self.known)
        else:
            self.diverse.fill_(1.0)
        self.leave_out_new()

    def leave_out_new(self) -> None:
        """Images that the user calls new take no part."""
        if self.new_rows is not None:
            self.known[self.new_rows] = 0
            self.diverse[self.new_rows] = 0

    def set_known(self, known: Tensor, shares: Tensor | None) -> None:
        """Take over a term's estimate of the known samples (N) and of their class shares (K)."""
        self.known.copy_(known)
        self.diverse.copy_(known)
        self.leave_out_new()
        if shares is None:
            return
        if self.shares is None:
            self.shares = torch.empty_like(shares)
        self.shares.copy_(shares)

    def batch_weights(self, batch: Batch) -> Tensor:
        """B weights of the entropy term: from the table of the epoch, or by Algorithm 1 from the batch as it is."""
        certainty = self.certainty
        if certainty.weights == "none" or certainty.refresh != "step":
            return self.weights[batch.samples]
        weights = certainty.of_batch(
            batch.features, batch.logits, self.uncertainty, self.samples
        )
        if not certainty.normalise_weights:
            return weights
        mean = global_mean(weights, self.runtime.total_or_alone, self.known[batch.samples])
        return weights / mean.clamp_min(1e-12)

    def known_information(self, probs: Tensor) -> float:
        """H(p̄) − mean H(p) over the samples judged known: the others' high entropy must not count against it."""
        known = probs[self.known > 0]
        return -float(diversity(known.mean(dim=0)) + recipe_entropy(known).mean())
