"""Images whose prediction an adaptation changed, and images to label first."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from usfan.data.sources import ImageData
from usfan.errors import DataError
from usfan.files import whole_file
from usfan.maths.label_first import label_first
from usfan.maths.objectives import certainty_weights
from usfan.metrics.predictions import Record, cell, open_table
from usfan.store.model import AdaptedModel, Passes

CHANGED = ("path", "before", "after", "certainty_before", "certainty_after")
LABEL_FIRST = ("path", "label", "predicted", "certainty", "mutual_information")


def changed_images(model: AdaptedModel, data: ImageData | None = None) -> list[Record]:
    """One record per image whose prediction changed, the surest first: path, before, after, certainty of both."""
    passes = passes_of(model)
    before = passes.before.logits.argmax(dim=1)
    after = passes.after.logits.argmax(dim=1)
    certainty_before = certainty_weights(passes.before.posterior_probs)
    certainty_after = certainty_weights(passes.after.posterior_probs)
    changed = (before != after).nonzero().flatten()
    rows = changed[certainty_after[changed].argsort(descending=True)]
    path_of = paths_by_row(model, data)
    return [
        {
            "path": path_of(i),
            "before": model.classes[int(before[i])],
            "after": model.classes[int(after[i])],
            "certainty_before": float(certainty_before[i]),
            "certainty_after": float(certainty_after[i]),
        }
        for i in rows.tolist()
    ]


def images_to_label(
    model: AdaptedModel, count: int | None = None, data: ImageData | None = None
) -> list[Record]:
    """The images whose labels would help most, the most urgent first; by default one per class.

    `label` is empty: it is for the user to fill in. The table is then a list that `--labels` and `ImageData` read.
    """
    passes = passes_of(model)
    rows = label_first(passes.after, count or len(model.classes), labelled=passes.labelled)
    certainty = certainty_weights(passes.after.posterior_probs)
    predicted = passes.after.logits.argmax(dim=1)
    path_of = paths_by_row(model, data)
    return [
        {
            "path": path_of(i),
            "label": "",
            "predicted": model.classes[int(predicted[i])],
            "certainty": float(certainty[i]),
            "mutual_information": float(passes.after.mutual_information[i]),
        }
        for i in rows.tolist()
    ]


def write_changes(folder: Path, model: AdaptedModel, data: ImageData) -> dict[str, int]:
    """changes.csv and label_first.csv in a run folder; how many rows each has."""
    changed = changed_images(model, data)
    first = images_to_label(model, data=data)
    write_records(folder / "changes.csv", CHANGED, changed)
    write_records(folder / "label_first.csv", LABEL_FIRST, first)
    return {"changed": len(changed), "label_first": len(first)}


def write_records(path: Path, columns: Sequence[str], records: Sequence[Record]) -> None:
    with whole_file(path) as part, open_table(part) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for record in records:
            writer.writerow(cell(record[name], digits=4) for name in columns)


def describe_changes(model: AdaptedModel) -> str:
    """One line: how many predictions changed, and the most frequent change."""
    passes = passes_of(model)
    before = passes.before.logits.argmax(dim=1).tolist()
    after = passes.after.logits.argmax(dim=1).tolist()
    pairs = Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    if not pairs:
        return f"none of {len(before):,} predictions changed"
    (old, new), most = pairs.most_common(1)[0]
    changed = pairs.total()
    share = 100 * changed / len(before)
    return (
        f"{changed:,} of {len(before):,} predictions changed ({share:.0f} %), "
        f"most often {model.classes[old]} → {model.classes[new]} ({most:,})"
    )


def passes_of(model: AdaptedModel) -> Passes:
    passes: Passes | None = getattr(model, "passes", None)
    if passes is None:
        raise DataError(
            "this model does not hold what it saw of the target: only what `usfan.adapt` returns does, a saved model "
            "does not; read changes.csv of the run folder"
        )
    return passes


def paths_by_row(model: AdaptedModel, data: ImageData | None) -> Callable[[int], Any]:
    """From the row of an output to the path of its image, or its place in an array."""
    passes = passes_of(model)
    images = passes.images if data is None else data
    positions = passes.positions.tolist()
    if images is None:
        return lambda row: f"image {positions[row]}"
    if len(images) <= max(positions):
        raise DataError(
            f"{images.name} has {len(images)} images: these are not the images of the adaptation"
        )
    return lambda row: images.where(positions[row])
