"""What guides an epoch, computed from one pass over the target: certainty weights, known samples, class shares.

Tables with a row per target sample, which terms read by sample number; refreshed in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.certainty import Certainty
from usfan.compute.loop import Batch
from usfan.compute.runtime import Runtime
from usfan.config_checks import one_of
from usfan.posterior.uncertainty import Uncertainty
from usfan.scoring.objectives import diversity, global_mean, sample_entropy
from usfan.scoring.outputs import Outputs
from usfan.scoring.unknown import SCORES, UnknownRule, split_unknown

RARE = 10
"""A class with at most this many samples gets no centroid if classes may be missing (recipe)."""
UNEVEN, REJECTING = ("partial", "universal"), ("open", "universal")
"""Settings in which classes may be missing, and in which there may be new ones."""


@dataclass(frozen=True)
class Split:
    """Open set: how known is told from unknown."""

    split: str = "entropy"
    """Score that tells known from unknown while adapting: entropy (recipe), posterior-entropy, mutual-information,
    max-softmax or energy."""
    decision: str = "entropy"
    """Score by which the adapted model calls an image unknown."""
    plain_split: bool = False
    """Split the scores by plain 2-means, as in SHOT's recipe, even if most samples are then unknown."""

    def __post_init__(self) -> None:
        one_of("split", self.split, tuple(SCORES))
        one_of("decision", self.decision, tuple(SCORES))

    def rule(self, outputs: Outputs, score: str) -> UnknownRule:
        return split_unknown(outputs, score, recipe=self.plain_split)

    def labels(self, outputs: Outputs) -> Tensor:
        """N predicted classes; K stands for unknown."""
        unknown = self.rule(outputs, self.split).flag(outputs)
        return outputs.logits.argmax(dim=1).masked_fill(unknown, outputs.logits.shape[1])


class Guidance:
    """Tables over the N target samples, on the device."""

    def __init__(
        self,
        count: int,
        classes: int,
        certainty: Certainty,
        split: Split,
        setting: str,
        runtime: Runtime,
        uncertainty: Uncertainty,
        samples: int,
        *,
        separates: bool = False,
    ) -> None:
        self.certainty, self.split, self.setting, self.separates = certainty, split, setting, separates
        self.runtime, self.uncertainty, self.samples = runtime, uncertainty, samples
        ones = torch.ones(count, device=runtime.device)
        self.weights, self.known, self.diverse = ones.clone(), ones.clone(), ones.clone()
        """N each: weight in the entropy term; 1 for samples judged known, else 0; weight in the mean of L_div."""
        self.shares: Tensor | None = None
        """K class shares that are the aim of L_div; None means equal shares."""

    @property
    def rejects(self) -> bool:
        return self.setting in REJECTING

    @property
    def uneven(self) -> bool:
        return self.setting in UNEVEN

    @property
    def rare(self) -> int:
        """A class with at most this many samples gets no centroid."""
        return RARE if self.setting in UNEVEN else 0

    @property
    def known_mask(self) -> Tensor | None:
        return self.known if self.rejects else None

    def refresh(self, outputs: Outputs, done: float = 0.0) -> None:
        """New tables from a pass over the target, after a share `done` of the epochs."""
        if self.rejects:
            self.known.copy_((~self.split.rule(outputs, self.split.split).flag(outputs)).float())
        if self.certainty.refresh == "epoch":
            self.weights.copy_(self.certainty.of_pass(outputs, self.known, done))
        self.diverse.copy_(self.known if self.separates else torch.ones_like(self.known))

    def told(self, known: Tensor, shares: Tensor | None) -> None:
        """What a term found out: who is known (N), and the class shares (K) of the known."""
        self.known.copy_(known)
        self.diverse.copy_(known)
        if shares is not None:
            self.shares = shares.clone() if self.shares is None else self.shares.copy_(shares)

    def batch_weights(self, batch: Batch) -> Tensor:
        """B weights of the entropy term: from the table of the epoch, or by Algorithm 1 from the batch as it is."""
        if self.certainty.weights == "none" or self.certainty.refresh == "epoch":
            return self.weights[batch.samples]
        weights = self.certainty.of_batch(batch.features, batch.logits, self.uncertainty, self.samples)
        if not self.certainty.normalise_weights:
            return weights
        known = self.known[batch.samples]
        return weights / global_mean(weights, self.runtime.total_or_alone, known).clamp_min(1e-12)

    def known_information(self, probs: Tensor) -> float:
        """H(p̄) − mean H(p) over the samples judged known: the others' high entropy must not count against it."""
        known = probs[self.known > 0]
        return -float(diversity(known.mean(dim=0)) + sample_entropy(known).mean())
