"""A small network on small pictures, for the tests of what computes."""

from __future__ import annotations

from typing import Any

import torch
from process_worker import CLASSES, SmoothCNN, pictures

from usfan.data.store import Store
from usfan.data.views import InputSpec
from usfan.engine.optimiser import Optimiser
from usfan.engine.passes import Feeder, forward, prepare, set_mode
from usfan.engine.runtime import Runtime
from usfan.engine.stage import Stage
from usfan.models.classifier import Classifier

CPU = Runtime(torch.device("cpu"))
SPEC = InputSpec(1, 28, 28, (0.5,), (0.5,), "resized-crop")


def stage(**settings: Any) -> Stage:
    """Of stage 1, unless `settings` say otherwise."""
    return Stage(**{"epochs": 1, "batch_size": 8, "lr": 1e-2, "head": True, **settings})


def small_classifier() -> Classifier:
    torch.manual_seed(0)
    return prepare(
        Classifier(SmoothCNN(), SmoothCNN.num_features, CLASSES, bottleneck=8), SPEC, CPU
    )


def small_store(count: int = 30) -> Store:
    return Store(pictures(count, 0)[0], torch.arange(count))


def take_steps(
    classifier: Classifier, optimiser: Optimiser, steps: range, tune: str = "all"
) -> None:
    feeder = Feeder(small_store(), SPEC, 0, CPU)
    set_mode(classifier, tune)
    for step in steps:
        optimiser.schedule(step)
        (samples,) = feeder.inputs(torch.arange(step, step + 8))
        _, logits = forward(classifier, feeder.view(samples), CPU)
        optimiser.update(logits.square().mean())
