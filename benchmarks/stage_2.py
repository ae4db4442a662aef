"""A run of stage 2 that is opened but not begun: its passes and epochs are taken one by one, and timed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from usfan.adaptation import adapt as stage
from usfan.adaptation.adapt import Adaptation
from usfan.adaptation.settings import resolve
from usfan.artifacts.model import SourceModel
from usfan.compute.accelerate.layers import accelerated
from usfan.compute.runtime import Runtime
from usfan.data.cache import PixelStore
from usfan.scoring.outputs import Outputs


@contextlib.contextmanager
def opened(source: SourceModel, store: PixelStore, runtime: Runtime, **settings: Any) -> Iterator[Adaptation]:
    given = {"guard": False, "tune": "all", **settings}
    config, method = resolve(given, pretrained=source.pretrained, classes=len(source.classes))
    run = Adaptation(source, store, config, method, runtime)
    classifier = stage.prepare(copy.deepcopy(source.classifier), source.spec, runtime, steps=True)
    with accelerated(classifier, runtime, run.steps):
        run.open(classifier)
        try:
            yield run
        finally:
            run.loop.release()
            if run.replay is not None:
                run.replay.release()


def refresh(run: Adaptation, epoch: int) -> Outputs:
    """What comes before the steps of an epoch: a pass over the target, and new tables from it."""
    outputs = run.outputs()
    run.guide.refresh(outputs, epoch / max(1, run.epochs))
    return outputs
