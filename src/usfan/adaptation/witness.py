"""The witness: a frozen pretrained network that looks at the target once. It was not trained on the source data, so it
does not share the source model's mistakes.

It describes an image by its features f and, if its weights hold the classifier that it was pretrained with, by the
probabilities of those classes. The features say how images look; the probabilities say which differences between them
matter for telling things apart. Square roots of probabilities are unit vectors, and their inner product measures how
far two distributions overlap (Bhattacharyya). If one probability is near 1, the others vanish, so they are softened:

    u = [f̂, q̂],   q = √softmax(z / 2),   z = W f + b           N × (F + C); ^: normalised, centred, normalised again

It looks at whole images, at the size from which the model's views are cropped. If the target is features instead of
images, these are used.

`auto` takes the network that the source model started from: the model's backbone if it has not moved since, else the
original weights. If these are unavailable, it takes the best network of the extra usfan[offline]. A source model
trained from scratch has no witness.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from usfan.adaptation.thresholds import WITNESS_SOFTNESS
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.features import BackboneAlone, features_of, streamed_features
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError, UsfanError, option
from usfan.files import read_in
from usfan.maths.cluster_mixture import CHUNK, centred_features
from usfan.models import hugging_face
from usfan.models.backbones import (
    OFFLINE_PACKAGES,
    Backbone,
    PretrainedHead,
    create_backbone,
    is_cached,
    offline_weights,
    probe_features,
    timm_classifier,
)
from usfan.models.classifier import Classifier
from usfan.models.hub import cache_only
from usfan.progress import network_name
from usfan.store.model import SourceModel, came_pretrained
from usfan.store.model_folder import may_be_hub_id, open_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Witness:
    """A frozen network and its input."""

    name: str
    module: nn.Module
    spec: InputSpec
    hash: str
    is_source_backbone: bool = False
    """Whether it is the source model's backbone, which has not moved since it was pretrained."""
    classifier: PretrainedHead | None = None
    """The classifier that it was pretrained with."""

    @property
    def has_features_of_source(self) -> bool:
        """Whether it sees what the source model sees, with the same network."""
        return self.is_source_backbone and self.view == self.spec

    def features(self, store: Store, runtime: Runtime) -> Tensor:
        """N × F, of test views at the witness's input size."""
        return self.features_at(self.spec, store, runtime).values

    @functools.cached_property
    def view(self) -> InputSpec:
        """The input for whole images."""
        return whole(self.spec, self.module)

    def testimony(self, store: Store, runtime: Runtime) -> Tensor:
        """u, N × (F + C), of whole images."""
        with network_name("witness"):
            features = self.features_at(self.view, store, runtime).values
        return testimony(features, self.classifier)

    def features_at(
        self,
        spec: InputSpec,
        store: Store,
        runtime: Runtime,
    ) -> Store:
        """N × F, of test views with this input."""
        network = BackboneAlone(self.module.to(runtime.device), channels_last=False)
        images = store.resized(spec.channels, spec.resize)
        return features_of(network, images, spec, runtime, weights=self.hash)


def whole(spec: InputSpec, module: nn.Module) -> InputSpec:
    """The whole image instead of a crop of it; a network that does not take that size gets its usual size."""
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
    weight = classifier.weight.to(features.device)
    bias = classifier.bias.to(features.device)
    width = features.shape[1]
    u = torch.empty(len(features), width + len(bias), device=features.device)
    for part, rows in zip(features.split(CHUNK), u.split(CHUNK), strict=True):
        logits = part.float() @ weight.T + bias
        if not bool(torch.isfinite(logits).all()):
            raise UsfanError(
                "the witness's class scores are not finite numbers: check its weights and its input"
            )
        rows[:, width:] = (logits / WITNESS_SOFTNESS).softmax(dim=1).sqrt()
    u[:, width:] = centred_features(u[:, width:])[0]
    u[:, :width] = centred_features(features)[0]
    return u


def look_once(
    network: Classifier,
    spec: InputSpec,
    witness: Witness | None,
    data: ImageData,
    runtime: Runtime,
    sample: Tensor,
) -> tuple[Store, Tensor | None, Store]:
    """The features of a network's backbone, the images as the witness describes them, and the images at the positions
    `sample`. Each image is decoded once."""
    networks: list[tuple[Classifier | BackboneAlone, InputSpec]] = [(network, spec)]
    if witness is not None and not witness.has_features_of_source:
        networks.append((BackboneAlone(witness.module, channels_last=False), witness.view))
    with network_name("model and witness" if witness else "model"):
        stores, images = streamed_features(networks, data, spec, runtime, sample)
    description = None
    if witness is not None:
        description = testimony(stores[-1].values, witness.classifier)
    return stores[0], description, images


def choose_witness(choice: str, source: SourceModel, backbone_hash: str) -> Witness | None:
    """The witness by name (NAME, or NAME:WEIGHTS with offline, timm or a file), by folder or Hub id, `auto` or `none`.
    `backbone_hash` is that of the source model's backbone."""
    if choice == "none":
        return None
    if choice == "auto":
        return automatic_witness(source, backbone_hash)
    if Path(choice).is_dir() or may_be_hub_id(choice):
        return witness_in(choice)
    name, _, weights = choice.partition(":")
    witness = load_witness(name, weights or "auto")
    if witness is None:
        raise ConfigError(
            f"{option('witness', choice)}: no pretrained weights for {name!r}; write NAME:FILE, or NAME:timm"
        )
    return witness


