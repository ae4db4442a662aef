"""Office-31 as frozen features of EfficientNet-Lite0, computed once, for the studies of uncertainties and of several
sources. With a cache folder, a second run needs no pass over the images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from usfan.data.benchmarks.catalogue import benchmark
from usfan.data.benchmarks.layouts import check, load_domain
from usfan.data.store import Store
from usfan.engine.features import BackboneAlone, features_of
from usfan.engine.passes import engine_store
from usfan.engine.runtime import Runtime
from usfan.models.backbones import create_backbone

NETWORK = "tf_efficientnet_lite0"
OFFICE = "ADW"
CLOSED = {"backbone": NETWORK, "tune": "new", "epochs": 40, "progress": False}
"""Settings of stage 1, those of the table of frozen backbones in docs/results.md."""


def office31(root: Path, runtime: Runtime) -> dict[str, Store]:
    """The features of every domain by its letter, with labels in the order of the catalogue's classes."""
    backbone = create_backbone(NETWORK, "auto")
    assert backbone.weights is not None, "the weights come with the extra usfan[offline]"
    alone = BackboneAlone(backbone.module, channels_last=False)
    copy = check(benchmark("office31"), root)
    return {
        domain: features_of(
            alone,
            engine_store(load_domain(copy, domain), backbone.spec, runtime),
            backbone.spec,
            runtime,
        )
        for domain in OFFICE
    }


def only(store: Store, classes: Sequence[str], known: Sequence[str] | None = None) -> Store:
    """The images of these classes. Labels are positions in `known` (by default `classes`); all other classes
    share one more label, that of the unknown."""
    assert store.labels is not None
    assert store.classes is not None
    known = classes if known is None else known
    numbers = [known.index(name) if name in known else len(known) for name in store.classes]
    used = torch.tensor([name in classes for name in store.classes])
    rows = used[store.labels].nonzero().flatten()
    labels = torch.tensor(numbers)[store.labels[rows]]
    changed = {
        "values": store.values[rows],
        "positions": torch.arange(len(rows)),
        "paths": None,
        "key": None,
    }
    return dataclasses.replace(store, **changed, labels=labels, classes=tuple(known))
