"""How much of the network is trained: the new layers, or everything if the target needs it.

The rule asks the source model's predictions on frozen features. If they explain at least half of the target's structure
(κ ≥ ½, `maths.agreement`), the features carry its classes, and only the layers after the backbone are trained. If not,
and there are at least 100 images per class to learn from, everything is trained, the backbone at a hundredth of the
learning rate. On a CPU this would take hours, so the backbone stays frozen, and the reason says what it would cost. A
backbone that was fine-tuned or trained from scratch is trained as in the recipe.

Shapes: N images, K classes, D features before the head.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.thresholds import (
    FITTING_BACKBONE,
    MOVING_BACKBONE_IMAGES,
    MOVING_BACKBONE_LR,
)
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import features_of, on_features
from usfan.engine.passes import forward_store
from usfan.engine.passes import prepare as prepare_network
from usfan.engine.runtime import Runtime
from usfan.errors import option
from usfan.maths.agreement import NEIGHBOURS, kappa, sample_rows
from usfan.maths.neighbours import nearest_neighbours
from usfan.models.classifier import Classifier
from usfan.progress import duration
from usfan.store.model import SourceModel

MEASURED_IMAGES = 16
"""Images whose time is measured."""
BACKWARD = 2.0
"""Time of a backward pass, in forward passes."""


@dataclass(frozen=True)
class TuneChoice:
    """The layers that are trained, and why."""

    tune: str
    """new: those after the backbone; all: the backbone too."""
    reason: str
    backbone_lr_scale: float | None = None
    """None: the default of the run."""


@dataclass(frozen=True, eq=False)
class FrozenPass:
    """A pass of the source model with its backbone frozen."""

    store: Store
    """The features of the backbone."""
    features: Tensor
    """N × D: features before the head."""
    logits: Tensor
    """N × K."""


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
    images: Store,
    runtime: Runtime,
    backbone_hash: str,
    epochs: int,
    store: Store | None = None,
) -> tuple[TuneChoice, FrozenPass | None]:
    """The choice for this target, and the pass that it rests on, if there was one. `network` is the source model's, on
    the device, and `backbone_hash` the hash of its backbone; `store` holds the features in it, if they are there
    already."""
    if images.is_features:
        return TuneChoice("new", "features are given"), None
    reason = why_moved(source, backbone_hash)
    if reason:
        return TuneChoice("all", reason), None
    if store is None:
        store = features_of(network, images, source.spec, runtime, weights=backbone_hash)
    features, logits = forward_store(on_features(network), store, source.spec, runtime)
    frozen_pass = FrozenPass(store, features, logits)
    count, classes = logits.shape
    rows = sample_rows(count).to(logits.device)
    near, _ = nearest_neighbours(features[rows], NEIGHBOURS)
    explained = float(kappa(logits.argmax(dim=1)[rows], near, classes))
    choice = decide(explained, count / classes)
    if choice.tune == "all" and runtime.device.type == "cpu":
        few = slice(MEASURED_IMAGES)
        few_images = dataclasses.replace(
            images, values=images.values[few], positions=images.positions[few], key=None
        )
        each = seconds_per_image(network, source.spec, few_images, runtime)
        seconds = full_training(each, count, epochs)
        reason = (
            f"{choice.reason}; training all layers might help, and would take about {duration(seconds)} on this CPU"
            f" ({option('tune', 'all')} does it)"
        )
        choice = TuneChoice("new", reason)
    return choice, frozen_pass


def why_moved(source: SourceModel, backbone_hash: str) -> str:
    """Why the backbone is not one with its pretrained weights and layers after it; empty if it is."""
    record = source.architecture.get("pretrained")
    if record is None or not source.architecture.get("bottleneck"):
        return "the backbone has no record of pretrained weights, or no layers follow it"
    return (
        "" if backbone_hash == record["hash"] else "the source model's backbone was fine-tuned"
    )


def full_training(seconds: float, count: int, epochs: int) -> float:
    """Seconds of training all layers: steps, and a pass over the target after each epoch."""
    return seconds * count * epochs * (2 + BACKWARD)


def seconds_per_image(
    classifier: Classifier, spec: InputSpec, few: Store, runtime: Runtime
) -> float:
    """Seconds of an image through the network, after one pass that sets it up."""
    network = prepare_network(copy.deepcopy(classifier), spec, runtime)
    forward_store(network, few, spec, runtime)
    started = time.perf_counter()
    forward_store(network, few, spec, runtime)
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / max(1, len(few))
