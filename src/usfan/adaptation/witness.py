"""The witness: a frozen pretrained network that sees the target once. It has not seen the source data, so it does
not share the source model's mistakes.

It describes an image by its features f and, if its weights hold the classifier that it was pretrained with, by the
probabilities of those classes. The features say how images look; the probabilities say which differences between them
matter for telling things apart. Square roots of probabilities are unit vectors, and their inner product measures how
far two distributions overlap (Bhattacharyya). If one probability is near 1, the others vanish, so they are softened:

    u = [f̂, q̂],   q = √softmax(z / 2),   z = W f + b           N × (F + C); ^: normalised, centred, normalised again

It looks at whole images, at the size from which the model's own views are cropped. If features are given instead of
images, these are used.

`auto` takes the network that the source model started from: its own features if the backbone has not moved since, the
original weights if they can be found. If they cannot, it takes the best network of the extra usfan[offline]. A source
model trained from scratch has no witness.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from usfan.artifacts.model import SourceModel, came_pretrained
from usfan.compute.features import BackboneAlone, features_of
from usfan.compute.runtime import Runtime
from usfan.data.cache import PixelStore
from usfan.data.views import InputSpec
from usfan.errors import ConfigError, UsfanError
from usfan.models.backbones import (
    OFFLINE_PACKAGES,
    PretrainedHead,
    create_backbone,
    offline_weights,
    probe_features,
    timm_classifier,
    weights_hash,
)
from usfan.models.hub import cache_only
from usfan.scoring.mixture import CHUNK, centred_features

log = logging.getLogger(__name__)

SOFTNESS = 2.0
"""Divides the logits of the witness's own classifier."""


@dataclass(frozen=True)
class Witness:
    """A frozen network and its input."""

    name: str
    module: nn.Module
    spec: InputSpec
    hash: str
    own: bool = False
    """Whether it is the source model's own backbone, which has not moved since it was pretrained."""
    classifier: PretrainedHead | None = None
    """The classifier that it was pretrained with."""

    def features(self, store: PixelStore, runtime: Runtime) -> Tensor:
        """N × F, of test views at the witness's own input size."""
        return self.seen(store, self.spec, runtime)

    def testimony(self, store: PixelStore, runtime: Runtime) -> Tensor:
        """N × (F + C): what it says about whole images."""
        return testimony(self.seen(store, whole(self.spec, self.module), runtime), self.classifier)

    def seen(self, store: PixelStore, spec: InputSpec, runtime: Runtime) -> Tensor:
        """N × F, of test views with this input."""
        network = BackboneAlone(self.module.to(runtime.device), channels_last=False)
        return features_of(network, resized(store, spec), spec, runtime).pixels


def whole(spec: InputSpec, module: nn.Module) -> InputSpec:
    """The whole image instead of a crop of it; a network that does not take that size sees it at its own."""
    side = spec.resize
    try:
        with torch.device("meta"):
            probe_features(copy.deepcopy(module).to("meta"), replace(spec, size=side))
    except ConfigError:
        side = spec.size
    return replace(spec, size=side, resize=side)


@torch.no_grad()
def testimony(features: Tensor, classifier: PretrainedHead | None) -> Tensor:
    """u, N × (F + C), from N × F features; without a classifier the features as they are."""
    if classifier is None:
        return features
    weight, bias = classifier.weight.to(features.device), classifier.bias.to(features.device)
    width = features.shape[1]
    u = torch.empty(len(features), width + len(bias), device=features.device)
    for part, rows in zip(features.split(CHUNK), u.split(CHUNK), strict=True):
        logits = part.float() @ weight.T + bias
        if not bool(torch.isfinite(logits).all()):
            raise UsfanError("the witness's class scores are not finite numbers: check its weights and its input")
        rows[:, width:] = (logits / SOFTNESS).softmax(dim=1).sqrt()
    u[:, width:] = centred_features(u[:, width:])[0]
    u[:, :width] = centred_features(features)[0]
    return u


class ResizedStore(PixelStore):
    """The same pixels at another size and number of channels, batch by batch."""

    spec: InputSpec

    def batch(self, index: Tensor, device: torch.device | str | None = None) -> Tensor:
        pixels = super().batch(index, device)
        side = self.spec.resize
        if pixels.shape[-1] != side:
            grown = torch.nn.functional.interpolate(pixels.float(), size=(side, side), mode="bilinear", antialias=True)
            pixels = grown.round().clamp(0, 255).to(torch.uint8)
        return pixels.expand(-1, self.spec.channels, -1, -1)


