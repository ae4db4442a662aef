"""Tasks of the families, from the cache: a source model, and a target as features (digits: as images).

    for task in tasks(cache, "lines", seeds=(2019,)):
        adapted = adapt_model(task.source, task.target, "u-sfan++", witness=task.witness, **task.settings)

Source models are trained when they are first needed, and kept in CACHE/sources. Labels only score and answer questions.

Shapes: N target images, F features, C classes of the witness.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from studies.families.domains import (
    NETWORK,
    OFFICE,
    Domain,
    domain_file,
    load_domain,
    pairs,
    per_class,
)
from torch import Tensor

import usfan
from usfan.adaptation.witness import testimony
from usfan.config import RuntimeConfig
from usfan.data.store import Store
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime, start_runtime
from usfan.models.backbones import PretrainedHead, create_backbone
from usfan.store.model import SourceModel
from usfan.training.source import train_source

SEEDS = (2019, 2020, 2021)
EPOCHS = 40
"""Of stage 1 on features, at most."""
FEW = 40
"""Images per class of the small PACS tasks."""
LEAST = 8
"""Images that a class of emoji needs in both domains."""
DIGIT_SOURCE_EPOCHS = {"mnist": 6, "uci": 12, "usps": 6}
DIGIT_TARGET_EPOCHS = {"mnist": 4, "uci": 7, "usps": 4}
"""Those of the demo; USPS has about as many images as its MNIST."""


@dataclass(frozen=True, eq=False)
class Task:
    """A source model and a target."""

    family: str
    source_domain: str
    target_domain: str
    seed: int
    source: SourceModel
    target: Store
    """Features (N × F) or images, with labels that only score."""
    witness: Tensor | None
    """N × (F + C): the witness's description of the target, as `adapt` takes it; None for digits."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `adapt` that the family needs."""

    @property
    def name(self) -> str:
        return task_name(self.source_domain, self.target_domain)

    @property
    def labels(self) -> Tensor:
        """N positions in `classes`."""
        assert self.target.labels is not None
        return self.target.labels

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes


def task_name(source: str, target: str) -> str:
    return f"{source}→{target}"


@functools.cache
def cpu() -> Runtime:
    return start_runtime(RuntimeConfig(device="cpu"))


@functools.cache
def witness_head() -> PretrainedHead | None:
    """The classifier that the witness was pretrained with."""
    return create_backbone(NETWORK, "offline").classifier


@functools.lru_cache(maxsize=8)
def read_domain(cache: Path, family: str, name: str) -> Domain:
    """A domain of the cache as the family uses it."""
    domain = load_domain(cache, family, name)
    if family != "pacs40":
        return domain
    groups = [domain.classes[label] for label in domain.labels.tolist()]
    return domain.rows(torch.tensor(per_class(groups, FEW)))


def shared_classes(family: str, source: Domain, target: Domain) -> tuple[str, ...]:
    """Classes of both domains; for emoji, those with enough images in both."""
    least = LEAST if family == "emoji" else 1
    shared = []
    for name in source.classes:
        if name not in target.classes:
            continue
        in_source = int((source.labels == source.classes.index(name)).sum())
        in_target = int((target.labels == target.classes.index(name)).sum())
        if min(in_source, in_target) >= least:
            shared.append(name)
    return tuple(shared)


def only(domain: Domain, classes: Sequence[str]) -> tuple[Domain, Tensor]:
    """The images of these classes, and their labels as positions in `classes`."""
    table = torch.tensor(
        [classes.index(name) if name in classes else -1 for name in domain.classes]
    )
    labels = table[domain.labels]
    rows = (labels >= 0).nonzero().flatten()
    return domain.rows(rows), labels[rows]


def store_of(
    domain: Domain, labels: Tensor, classes: tuple[str, ...]
) -> Store | usfan.ImageData:
    """The model's input: features, or images that are not decoded to its size yet."""
    if domain.images is not None:
        return usfan.ImageData(domain.images.numpy(), labels=labels, classes=classes)
    assert domain.crop is not None
    return Store(domain.crop, torch.arange(len(labels)), labels, classes, list(domain.files))


def source_folder(cache: Path, family: str, source: str, target: str, seed: int) -> Path:
    """Where a source model is kept. Classes of emoji depend on the target; made shifts share Office-31's models."""
    name = f"{source}-{target}" if family == "emoji" else source
    shared = {
        "shifts": "office31",
        "inverted": "digits",
        "same": "office31" if source in OFFICE else "pacs",
    }
    return cache / "sources" / shared.get(family, family) / f"{name}-{seed}"


def load_source(
    cache: Path, family: str, source: str, target: str, seed: int, classes: tuple[str, ...]
) -> SourceModel:
    """The source model; it is trained and kept if the cache has none."""
    folder = source_folder(cache, family, source, target, seed)
    if not folder.exists():
        domain, labels = only(read_domain(cache, family, source), classes)
        settings: dict[str, Any] = {
            "backbone": NETWORK,
            "pretrained": "offline",
            "tune": "new",
            "epochs": EPOCHS,
        }
        if family in ("digits", "inverted"):
            settings = {
                "backbone": "digits-cnn",
                "patience": 0,
                "epochs": DIGIT_SOURCE_EPOCHS[source],
            }
        data = store_of(domain, labels, classes)
        model = train_source(data, seed=seed, runtime=cpu(), **settings)
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return SourceModel.load(folder)


def load_task(cache: Path, family: str, source: str, target: str, seed: int) -> Task:
    """A task of the cache, by its domains."""
    cache = Path(cache)
    target_domain = read_domain(cache, family, target)
    classes = shared_classes(family, read_domain(cache, family, source), target_domain)
    model = load_source(cache, family, source, target, seed, classes)
    domain, labels = only(target_domain, model.classes)
    data = store_of(domain, labels, model.classes)
    if family in ("digits", "inverted"):
        store = engine_store(data, model.spec, cpu())
        settings = {"epochs": DIGIT_TARGET_EPOCHS[target.removesuffix("-inverted")]}
        return Task(family, source, target, seed, model, store, None, settings)
    assert isinstance(data, Store)
    assert domain.whole is not None
    witness = testimony(domain.whole, witness_head())
    return Task(family, source, target, seed, model, data, witness, {"tune": "new"})


def ready(cache: Path, family: str) -> tuple[tuple[str, str], ...]:
    """Source and target of the tasks of a family whose domains the cache has."""
    return tuple(
        pair
        for pair in pairs(family)
        if all(domain_file(Path(cache), family, name).exists() for name in pair)
    )


def tasks(cache: Path, family: str, seeds: Sequence[int] = SEEDS) -> Iterator[Task]:
    """The tasks of a family that the cache has."""
    for seed in seeds:
        for source, target in ready(cache, family):
            yield load_task(cache, family, source, target, seed)
