"""The witness: a frozen pretrained network that sees the target once. It has not seen the source data, so it does
not share the source model's mistakes.

`auto` takes the network that the source model started from: its own features if the backbone has not moved since, the
original weights if they can be found. If they cannot, it takes the best network of the extra usfan[offline]. A source
model trained from scratch has no witness.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from usfan.artifacts.model import SourceModel, came_pretrained
from usfan.compute.features import BackboneAlone, features_of
from usfan.compute.runtime import Runtime
from usfan.data.cache import PixelStore
from usfan.data.views import InputSpec
from usfan.errors import ConfigError
from usfan.models.backbones import OFFLINE_PACKAGES, create_backbone, offline_weights, weights_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Witness:
    """A frozen network and its input."""

    name: str
    module: nn.Module
    spec: InputSpec
    hash: str
    own: bool = False
    """Whether it is the source model's own backbone, which has not moved since it was pretrained."""

    def features(self, store: PixelStore, runtime: Runtime) -> Tensor:
        """N × F, of test views at the witness's own input size."""
        network = BackboneAlone(self.module.to(runtime.device), channels_last=False)
        return features_of(network, resized(store, self.spec), self.spec, runtime).pixels


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
    own = source.architecture.get("pretrained")
    if own is not None:
        hash_now = weights_hash(source.classifier.backbone)
        if hash_now == own["hash"]:
            return Witness(source.architecture["backbone"], source.classifier.backbone, source.spec, hash_now, own=True)
        found = load_witness(source.architecture["backbone"], own["from"] if own["from"] != "file" else "offline")
        if found is not None and found.hash == own["hash"]:
            return found
    return best_offline()


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
    return None if made.weights is None else Witness(name, made.module, made.spec, made.weights["hash"])


def best_offline(*, but: Collection[str] = ()) -> Witness | None:
    """The largest network of the extra usfan[offline] that is installed, other than the weights `but` (hashes)."""
    for name in sorted(OFFLINE_PACKAGES, reverse=True):
        found = load_witness(name, "offline")
        if found is not None and found.hash not in but:
            return found
    return None
