"""What guides an epoch, made from one pass over the target: weights, pseudo-labels, neighbours, and who is known.

All in tables with a row per target sample, which a captured step reads by sample number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.methods import Method
from usfan.adaptation.neighbours import nearest_neighbours, neighbour_targets, propagate
from usfan.adaptation.pseudo_labels import nearest_centroid, nearest_gaussian
from usfan.adaptation.weights import divide_by_class_mean, divide_by_mean, weights_of
from usfan.config import AdaptConfig
from usfan.scoring.objectives import diversity, sample_entropy
from usfan.scoring.outputs import Outputs
from usfan.scoring.unknown import split_unknown

PARTIAL_THRESHOLD = 10
"""Partial set: a class with at most this many samples gets no centroid (recipe)."""
GRAPH_NEIGHBOURS = 10
"""Neighbours per sample in the graph that pseudo-labels are propagated over."""


def diversity_share(config: AdaptConfig, weights: Tensor, known: Tensor) -> Tensor:
    """How much each sample counts in p̂ of L_div: all alike, or only known ones under separation, or by weight."""
    share = known if config.open_set and config.separation else torch.ones_like(known)
    return share * weights if config.weigh_diversity else share


@dataclass(frozen=True)
class Guidance:
    """Tables over the N target samples, on the device; refreshed in place."""

    weights: Tensor
    """N, of the entropy term."""
    certainty: Tensor
    """N in [1/K, 1], the weights before normalisation; 1 for a method without weights."""
    pseudo_labels: Tensor
    """N class indices."""
    targets: Tensor
    """N × K, what the neighbours say; used when the config asks for neighbours."""
    known: Tensor
    """N, 1 for samples judged to be of a known class, else 0; all 1 in closed set."""
    marginal: Tensor
    """K, the mean prediction over the target."""

    @classmethod
    def empty(cls, count: int, classes: int, device: torch.device) -> Guidance:
        ones = torch.ones(count, device=device)
        labels = torch.zeros(count, dtype=torch.long, device=device)
        targets = torch.full((count, classes), 1 / classes, device=device)
        return cls(ones.clone(), ones.clone(), labels, targets, ones.clone(), targets[0].clone())

    def refresh(self, outputs: Outputs, method: Method, config: AdaptConfig, done: float = 0.0) -> None:
        """New tables from a pass over the target, after a share `done` of the epochs."""
        if config.open_set:
            rule = split_unknown(outputs, config.split or method.split, recipe=config.preset == "paper")
            self.known.copy_((~rule.flag(outputs)).float())
        if method.weights != "none" and config.refresh == "epoch":
            raw = weights_of(method.weights, outputs, config, done)
            self.certainty.copy_(raw)
            self.weights.copy_(self._scaled(raw, outputs, config))
        share = diversity_share(config, self.weights, self.known)
        self.marginal.copy_((share[:, None] * outputs.probs).sum(dim=0) / share.sum().clamp_min(1e-12))
        if config.neighbours:
            places, similarities = nearest_neighbours(outputs.features, config.neighbours)
            strength = self.certainty * self.known
            self.targets.copy_(neighbour_targets(places, similarities, outputs.probs, strength))
        if method.pseudo_labels:
            self.pseudo_labels.copy_(self._pseudo_labels(outputs, config))

    def _scaled(self, raw: Tensor, outputs: Outputs, config: AdaptConfig) -> Tensor:
        if config.balance:
            return divide_by_class_mean(raw, outputs.logits.argmax(dim=1), outputs.logits.shape[1], self.known)
        return divide_by_mean(raw, self.known) if config.normalise_weights else raw

    def known_information(self, probs: Tensor) -> float:
        """H(p̄) − mean H(p) over the samples judged known: the others' high entropy must not count against it."""
        known = probs[self.known > 0]
        return -float(diversity(known.mean(dim=0)) + sample_entropy(known).mean())

    def _pseudo_labels(self, outputs: Outputs, config: AdaptConfig) -> Tensor:
        if config.pseudo_label_source == "propagation":
            places, similarities = nearest_neighbours(outputs.features, GRAPH_NEIGHBOURS)
            return propagate(places, similarities, outputs.probs, self.certainty * self.known).argmax(dim=1)
        probs = outputs.posterior_probs if config.pseudo_label_source == "posterior-centroid" else outputs.probs
        threshold = PARTIAL_THRESHOLD if config.partial_set else 0
        mask = self.known if config.open_set else None
        labels = nearest_centroid(outputs.features, probs, threshold=threshold, mask=mask)
        if config.pseudo_label_source == "gaussian":
            labels = nearest_gaussian(outputs.features, labels, probs.shape[1], mask=mask)
        return labels
