"""Table of a run's target images, for the report: predictions before and after, certainty, map position."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.data.sources import ImageData
from usfan.files import Folder, write_json, write_tensors
from usfan.maths.objectives import certainty_weights, entropy
from usfan.maths.outputs import Outputs
from usfan.metrics.changes import passes_of
from usfan.metrics.evaluate import score_outputs
from usfan.store.model import AdaptedModel

HALF_FROM = 4_000_000
"""Tables of N·K values from here on are stored in half precision."""


def adaptation_metrics(
    model: AdaptedModel, data: ImageData | None, *, open_set: bool = False
) -> dict[str, Any]:
    """metrics.json of `adapt`: which model the guard kept and why; with labels, the figures before and after.

    Images whose labels the user gave are no test of a model that learned from them. The figures leave them out, unless
    there are no others.
    """
    passes = passes_of(model)
    metrics = {k: v for k, v in model.history.items() if k != "records"}
    metrics["images"] = len(passes.positions)
    metrics["skipped"] = len(passes.unreadable)
    labels = target_labels(model, data, open_set=open_set)
    if labels is None:
        return metrics
    before = passes.before
    after = passes.after
    if passes.labelled is not None and len(passes.labelled) < len(labels):
        is_test = torch.ones(len(labels), dtype=torch.bool)
        is_test[passes.labelled] = False
        rows = is_test.nonzero().flatten()
        before = before.rows(rows)
        after = after.rows(rows)
        labels = labels[rows]
    open_set = open_set and bool((labels >= len(model.classes)).any())
    metrics["before"] = score_outputs(before, labels, model, open_set=open_set)
    metrics["after"] = score_outputs(after, labels, model, open_set=open_set)
    return metrics


def target_labels(
    model: AdaptedModel, data: ImageData | None, *, open_set: bool
) -> Tensor | None:
    """Labels of the readable images, if the data has any."""
    if data is None or data.labels is None:
        return None
    if data.classes != tuple(model.classes):  # else they were matched before
        data = data.match_classes(model.classes, open_set=open_set)
    assert data.labels is not None
    return data.labels[passes_of(model).positions]


def save_image_table(
    folder: Path, model: AdaptedModel, data: ImageData, *, private: bool = False
) -> None:
    """samples.safetensors and samples.json."""
    tensors = image_tensors(model, target_labels(model, data, open_set=True))
    write_tensors(folder / "samples.safetensors", tensors)
    description: dict[str, Any] = {
        "paths": None,
        "classes": list(model.classes),
    }
    if data.paths is not None and not private:
        positions = passes_of(model).positions.tolist()
        description["paths"] = [data.paths[i] for i in positions]
        description["made"] = mark_of(folder)
    write_json(folder / "samples.json", description)


def image_tensors(model: AdaptedModel, labels: Tensor | None) -> dict[str, Tensor]:
    """The tensors of samples.safetensors, one row for each of the N readable images."""
    passes = passes_of(model)
    map_before, map_after = flat_map(passes.before.features, passes.after.features)
    tensors = {
        **prediction_tensors(passes.before, "before"),
        **prediction_tensors(passes.after, "after"),
        "weight": certainty_weights(passes.after.posterior_probs),
        "features_before": map_before,
        "features_after": map_after,
    }
    if passes.naming is not None:
        tensors["view"] = passes.naming.view.features.half()
        tensors["near"] = passes.naming.view.near.int()
        tensors["names_before"] = passes.naming.source.half()
    if passes.decisions is not None:
        for when, labels_of in zip(("before", "after"), passes.decisions, strict=True):
            tensors[f"decisions_{when}"] = labels_of.int()
    if model.unknown_rule is not None:
        tensors["unknown"] = model.flag_unknown(passes.after)
    if labels is not None:
        tensors["labels"] = labels
    return tensors


def prediction_tensors(outputs: Outputs, when: str) -> dict[str, Tensor]:
    probs = outputs.probs
    posterior = outputs.posterior_probs
    half = probs.numel() >= HALF_FROM
    return {
        f"probs_{when}": probs.half() if half else probs,
        f"posterior_{when}": posterior.half() if half else posterior,
        f"entropy_{when}": entropy(posterior),
    }


def mark_of(folder: Path) -> list[int] | None:
    """Tells a run folder from a copy of it: number and time of its lock, which no archive can bring along."""
    try:
        status = os.stat(folder / ".lock", follow_symlinks=False)
    except OSError:
        return None
    return [status.st_ino, status.st_ctime_ns]


def made_here(folder: Folder, mark: object) -> bool:
    """Whether the run was made in this place, so that its paths are those of this user."""
    return isinstance(mark, list) and mark == mark_of(folder.place)


def flat_map(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Both sets of features on the same two principal axes (of the adapted ones). N×2 each."""
    centre = after.double().mean(dim=0)
    centred = after.double() - centre
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    axes = vectors[:, -2:].flip(1)
    # An axis has no sign: the largest entry is made positive.
    sign = torch.where(axes.abs().amax(0) == axes.amax(0), 1.0, -1.0)
    axes = axes * sign
    map_before = (before.double() - centre) @ axes
    map_after = centred @ axes
    return map_before.float(), map_after.float()
