"""MixMatch on the target alone, SHOT++'s second stage: low-entropy samples of each class count as labelled.

The split is made once, when the stage begins: a share of each predicted class, the lowest entropies first, keeps its
predicted class as the label. The share is that of the samples whose entropy lies under the mean. For the others

    q = sharpen((p + p') / 2),   sharpen(p)_k ∝ p_k^(1/T)       p, p': of two views drawn for this step

and after mixup of either view with λ' = max(λ, 1 − λ), so that each sample stays mostly itself,

    E_labelled[CE(p(x̃), ỹ)] + u t E_others[mean_k (p_k(x̃) − q̃_k)²]       t: share of the steps done

with expectations over both views. The authors take one view of a labelled sample, draw batches of 36 labelled ones and
36 others, and one λ for each batch. They train a new head in this stage. Here the head stays frozen, because the
posterior is that of the source head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from usfan.adaptation.terms.mixup import Mixup
from usfan.adaptation.terms.selection import best_of_each_class
from usfan.adaptation.terms.term import Batch, Context, Outputs
from usfan.config import number
from usfan.maths.objectives import recipe_entropy, soft_cross_entropy


@dataclass
class MixMatch(Mixup):
    """Semi-supervised learning from the samples that the model is sure of."""

    mixup_alpha: float = number(0.75, 1e-3)
    """α of Beta(α, α), from which λ is drawn."""
    sharpening: float = number(0.5, 1e-6)
    """T, temperature that sharpens the guessed labels."""
    consistency_weight: float = number(100.0)
    """u, weight of the loss on samples without a label, at the end of the stage; it grows linearly from 0."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.targets = torch.zeros_like(context.source.probs)
        self.labelled = context.source.probs.new_zeros(context.count)
        self.split = False

    def refresh(self, outputs: Outputs) -> None:
        if self.split:
            return
        labels = outputs.probs.argmax(dim=1)
        self.targets.copy_(one_hot(labels, outputs.probs.shape[1]))
        self.labelled.copy_(sure(outputs.probs, labels))
        self.split = True

    def tensors(self) -> dict[str, Tensor]:
        return {"targets": self.targets, "labelled": self.labelled}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.targets.copy_(tensors["targets"])
        self.labelled.copy_(tensors["labelled"])
        self.split = True

    def __call__(self, batch: Batch) -> Tensor:
        samples = batch.samples
        labelled = self.labelled[samples]
        known = self.context.known(batch)
        second, second_probs = self.second_view(batch)
        guessed = sharpen((batch.probs.detach() + second_probs) / 2, self.sharpening)
        targets = torch.where(labelled[:, None] > 0, self.targets[samples], guessed)
        shares = torch.maximum(self.shares[samples], 1 - self.shares[samples])
        *views, targets = self.mixed(batch, shares, batch.images, second, targets)
        _, logits = batch.forward(torch.cat(views))
        targets = targets.repeat(2, 1)
        each = soft_cross_entropy(logits, targets)
        supervised = self.context.mean(each, mask=(labelled * known).repeat(2))
        apart = (logits.softmax(dim=1) - targets).square().mean(dim=1)
        consistency = self.context.mean(apart, mask=((1 - labelled) * known).repeat(2))
        batch.notes.update(loss_labelled=supervised, loss_consistency=consistency)
        return supervised + self.consistency_weight * batch.done * consistency

    @torch.no_grad()
    def second_view(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Another view of the batch's images, and the B×K probabilities of it. Cached features have one view."""
        if batch.second_view is None:
            return batch.images, batch.probs
        images = batch.second_view()
        _, logits = batch.forward(images)
        return images, logits.softmax(dim=1)


def sure(probs: Tensor, labels: Tensor) -> Tensor:
    """N booleans: the share of each class with the lowest entropies that lies under the mean over all."""
    entropies = recipe_entropy(probs)
    share = (entropies < entropies.mean()).double().mean()
    return best_of_each_class(-entropies, labels, probs.shape[1], share)


def sharpen(probs: Tensor, temperature: float) -> Tensor:
    """p^(1/T), normalised to sum to 1."""
    return normalize(probs ** (1 / temperature), p=1, dim=1)
