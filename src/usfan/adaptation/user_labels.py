"""Record in a model of the labels that the user gave."""

from __future__ import annotations

import dataclasses

from usfan.maths.user_labels import UserLabels
from usfan.store.model import AdaptedModel


def record_user_labels(model: AdaptedModel, labels: UserLabels) -> None:
    """Write into the model how many labels it learned from, and which images they belong to."""
    assert model.passes is not None
    classes = len(labels.labels.unique()) + bool(len(labels.new_rows))
    summary = {"count": len(labels.all_rows), "classes": classes}
    model.history["labels"] = summary
    for stored in (model, model.alternative):
        if stored is not None:
            stored.summary = {**stored.summary, "labels": summary}
    model.passes = dataclasses.replace(model.passes, labelled=labels.all_rows.cpu())
