"""One run of one variant: what every search does."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from studies.full_posterior import FullPosterior
from studies.paths import path_of
from studies.terms import AveragedWeights
from studies.variants import Variant
from torch import Tensor

from usfan.adaptation.adapt import adapt
from usfan.adaptation.methods import METHODS, Method
from usfan.adaptation.settings import own_settings
from usfan.artifacts.model import AdaptedModel, SourceModel
from usfan.compute.passes import forward_store
from usfan.compute.runtime import Runtime
from usfan.data.cache import PixelStore
from usfan.scoring.objectives import diversity, sample_entropy

RECIPE = {"guard": False, "balance": False, "anneal": False, "diversity_memory": 0.0, "pseudo_label_warmup": 0}
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
    variant: Variant, model: SourceModel, data: Any, row: Method | None = None, **given: Any
) -> AdaptedModel:
    """A run of the variant; settings that its method does not have are left out."""
    runtime = {"runtime": given.pop("runtime")} if "runtime" in given else {}
    with added(row or variant.row()) as name:
        return adapt(model, data, name, **runtime, **own_settings(name, {**given, **variant.settings}))


def run_variant(
    variant: Variant,
    model: SourceModel,
    store: PixelStore,
    runtime: Runtime,
    *,
    source_store: PixelStore | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Accuracy of the last iterate in percent, seconds, and the path. Labels are used to score, and for nothing else.

    `source_store` is needed by the variant that fits another posterior, which takes the source images.
    """
    began, row, labels = time.time(), variant.row(), store.labels
    assert labels is not None
    if variant.full:
        assert source_store is not None
        found = forward_store(model.classifier, source_store, model.spec, runtime)
        model = dataclasses.replace(model, posterior=FullPosterior.fit(*found, model.posterior))
    adapted = adapt_variant(variant, model, store, row, runtime=runtime, **RECIPE, **settings)
    path = path_of(adapted, labels)
    result = {"variant": variant.name, "accuracy": path["accuracy"][-1], "seconds": round(time.time() - began, 1)}
    for term in row.terms:
        if isinstance(term, AveragedWeights):
            result |= judged(term.mean, adapted, store, labels, runtime)
    return {**result, "path": path}


def judged(
    mean: dict[str, Tensor], model: AdaptedModel, store: PixelStore, labels: Tensor, runtime: Runtime
) -> dict[str, float]:
    """What the averaged weights give, beside the last iterate."""
    model.classifier.load_state_dict({**model.classifier.state_dict(), **mean})
    _, logits = forward_store(model.classifier, store, model.spec, runtime)
    probs = logits.softmax(dim=1)
    right = (logits.argmax(dim=1) == labels.to(logits.device)).double().mean()
    information = -float(diversity(probs.mean(dim=0)) + sample_entropy(probs).mean())
    return {"averaged": round(100 * float(right), 2), "averaged_information": information}
