"""One run of one variant."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from studies.paths import path_of
from studies.variants import Variant

from usfan.adaptation.methods import METHODS, Method
from usfan.adaptation.plan import settings_of_method
from usfan.data.store import Store
from usfan.engine.runtime import Runtime
from usfan.store.model import AdaptedModel, SourceModel
from usfan.workflow import adapt_model as adapt

RECIPE = {
    "guard": False,
    "balance": False,
    "anneal": False,
    "diversity_memory": 0.0,
    "pseudo_label_warmup": 0,
}
"""Under the variant's own settings: the last iterate, and none of the defaults that the search is about."""


@contextlib.contextmanager
def added(row: Method) -> Iterator[str]:
    """Keep the row in the table of methods while it runs; a variant may have the same name as its method."""
    before = METHODS.get(row.name)
    METHODS[row.name] = row
    try:
        yield row.name
    finally:
        del METHODS[row.name]
        if before is not None:
            METHODS[row.name] = before


def adapt_variant(
    variant: Variant, model: SourceModel, data: Any, row: Method | None = None, **options: Any
) -> AdaptedModel:
    """A run of the variant; settings that its method does not have are left out."""
    runtime = {"runtime": options.pop("runtime")} if "runtime" in options else {}
    with added(row or variant.row()) as name:
        return adapt(
            model,
            data,
            name,
            **runtime,
            **settings_of_method(name, {**options, **variant.settings}),
        )


def run_variant(
    variant: Variant,
    model: SourceModel,
    store: Store,
    runtime: Runtime,
    **settings: Any,
) -> dict[str, Any]:
    """Accuracy of the last iterate in percent, seconds, and the path. Labels are used only to score."""
    began = time.time()
    row = variant.row()
    labels = store.labels
    assert labels is not None
    adapted = adapt_variant(variant, model, store, row, runtime=runtime, **RECIPE, **settings)
    path = path_of(adapted, labels)
    result = {
        "variant": variant.name,
        "accuracy": path["accuracy"][-1],
        "seconds": round(time.time() - began, 1),
    }
    return {**result, "path": path}
