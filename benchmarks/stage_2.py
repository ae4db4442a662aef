"""A run of stage 2 that is opened but not begun: its passes and epochs are taken one by one, and timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from usfan.adaptation.inputs import prepare
from usfan.adaptation.run import Adaptation
from usfan.data.store import Store
from usfan.engine.runtime import Runtime
from usfan.maths.outputs import Outputs
from usfan.store.model import SourceModel
from usfan.workflow import make_plan, open_source


@contextlib.contextmanager
def opened(
    source: SourceModel, store: Store, runtime: Runtime, **settings: Any
) -> Iterator[Adaptation]:
    plan = make_plan(open_source(source), {"guard": False, "tune": "all", **settings})
    run = Adaptation(prepare(plan, source, store, runtime), runtime)
    run.classifier = run.inputs.network
    run.begin()
    try:
        yield run
    finally:
        run.release()


def refresh(run: Adaptation, epoch: int) -> Outputs:
    """What comes before the steps of an epoch: a pass over the target, and new tables from it."""
    outputs = run.outputs()
    run.guidance.refresh(outputs, epoch / max(1, run.schedule.epochs))
    return outputs
