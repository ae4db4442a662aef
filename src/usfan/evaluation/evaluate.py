"""Figures of a model on labelled images: the point estimate decides; calibration is that of both predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from usfan.adaptation.open_set import SCORES, split_unknown
from usfan.config import RuntimeConfig
from usfan.data.stream import Skipped
from usfan.errors import DataError
from usfan.evaluation.metrics import calibration_metrics, classification_metrics, detection_table, open_set_metrics
from usfan.models.model import Outputs, SourceModel, as_images
from usfan.runtime import Runtime, start_runtime


def evaluate(
    model: SourceModel,
    data: Any,
    *,
    open_set: bool = False,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Any = None,
    skipped: list[Skipped] | None = None,
) -> dict[str, Any]:
    """The figures of `metrics.json`. Classes are matched by name; percentages go from 0 to 100."""
    images = as_images(data)
    if images.labels is None:
        raise DataError(f"{images.name}: no labels to compare with; `usfan predict` needs none")
    images = images.match_classes(model.classes, open_set=open_set)
    outputs, kept = run_over(model, images, batch_size, runtime, progress, skipped)
    assert images.labels is not None
    return score_outputs(outputs, images.labels[kept], model, open_set=open_set)


def run_over(
    model: SourceModel,
    images: Any,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Any = None,
    skipped: list[Skipped] | None = None,
) -> tuple[Outputs, Tensor]:
    """One streamed pass: outputs of all readable images on the CPU, and their positions."""
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    model.to(engine.device)
    positions, parts = [], []
    batches = model.predict_batches(images, batch_size, workers=engine.workers, progress=progress, skipped=skipped)
    for index, outputs in batches:
        positions.append(index)
        parts.append([getattr(outputs, n).cpu() for n in OUTPUT_FIELDS])
    return Outputs(*(torch.cat(column) for column in zip(*parts, strict=True))), torch.cat(positions)


OUTPUT_FIELDS = ("features", "logits", "probs", "posterior_probs", "mutual_information")


def score_outputs(outputs: Outputs, labels: Tensor, model: SourceModel, *, open_set: bool = False) -> dict[str, Any]:
    """The same figures from outputs that are there already."""
    labels = labels.to(outputs.probs.device)
    known = labels < len(model.classes)
    if not bool(known.any()):
        raise DataError("no image is of a class that the model knows")
    metrics = classification_metrics(outputs.probs[known], labels[known], model.classes)
    metrics |= calibration_metrics(outputs.posterior_probs[known], labels[known], prefix="posterior_")
    metrics["count"] = len(labels)
    if open_set:
        metrics |= open_set_figures(outputs, labels, model)
    return metrics


def open_set_figures(outputs: Outputs, labels: Tensor, model: SourceModel) -> dict[str, Any]:
    """By the rule stored in the model; and, named apart, by the recipe's own: clustering the whole test set."""
    recipe = split_unknown(outputs, "entropy", recipe=True)
    rule = getattr(model, "unknown_rule", None) or recipe
    predicted = outputs.probs.argmax(dim=1)
    own = open_set_metrics(predicted, rule.flag(outputs), rule.score_of(outputs), labels, model.classes)
    other = open_set_metrics(predicted, recipe.flag(outputs), recipe.score_of(outputs), labels, model.classes)
    own["unknown_rule"] = rule.to_dict()
    own["detection"] = detection_table(
        {name: score(outputs) for name, score in SCORES.items()}, labels == len(model.classes)
    )
    own["by_score"] = {name: score_figures(outputs, labels, model, name) for name in SCORES}
    return own | {f"transductive_{name}": other[name] for name in ("os", "os_star", "unknown_accuracy", "hos")}


def score_figures(outputs: Outputs, labels: Tensor, model: SourceModel, name: str) -> dict[str, Any]:
    """What the decision would be by another score, split by our own rule."""
    rule = split_unknown(outputs, name)
    figures = open_set_metrics(
        outputs.probs.argmax(dim=1), rule.flag(outputs), rule.score_of(outputs), labels, model.classes
    )
    return {key: figures[key] for key in ("os", "os_star", "unknown_accuracy", "hos")}
