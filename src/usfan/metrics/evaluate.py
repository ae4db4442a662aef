"""Figures of a model on labelled images: the point estimate decides; calibration is that of both predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from usfan.config import RuntimeConfig
from usfan.data.few_labels import only_labelled
from usfan.data.sources import ImageData
from usfan.engine.runtime import Runtime, start_runtime
from usfan.errors import DataError
from usfan.maths.calibration import calibration_metrics
from usfan.maths.measurement import wilson
from usfan.maths.outputs import Outputs
from usfan.maths.unknown import SCORES, UnknownRule, split_unknown
from usfan.metrics.metrics import (
    classification_metrics,
    detection,
    open_set_metrics,
)
from usfan.store.model import SourceModel, as_images


def evaluate(
    model: SourceModel,
    data: Any,
    *,
    open_set: bool = False,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Callable[[int], None] | None = None,
    labels: Any = None,
) -> dict[str, Any]:
    """The figures of `metrics.json`. Classes are matched by name; percentages go from 0 to 100.

    `labels`: of a few of the images, whatever `usfan.data.few_labels` takes; the figures are of these images.
    """
    images = as_images(data)
    if labels is not None:
        images = only_labelled(images, labels, model.classes, open_set=open_set)
    if images.labels is None:
        raise DataError(f"{images.name}: no labels to compare with; `usfan predict` needs none")
    images = images.match_classes(model.classes, open_set=open_set)
    outputs, positions = run_over(model, images, batch_size, runtime, progress)
    assert images.labels is not None
    truth = images.labels[positions]
    metrics = score_outputs(outputs, truth, model, open_set=open_set)
    accuracy = metrics["accuracy"]
    known = int((truth < len(model.classes)).sum())
    interval = wilson(round(accuracy * known / 100), known)
    return {
        "accuracy": accuracy,
        "accuracy_low": round(100 * interval.low, 4),
        "accuracy_high": round(100 * interval.high, 4),
        **metrics,
    }


def run_over(
    model: SourceModel,
    images: ImageData,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Outputs, Tensor]:
    """One streamed pass: outputs of all readable images on the CPU, and their positions.

    Features are left out (N×0): no figure needs them, and they would be most of the memory. The tables are allocated
    once: many small ones would break up the memory that the batches need again and again.
    """
    runtime = start_runtime(runtime)
    model.to(runtime.device)
    count = len(images)
    classes = len(model.classes)
    tables = Outputs(
        torch.empty(count, 0),
        torch.empty(count, classes),
        torch.empty(count, classes),
        torch.empty(count, classes),
        torch.empty(count),
    )
    positions = []
    for index, outputs in model.predict_batches(
        images, batch_size, runtime=runtime, progress=progress
    ):
        positions.append(index)
        tables.logits[index] = outputs.logits.cpu()
        tables.probs[index] = outputs.probs.cpu()
        tables.posterior_probs[index] = outputs.posterior_probs.cpu()
        tables.mutual_information[index] = outputs.mutual_information.cpu()
    readable = torch.cat(positions)
    return tables if len(readable) == count else tables.rows(readable), readable


def score_outputs(
    outputs: Outputs, labels: Tensor, model: SourceModel, *, open_set: bool = False
) -> dict[str, Any]:
    """The same figures from outputs that are there already."""
    labels = labels.to(outputs.probs.device)
    known = labels < len(model.classes)
    if not bool(known.any()):
        raise DataError("no image is of a class that the model knows")
    metrics = classification_metrics(outputs.probs[known], labels[known], model.classes)
    metrics |= calibration_metrics(
        outputs.posterior_probs[known], labels[known], prefix="posterior_"
    )
    metrics["count"] = len(labels)
    if open_set:
        metrics |= open_set_figures(outputs, labels, model)
    return metrics


def open_set_figures(outputs: Outputs, labels: Tensor, model: SourceModel) -> dict[str, Any]:
    """By the rule stored in the model, else by the recipe's: clustering the test set; and how well each score tells
    unknown images apart."""
    rule: UnknownRule | None = getattr(model, "unknown_rule", None)
    rule = rule or split_unknown(outputs, "entropy", recipe=True)
    predicted = outputs.probs.argmax(dim=1)
    unknown = rule.flag(outputs)
    score = rule.score_of(outputs)
    figures = open_set_metrics(predicted, unknown, score, labels, model.classes)
    figures["unknown_rule"] = rule.to_dict()
    is_unknown = labels == len(model.classes)
    figures["detection"] = {
        name: detection(score(outputs), is_unknown) for name, score in SCORES.items()
    }
    return figures
