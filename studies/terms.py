"""Loss terms and ways to weight samples that were tried and are not part of the library.

Each changes one thing about a term or about `Certainty`; `variants.py` puts them into the rows of methods.

Shapes: N target samples, B batch, K classes, D features.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from studies.labels import nearest_gaussian
from torch import Tensor

from usfan.adaptation.centroids import nearest_centroid
from usfan.adaptation.certainty import Certainty
from usfan.adaptation.model_facts import ModelFacts
from usfan.adaptation.terms.pseudo_labels import PseudoLabels
from usfan.adaptation.terms.term import Context
from usfan.data.views import keyed_uniform
from usfan.engine.loop import Batch
from usfan.maths.outputs import Outputs


@dataclass(frozen=True)
class SquaredCertainty(Certainty):
    """exp(−2 H)."""

    def raw(self, outputs: Outputs) -> Tensor:
        return super().raw(outputs).square()


@dataclass
class GaussianLabels(PseudoLabels):
    """A mixture of Gaussians with one covariance, by EM from the nearest centroids."""

    def find(self, outputs: Outputs) -> Tensor:
        return nearest_gaussian(
            outputs.features,
            super().find(outputs),
            outputs.probs.shape[1],
            mask=self.guide.known_mask,
        )


@dataclass
class CertainCentroids(PseudoLabels):
    """Each sample counts in its centroid with its certainty."""

    def find(self, outputs: Outputs) -> Tensor:
        return nearest_centroid(
            outputs.features, outputs.probs, mask=self.guide.certainty.raw(outputs)
        )


@dataclass
class LastingLabels(PseudoLabels):
    """Labels from the running mean of the predictions: a new prediction counts two fifths."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.mean: Tensor | None = None

    def find(self, outputs: Outputs) -> Tensor:
        self.mean = (
            outputs.probs if self.mean is None else 0.6 * self.mean + 0.4 * outputs.probs
        )
        return nearest_centroid(outputs.features, self.mean)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean is None else {"mean": self.mean}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.mean = tensors["mean"].to(self.labels.device) if tensors else None


@dataclass
class LateLabels(PseudoLabels):
    """Labels start after the first third of the run: before, features have hardly moved, and more labels are wrong."""

    def decide(self, facts: ModelFacts) -> PseudoLabels:
        return dataclasses.replace(super().decide(facts), pseudo_label_warmup=facts.epochs // 3)


@dataclass
class MixedLabels(PseudoLabels):
    """The pseudo-label loss on mixtures of two views, with the mixture of their labels as target; twice the work."""

    needs_pixels = True

    def start(self, context: Context) -> None:
        super().start(context)
        self.epoch = torch.zeros((), dtype=torch.long, device=context.device)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.epoch.fill_(epoch)

    def __call__(self, batch: Batch) -> Tensor:
        share = 0.5 + 0.5 * keyed_uniform(self.context.seed, self.epoch, batch.samples, 9)
        part = share[:, None, None, None]
        _, logits = batch.forward(part * batch.images + (1 - part) * batch.images.roll(1, 0))
        logs = logits.log_softmax(dim=1)
        labels = self.labels[batch.samples]
        one, other = (
            -logs.gather(1, places[:, None])[:, 0] for places in (labels, labels.roll(1, 0))
        )
        loss = (share * one + (1 - share) * other).mean()
        batch.notes["loss_pseudo"] = loss
        return self.weight * loss
