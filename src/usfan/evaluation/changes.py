"""What an adaptation changed: the images whose prediction is another, and the images to label first."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from usfan.artifacts.model import AdaptedModel
from usfan.errors import DataError
from usfan.evaluation.predictions import cell, open_table
from usfan.files import whole_file
from usfan.posterior.predictive import certainty_weights
from usfan.scoring.label_first import label_first

CHANGED = ("path", "before", "after", "certainty_before", "certainty_after")
LABEL_FIRST = ("path", "label", "predicted", "certainty", "mutual_information")


def changed_images(model: AdaptedModel, data: Any = None) -> list[dict[str, Any]]:
    """One record per image whose prediction changed, the surest first: path, before, after, certainty of both."""
    passes = passes_of(model)
    before, after = passes.before.logits.argmax(dim=1), passes.after.logits.argmax(dim=1)
    certainty = {when: certainty_weights(getattr(passes, when).posterior_probs) for when in ("before", "after")}
    rows = (before != after).nonzero().flatten()
    rows = rows[certainty["after"][rows].argsort(descending=True)]
    where = places(model, data)
    return [
        {
            "path": where(i),
            "before": model.classes[int(before[i])],
            "after": model.classes[int(after[i])],
            "certainty_before": float(certainty["before"][i]),
            "certainty_after": float(certainty["after"][i]),
        }
        for i in rows.tolist()
    ]


def images_to_label(model: AdaptedModel, count: int | None = None, data: Any = None) -> list[dict[str, Any]]:
    """The images whose labels would help most, the most urgent first; by default one per class.

    `label` is empty: it is for the user to fill in. The table is then a list that `--labels` and `ImageData` read.
    """
    passes = passes_of(model)
    chosen = label_first(passes.after, count or len(model.classes), labelled=passes.given)
    certainty, where = certainty_weights(passes.after.posterior_probs), places(model, data)
    predicted = passes.after.logits.argmax(dim=1)
    figures = ((i, float(certainty[i]), float(passes.after.mutual_information[i])) for i in chosen.tolist())
    return [
        dict(zip(LABEL_FIRST, (where(i), "", model.classes[int(predicted[i])], sure, information), strict=True))
        for i, sure, information in figures
    ]


def write_changes(folder: Path, model: AdaptedModel, data: Any = None, *, labels: int | None = None) -> dict[str, int]:
    """changes.csv and label_first.csv in a run folder; how many rows each has."""
    changed, first = changed_images(model, data), images_to_label(model, labels, data)
    write_records(folder / "changes.csv", CHANGED, changed)
    write_records(folder / "label_first.csv", LABEL_FIRST, first)
    return {"changed": len(changed), "label_first": len(first)}


def write_records(path: Path, columns: tuple[str, ...], records: list[dict[str, Any]]) -> None:
    with whole_file(path) as part, open_table(part, "w") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for record in records:
            values = (record[name] for name in columns)
            writer.writerow([f"{value:.4f}" if isinstance(value, float) else cell(value) for value in values])


def describe_changes(model: AdaptedModel) -> str:
    """One line: how many predictions changed, and the most frequent change."""
    passes = passes_of(model)
    before, after = (p.logits.argmax(dim=1).tolist() for p in (passes.before, passes.after))
    pairs = Counter((b, a) for b, a in zip(before, after, strict=True) if a != b)
    if not pairs:
        return f"none of {len(before):,} predictions changed"
    (b, a), most = pairs.most_common(1)[0]
    share = 100 * pairs.total() / len(before)
    changed = f"{pairs.total():,} of {len(before):,} predictions changed ({share:.0f} %)"
    return f"{changed}, most often {model.classes[b]} → {model.classes[a]} ({most:,})"


def passes_of(model: AdaptedModel) -> Any:
    passes = getattr(model, "passes", None)
    if passes is None:
        raise DataError(
            "this model does not hold what it saw of the target: only what `usfan.adapt` returns does, a saved model "
            "does not; read changes.csv of the run folder"
        )
    return passes


def places(model: AdaptedModel, data: Any) -> Any:
    """From the row of an output to the path of its image, or its place in an array."""
    assert model.passes is not None
    images, kept = model.passes.images if data is None else data, model.passes.kept
    if images is None:
        return lambda row: f"image {int(kept[row])}"
    if len(images) <= int(torch.as_tensor(kept).max()):
        raise DataError(f"{images.name} has {len(images)} images: these are not the images of the adaptation")
    return lambda row: images.where(int(kept[row]))