def resized(store: PixelStore, spec: InputSpec) -> PixelStore:
    if store.pixels.shape[-1] == spec.resize and store.pixels.shape[1] == spec.channels:
        return store
    made = ResizedStore(store.pixels, store.kept, key=store.key)
    object.__setattr__(made, "spec", spec)
    return made


def choose_witness(asked: str, source: SourceModel) -> Witness | None:
    """The witness by name (NAME, or NAME:WEIGHTS with offline, timm or a file), `auto` or `none`."""
    if asked == "none":
        return None
    if asked != "auto":
        name, _, weights = asked.partition(":")
        found = load_witness(name, weights or "auto")
        if found is None:
            raise ConfigError(f"--witness {asked}: no pretrained weights for {name!r}; write NAME:FILE, or NAME:timm")
        return found
    if not source.pretrained or source.spec.channels != 3:
        return None
    record = source.architecture.get("pretrained")
    if record is not None:
        name, backbone = source.architecture["backbone"], source.classifier.backbone
        if weights_hash(backbone) == record["hash"]:
            with cache_only():  # use its classifier if it is on this machine; do not download it
                original = load_original(name, record)
            classifier = None if original is None else original.classifier
            return Witness(name, backbone, source.spec, record["hash"], own=True, classifier=classifier)
        original = load_original(name, record)
        if original is not None:
            return original
    return best_offline()


def load_original(name: str, record: dict[str, str]) -> Witness | None:
    """The network with the weights that a source model started from; None if they are unavailable."""
    try:
        found = load_witness(name, "timm" if record["from"] == "timm" else "offline")
    except ConfigError as error:
        log.debug("the original weights of %s are unavailable: %s", name, error)
        return None
    return found if found is not None and found.hash == record["hash"] else None


def has_witness(architecture: dict[str, Any], summary: dict[str, Any]) -> bool:
    """Whether `auto` will find a witness, from what a model folder says: quick, no network is built."""
    if not came_pretrained(architecture):
        return False
    frozen = architecture.get("pretrained") is not None and summary.get("tune") == "new"
    return frozen or any(offline_weights(name) is not None for name in OFFLINE_PACKAGES)


def choose_judge(source: SourceModel, used: set[str]) -> Witness | None:
    """A pretrained network for the guard whose weights (by hash) the training did not use; None if there is none."""
    if not source.pretrained or source.spec.channels != 3:
        return None
    record = source.architecture.get("pretrained")
    if record is not None and record["hash"] not in used:
        own = choose_witness("auto", source)
        if own is not None and own.hash not in used:
            return own
    return best_offline(but=used)


THUMBNAIL = 32
POOLED = 64
"""Images that are made thumbnails of at a time: as floats, a thousand of 3 × 256 × 256 take 750 MiB."""


def thumbnails(store: PixelStore, rows: Tensor, runtime: Runtime, most: int = THUMBNAIL) -> Tensor:
    """Features of images that no training has touched, for a target that no pretrained network fits: the pixels at
    `rows` themselves, at most 32 × 32, minus the mean image."""
    side = min(most, *store.pixels.shape[-2:])
    parts = (store.batch(part).to(runtime.device).float() for part in rows.split(POOLED))
    small = torch.cat([torch.nn.functional.adaptive_avg_pool2d(part, side).flatten(1) for part in parts])
    small = small - small.mean(dim=0)
    return small / small.std(correction=min(1, small.numel() - 1)).clamp_min(1e-6)  # a single number has no spread


def load_witness(name: str, weights: str) -> Witness | None:
    if weights in ("auto", "offline") and offline_weights(name) is None:
        return None
    made = create_backbone(name, weights)
    if made.weights is None:
        return None
    classifier = timm_classifier(name, made.features) if weights == "timm" else made.classifier
    return Witness(name, made.module, made.spec, made.weights["hash"], classifier=classifier)


def best_offline(*, but: Collection[str] = ()) -> Witness | None:
    """The largest network of the extra usfan[offline] that is installed, other than the weights `but` (hashes)."""
    for name in sorted(OFFLINE_PACKAGES, reverse=True):
        found = load_witness(name, "offline")
        if found is not None and found.hash not in but:
            return found
    return None
