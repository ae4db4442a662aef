"""How much of the network is trained: the new layers, or everything if the target needs it.

The rule asks the source model's predictions on frozen features. If they explain at least half of the target's structure
(κ ≥ ½, `maths.agreement`), the features carry its classes, and only the layers after the backbone are trained. If not,
and there are at least 100 images per class to learn from, everything is trained, the backbone at a hundredth of the
learning rate. A backbone that was fine-tuned or trained from scratch is trained as in the recipe.

Shapes: N images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from usfan.adaptation.thresholds import (
    FITTING_BACKBONE,
    MOVING_BACKBONE_IMAGES,
    MOVING_BACKBONE_LR,
)
from usfan.data.store import Store
from usfan.engine.features import features_of, on_features
from usfan.engine.passes import forward_store
from usfan.engine.runtime import Runtime
from usfan.maths.agreement import NEIGHBOURS, kappa, sample_rows
from usfan.maths.neighbours import nearest_neighbours
from usfan.models.classifier import Classifier
from usfan.store.model import SourceModel


@dataclass(frozen=True)
class TuneChoice:
    """The layers that are trained, and why."""

    tune: str
    """new: those after the backbone; all: the backbone too."""
    reason: str
    backbone_lr_scale: float | None = None
    """None: the default of the run."""


def decide(explained: float, per_class: float) -> TuneChoice:
    """The rule for a backbone with its pretrained weights."""
    if explained >= FITTING_BACKBONE:
        reason = f"the source model explains {explained:.0%} of the target's structure"
        return TuneChoice("new", reason)
    if per_class < MOVING_BACKBONE_IMAGES:
        reason = f"{per_class:.0f} images per class are too few to move the backbone"
        return TuneChoice("new", reason)
    reason = (
        f"the source model explains only {explained:.0%} of the target's structure,"
        f" with {per_class:.0f} images per class to learn from"
    )
    return TuneChoice("all", reason, MOVING_BACKBONE_LR)


def choose_tune(
    source: SourceModel,
    network: Classifier,
    store: Store,
    runtime: Runtime,
    backbone_hash: str,
) -> tuple[TuneChoice, Store | None]:
    """The choice for this target, and the features of the frozen backbone if they were computed. `network` is the
    source model's, on the device, and `backbone_hash` the hash of its backbone."""
    if store.is_features:
        return TuneChoice("new", "features are given"), store
    record = source.architecture.get("pretrained")
    if record is None or not source.architecture.get("bottleneck"):
        reason = "the backbone has no record of pretrained weights, or no layers follow it"
        return TuneChoice("all", reason), None
    if backbone_hash != record["hash"]:
        return TuneChoice("all", "the source model's backbone was fine-tuned"), None
    store = features_of(network, store, source.spec, runtime, weights=backbone_hash)
    features, logits = forward_store(on_features(network), store, source.spec, runtime)
    count, classes = logits.shape
    rows = sample_rows(count).to(logits.device)
    near, _ = nearest_neighbours(features[rows], NEIGHBOURS)
    explained = float(kappa(logits.argmax(dim=1)[rows], near, classes))
    return decide(explained, count / classes), store
