"""Images whose prediction an adaptation changed."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from usfan.data.sources import ImageData
from usfan.errors import DataError
from usfan.files import whole_file
from usfan.maths.objectives import certainty_weights
from usfan.metrics.partial_table import Record
from usfan.metrics.predictions import cell, open_table
from usfan.shield import shielded
from usfan.store.model import AdaptedModel, Passes

CHANGED = ("path", "before", "after", "certainty_before", "certainty_after")


def changed_rows(passes: Passes) -> Tensor:
    """Rows of the outputs whose prediction changed, the surest first."""
    changed = passes.before.logits.argmax(dim=1) != passes.after.logits.argmax(dim=1)
    order = certainty_weights(passes.after.posterior_probs).argsort(descending=True)
    return order[changed[order]].cpu()


@shielded
def changed_images(model: AdaptedModel, data: ImageData | None = None) -> list[Record]:
    """One record per image whose prediction changed, the surest first: path, before, after, certainty of both."""
    passes = passes_of(model)
    rows = changed_rows(passes)
    columns = (
        image_names(passes, rows, data),
        class_names(model, passes.before.logits[rows]),
        class_names(model, passes.after.logits[rows]),
        certainty_weights(passes.before.posterior_probs[rows]).tolist(),
        certainty_weights(passes.after.posterior_probs[rows]).tolist(),
    )
    return [dict(zip(CHANGED, row, strict=True)) for row in zip(*columns, strict=True)]


def class_names(model: AdaptedModel, logits: Tensor) -> list[str]:
    """The predicted classes."""
    return [model.classes[k] for k in logits.argmax(dim=1).tolist()]


def write_changes(folder: Path, model: AdaptedModel, data: ImageData) -> int:
    """changes.csv in a run folder; how many rows it has."""
    changed = changed_images(model, data)
    write_records(folder / "changes.csv", CHANGED, changed)
    return len(changed)


def write_records(path: Path, columns: Sequence[str], records: Sequence[Record]) -> None:
    with whole_file(path) as part, open_table(part) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for record in records:
            writer.writerow(cell(record[name], digits=4) for name in columns)


def describe_changes(model: AdaptedModel) -> str:
    """One line: how many predictions changed, and the most frequent change."""
    passes = passes_of(model)
    total = len(passes.after)
    rows = changed_rows(passes)
    if not len(rows):
        return f"none of {total:,} predictions changed"
    before = class_names(model, passes.before.logits[rows])
    after = class_names(model, passes.after.logits[rows])
    (old, new), most = Counter(zip(before, after, strict=True)).most_common(1)[0]
    share = 100 * len(rows) / total
    return (
        f"{len(rows):,} of {total:,} predictions changed ({share:.0f} %), "
        f"most often {old} → {new} ({most:,})"
    )


def passes_of(model: AdaptedModel) -> Passes:
    passes: Passes | None = getattr(model, "passes", None)
    if passes is None:
        raise DataError(
            "this model does not hold what it saw of the target: only what `usfan.adapt` returns does, a saved model "
            "does not; read changes.csv of the run folder"
        )
    return passes


def image_names(passes: Passes, rows: Tensor, data: ImageData | None) -> list[str]:
    """The path of the image of each row, or its place in an array."""
    images = passes.images if data is None else data
    positions = passes.positions.cpu()[rows].tolist()
    if images is None:
        return [f"image {position}" for position in positions]
    if len(images) <= int(passes.positions.max()):
        raise DataError(
            f"{images.name} has {len(images)} images: these are not the images of the adaptation"
        )
    return [images.where(position) for position in positions]
