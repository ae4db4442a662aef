"""The inputs of an adaptation, each made once: the network on its device, the images or their features, the witness's
description of them, the judge, the user's labels."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from usfan.adaptation.guard import first_rows
from usfan.adaptation.plan import Plan
from usfan.adaptation.tune import TuneChoice, choose_tune, why_moved
from usfan.adaptation.witness import (
    Witness,
    choose_judge,
    choose_witness,
    look_once,
    testimony,
)
from usfan.data.few_labels import FewLabels
from usfan.data.row_cache import digest
from usfan.data.sources import ImageData
from usfan.data.store import Store
from usfan.engine.features import features_of, is_streamed
from usfan.engine.passes import engine_store
from usfan.engine.passes import prepare as prepare_network
from usfan.engine.runtime import Runtime
from usfan.errors import ConfigError, DataError, option
from usfan.maths.user_labels import UserLabels
from usfan.models.backbones import weights_hash
from usfan.models.classifier import Classifier
from usfan.progress import network_name
from usfan.store.model import SourceModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Everything that `run` works on."""

    plan: Plan
    """All is decided, except the setting if it is auto."""
    source: SourceModel
    network: Classifier
    """A copy of the source model's network, on the device."""
    images: Store
    """The images; if `data` is there, a few of them."""
    store: Store
    """Store that training reads: the images, or their features in a frozen backbone."""
    witness: Tensor | None = None
    """N × (F + C): the images as the witness describes them."""
    judge: Witness | None = None
    """Pretrained network of the guard."""
    user_labels: UserLabels | None = None
    comparison_labels: Tensor | None = None
    """N: labels that only compare models; K for an image of no class of the model, −1 for none."""
    witness_record: Mapping[str, str] | None = None
    """Name and hash of the witness, if it is a network."""
    first_pass: tuple[Tensor, Tensor] | None = None
    """The source model's features (N × D) and logits (N × K) on `store`, if choosing `tune` took them."""
    data: ImageData | None = None
    """The images where they come from, if only their features are stored."""

    def pictures(self, rows: Tensor, runtime: Runtime) -> Store:
        """The images at some rows of `store`. Those that are not stored are decoded again."""
        images = self.images
        if self.data is None:
            key = None if images.key is None else f"{images.key}, {digest(rows.tolist())}"
            return dataclasses.replace(
                images, values=images.values[rows], positions=rows, key=key
            )
        positions = self.store.positions[rows]
        if not bool(torch.isin(positions, images.positions).all()):
            return engine_store(self.data.subset(positions), self.source.spec, runtime)
        places = torch.searchsorted(images.positions, positions)
        return Store(images.values[places], positions)


def prepare(
    plan: Plan,
    source: SourceModel,
    images: Store | ImageData,
    runtime: Runtime,
    labels: FewLabels | None = None,
    witness: Tensor | None = None,
) -> Inputs:
    """The inputs for a plan. `witness`: a description of the images that the caller brings."""
    images = images.without_labels() if isinstance(images, ImageData) else images
    check_images(plan, images, labels)
    network = copy.deepcopy(source.classifier)
    network = prepare_network(network, source.spec, runtime, steps=plan.method.adapts)
    backbone_hash = weights_hash(source.classifier.backbone)
    describer = None
    if witness is None and plan.method.needs_witness:
        describer = find_witness(plan, source, backbone_hash)
    data = None
    store = None
    if is_streamed(images, runtime) and stays_frozen(plan, source, backbone_hash):
        data = images
        judged = first_rows(len(data), len(source.classes))
        store, description, images = look_once(
            network, source.spec, describer, data, runtime, judged
        )
        witness = witness if describer is None else description
        check_count(plan, len(store))
    else:
        images = engine_store(images, source.spec, runtime)
        images = dataclasses.replace(images, labels=None, classes=None)
        check_count(plan, len(images))
    with network_name("source model"):
        plan, store, first_pass = choose_store(
            plan, source, network, images, store, runtime, backbone_hash
        )
    hashes = {backbone_hash} if plan.config.tune == "new" else set()
    record = None
    if describer is not None:
        record = {"name": describer.name, "hash": describer.hash}
        hashes.add(describer.hash)
        if witness is None:
            witness = describe(describer, images, store, runtime)
    judge = None
    if plan.config.guard and plan.method.adapts and not images.is_features:
        judge = choose_judge(source, hashes, backbone_hash)
    user_labels, comparison_labels = labels_of(labels, store, source, runtime)
    return Inputs(
        plan,
        source,
        network,
        images,
        store,
        None if witness is None else witness.to(runtime.device),
        judge,
        user_labels,
        comparison_labels,
        record,
        first_pass,
        data,
    )


