"""How much of the network is trained: the ladder new → all, climbed only if the target needs it.

The source model's predictions on frozen features come first. If its predictions explain at least half of
the target's structure (κ ≥ ½, `scoring.structure`), the features carry its classes, and only the layers after the
backbone move. If they do not, and there are at least 100 images per class to learn from, everything moves, the
backbone at a hundredth of the learning rate. A backbone that was fine-tuned or trained from scratch moves as in the
recipe.

Shapes: N images, K classes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from usfan.artifacts.model import SourceModel
from usfan.compute.features import FeatureStore, features_of, on_features
from usfan.compute.passes import forward_store, prepare
from usfan.compute.runtime import Runtime
from usfan.data.cache import PixelStore
from usfan.models.backbones import weights_hash
from usfan.scoring.neighbours import nearest_neighbours
from usfan.scoring.structure import NEIGHBOURS, evenly_spaced, kappa

log = logging.getLogger(__name__)

EXPLAINED = 0.5
"""Least structure that the source model's predictions must explain for the backbone to stay as it is."""
ENOUGH = 100
"""Images per class that are needed to train the backbone."""
LIGHT = 0.01
"""Learning rate of a pretrained backbone that moves, relative to the new layers."""


@dataclass(frozen=True)
class Rung:
    """What moves, and why."""

    tune: str
    reason: str
    backbone_lr_scale: float | None = None
    """None: as without the ladder."""


def decide(explained: float, per_class: float) -> Rung:
    """The rule for a backbone with its pretrained weights."""
    if explained >= EXPLAINED:
        return Rung("new", f"the source model explains {explained:.0%} of the target's structure")
    if per_class < ENOUGH:
        return Rung("new", f"{per_class:.0f} images per class are too few to move the backbone")
    why = f"the source model explains only {explained:.0%} of the target's structure"
    return Rung("all", f"{why}, with {per_class:.0f} images per class to learn from", LIGHT)


def choose_rung(source: SourceModel, store: PixelStore, runtime: Runtime) -> tuple[Rung, FeatureStore | None]:
    """The rung for this target, and the features of the frozen backbone if they were computed."""
    if isinstance(store, FeatureStore):
        return Rung("new", "features are given"), store
    own = source.architecture.get("pretrained")
    if own is None or not source.architecture.get("bottleneck"):
        return Rung("all", "the backbone has no record of pretrained weights, or no layers follow it"), None
    if weights_hash(source.classifier.backbone) != own["hash"]:
        return Rung("all", "the source model's backbone was fine-tuned"), None
    classifier = prepare(source.classifier, source.spec, runtime)
    features = features_of(classifier, store, source.spec, runtime)
    found, logits = forward_store(on_features(classifier), features, source.spec, runtime)
    rows = evenly_spaced(len(logits)).to(logits.device)
    near = nearest_neighbours(found[rows], NEIGHBOURS)[0]
    explained = float(kappa(logits.argmax(dim=1)[rows], near, logits.shape[1]))
    return decide(explained, len(logits) / logits.shape[1]), features