def witness_in(place: str) -> Witness:
    """The network in a folder of transformers or timm, or behind a Hub id, which is downloaded."""
    name = Path(place).resolve().name if Path(place).is_dir() else place
    with open_folder(place) as folder:
        if hugging_face.is_saved_network(folder):
            return of_backbone(name, hugging_face.load_backbone(folder))
        is_there = folder.kind("config.json") != "missing"
        config = read_in(folder, "config.json") if is_there else None
    architecture = config.get("architecture") if isinstance(config, dict) else None
    if not isinstance(architecture, str):
        raise ConfigError(
            f"{option('witness', place)}: this is no folder of a transformers or timm model"
        )
    weights = str(folder.path / "model.safetensors")
    return of_backbone(name, create_backbone(architecture, weights))


def automatic_witness(source: SourceModel, backbone_hash: str) -> Witness | None:
    """The network that the source model started from, or the best of the extra usfan[offline]."""
    if not source.pretrained or source.spec.channels != 3:
        return None
    record = source.architecture.get("pretrained")
    if record is None:
        return best_offline()
    name = source.architecture["backbone"]
    backbone = source.classifier.backbone
    if backbone_hash != record["hash"]:
        return load_original(name, record) or best_offline()
    original = load_original(name, record)
    return Witness(
        name,
        backbone,
        source.spec,
        record["hash"],
        is_source_backbone=True,
        classifier=None if original is None else original.classifier,
    )


def load_original(name: str, record: dict[str, str]) -> Witness | None:
    """The network with the weights that a source model started from; None if they are not on this machine. The record
    may be a stranger's, so nothing is downloaded."""
    weights = "timm" if record["from"] == "timm" else "offline"
    try:
        with cache_only():
            witness = load_witness(name, weights)
    except ConfigError as error:
        log.debug("the original weights of %s are unavailable: %s", name, error)
        return None
    if witness is None or witness.hash != record["hash"]:
        return None
    return witness


def has_witness(
    architecture: dict[str, Any], summary: dict[str, Any], channels: int = 3
) -> bool:
    """Whether `auto` will find a witness, judged by a model folder: quick, no network is built."""
    if not came_pretrained(architecture) or channels != 3:
        return False
    record = architecture.get("pretrained") or {}
    if record and summary.get("tune") == "new":
        return True
    if record.get("from") == "timm" and is_cached(architecture["backbone"]):
        return True
    return any(offline_weights(name) is not None for name in OFFLINE_PACKAGES)


def choose_judge(source: SourceModel, used: set[str], backbone_hash: str) -> Witness | None:
    """A pretrained network for the guard whose weights (by hash) the training did not use; None if there is none."""
    if not source.pretrained or source.spec.channels != 3:
        return None
    record = source.architecture.get("pretrained")
    if record is not None and record["hash"] not in used:
        original = automatic_witness(source, backbone_hash)
        if original is not None and original.hash not in used:
            return original
    return best_offline(but=used)


THUMBNAIL = 32
POOLED = 64
"""Images that are pooled to thumbnails at a time: as floats, a thousand of 3 × 256 × 256 take 750 MiB."""


def thumbnails(
    store: Store,
    rows: Tensor,
    runtime: Runtime,
    most: int = THUMBNAIL,
) -> Tensor:
    """Features of images that no training has touched, for a target that no pretrained network fits: the pixels at
    `rows` themselves, at most 32 × 32, minus the mean image."""
    side = min(most, *store.values.shape[-2:])
    parts = []
    for part in rows.split(POOLED):
        images = store.batch(part).to(runtime.device).float()
        parts.append(adaptive_avg_pool2d(images, side).flatten(1))
    small = torch.cat(parts)
    small = small - small.mean(dim=0)
    correction = min(1, small.numel() - 1)  # a single number has no spread
    return small / small.std(correction=correction).clamp_min(1e-6)


def load_witness(name: str, weights: str) -> Witness | None:
    is_here = offline_weights(name) is not None or (weights == "auto" and is_cached(name))
    if weights in ("auto", "offline") and not is_here:
        return None
    backbone = create_backbone(name, weights)
    if backbone.weights is None:
        return None
    if weights == "timm":
        classifier = timm_classifier(name, backbone.features)
        backbone = replace(backbone, classifier=classifier)
    return of_backbone(name, backbone)


def of_backbone(name: str, backbone: Backbone) -> Witness:
    """A network that starts from pretrained weights as a witness."""
    assert backbone.weights is not None
    return Witness(
        name,
        backbone.module,
        backbone.spec,
        backbone.weights["hash"],
        classifier=backbone.classifier,
    )


def best_offline(*, but: Collection[str] = ()) -> Witness | None:
    """The largest network of the extra usfan[offline] that is installed, other than the weights `but` (hashes)."""
    for name in sorted(OFFLINE_PACKAGES, reverse=True):
        witness = load_witness(name, "offline")
        if witness is not None and witness.hash not in but:
            return witness
    return None