def labels_of(
    labels: FewLabels | None, store: Store, source: SourceModel, runtime: Runtime
) -> tuple[UserLabels | None, Tensor | None]:
    """The labels to learn from, and N labels that only compare."""
    if labels is None:
        return None, None
    positions = store.positions.cpu()
    table = labels.learn[positions]
    user_labels = UserLabels.of_table(table, len(source.classes), runtime.device)
    return user_labels if len(user_labels.all_rows) else None, labels.judge[positions]


def stays_frozen(plan: Plan, source: SourceModel, backbone_hash: str) -> bool:
    """Whether the backbone is pretrained and stays as it is on a CPU, whatever the images are: features suffice."""
    if plan.config.tune == "auto":
        if plan.method.adapts and why_moved(source, backbone_hash):
            return False
        plan = plan.with_tune(TuneChoice("new", ""))
    return source.pretrained and plan.frozen


def check_images(plan: Plan, images: Store | ImageData, labels: FewLabels | None) -> None:
    method = plan.method
    if labels is not None and bool((labels.learn >= 0).any()) and not method.terms:
        raise ConfigError(
            f"{method.name} trains nothing, so labels cannot help it: choose another method"
        )
    if isinstance(images, Store) and images.is_features and plan.needs_pixels:
        raise ConfigError(
            f"{method.name} augments images, but the data holds features: give it images"
        )


def check_count(plan: Plan, count: int) -> None:
    name = plan.method.name
    if count < 2 and plan.method.adapts:
        raise DataError(
            f"one image is too few to adapt to: {name} compares images with each other"
        )


def choose_store(
    plan: Plan,
    source: SourceModel,
    network: Classifier,
    images: Store,
    features: Store | None,
    runtime: Runtime,
    backbone_hash: str,
) -> tuple[Plan, Store, tuple[Tensor, Tensor] | None]:
    """The plan with `tune` decided, what is trained on, and the source model's pass over it if there was one.
    `features` are those of the backbone, if they are there already."""
    frozen_pass = None
    if plan.config.tune == "auto":
        choice = TuneChoice("new", "the method trains nothing")
        if plan.method.adapts:
            choice, frozen_pass = choose_tune(
                source, network, images, runtime, backbone_hash, plan.config.epochs, features
            )
        plan = plan.with_tune(choice)
        log.info("tune %s: %s", choice.tune, choice.reason)
    if images.is_features or not plan.frozen:
        return plan, images, None
    if frozen_pass is not None:
        return plan, frozen_pass.store, (frozen_pass.features, frozen_pass.logits)
    if features is None:
        features = features_of(network, images, source.spec, runtime, weights=backbone_hash)
    return plan, features, None


def find_witness(plan: Plan, source: SourceModel, backbone_hash: str) -> Witness:
    """The witness that the plan names."""
    name = plan.config.witness
    witness = choose_witness(name, source, backbone_hash)
    if witness is None:
        why = "no pretrained network is available for it"
        if name == "none":
            why = option("witness", "none")
        raise ConfigError(
            f"{plan.method.name} needs a witness ({why}): name one, {option('witness', 'NAME')}, "
            f"or choose {option('method', 'u-sfan+')}"
        )
    backbone = " (the model's own backbone)" if witness.is_source_backbone else ""
    classes = ""
    if witness.classifier is not None:
        classes = f", with its own {len(witness.classifier.bias):,} classes"
    log.info("witness: %s%s%s", witness.name, backbone, classes)
    return witness


def describe(witness: Witness, images: Store, store: Store, runtime: Runtime) -> Tensor:
    """N × (F + C): the images as the witness describes them. `store` is what training reads: features of the model's
    backbone serve the witness too if it is the same network, and sees the same part of the images."""
    serves = (
        witness.is_source_backbone if images.is_features else witness.has_features_of_source
    )
    if store.is_features and serves:
        return testimony(store.values, witness.classifier)
    if images.is_features:
        raise ConfigError(
            "features are given, no images: give the witness's features too, witness=TENSOR"
        )
    return witness.testimony(images, runtime)
