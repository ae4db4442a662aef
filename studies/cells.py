"""One run of one variant: what every search does."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from studies.loops import FullPosterior
from studies.paths import path_of
from studies.variants import Variant

from usfan.adaptation.settings import resolve_defaults
from usfan.artifacts.model import SourceModel
from usfan.compute.passes import forward_store
from usfan.compute.runtime import Runtime
from usfan.config import AdaptConfig, make_config
from usfan.data.cache import PixelStore
from usfan.scoring.objectives import diversity, sample_entropy

RECIPE = {"guard": False, "balance": False, "anneal": False, "diversity_memory": 0.0, "pseudo_label_warmup": 0}
"""Under the variant's own settings: the last iterate, and none of the defaults that the search is about."""


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

    `source_store` is for the variant that fits another posterior, which is stage 1's work.
    """
    began = time.time()
    given = {"method": variant.method, **RECIPE, **settings, **variant.settings}
    config = resolve_defaults(make_config(AdaptConfig, given), model)
    run = variant.loop(model, dataclasses.replace(store, labels=None, classes=None), config, runtime)
    if variant.full:
        assert source_store is not None
        found = forward_store(model.classifier, source_store, model.spec, runtime)
        run.posterior = FullPosterior.fit(*found, model.posterior)
    path = path_of(run.run(), store.labels)
    row = {"variant": variant.name, "accuracy": path["accuracy"][-1], "seconds": round(time.time() - began, 1)}
    for outputs in getattr(run, "averaged", []):
        right = outputs.logits.argmax(dim=1) == store.labels.to(outputs.logits.device)
        row["averaged"] = round(100 * float(right.double().mean()), 2)
        row["averaged_information"] = -float(
            diversity(outputs.probs.mean(dim=0)) + sample_entropy(outputs.probs).mean()
        )
    return {**row, "path": path}
