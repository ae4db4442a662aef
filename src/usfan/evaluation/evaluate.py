"""Figures of a model on labelled images: the point estimate decides; calibration is that of both predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from usfan.artifacts.model import SourceModel, as_images
from usfan.compute.runtime import Runtime, start_runtime
from usfan.compute.share import gather_json, one_fails_all_fail, own_share
from usfan.config import RuntimeConfig
from usfan.data.few_labels import only_labelled
from usfan.data.stream import NothingReadable, Skipped
from usfan.errors import DataError
from usfan.evaluation.learned import told_apart
from usfan.evaluation.metrics import classification_metrics, detection_table, open_set_metrics, wilson_interval
from usfan.scoring.calibration import calibration_metrics
from usfan.scoring.outputs import Outputs
from usfan.scoring.unknown import SCORES, split_unknown


def evaluate(
    model: SourceModel,
    data: Any,
    *,
    open_set: bool = False,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Any = None,
    labels: Any = None,
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """The figures of `metrics.json`. Classes are matched by name; percentages go from 0 to 100.

    `labels`: of a few of the images, whatever `usfan.data.few_labels` takes; the figures are of these images.
    `folder`: the run folder of the model, which says which labels it learned from. Those images are not in the figures.
    """
    images = as_images(data)
    if labels is not None:
        images = only_labelled(images, labels, model.classes, open_set=open_set)
    if images.labels is None:
        raise DataError(f"{images.name}: no labels to compare with; `usfan predict` needs none")
    images = images.match_classes(model.classes, open_set=open_set)
    outputs, kept = run_over(model, images, batch_size, runtime, progress)
    assert images.labels is not None
    truth, paths = images.labels[kept], images.paths and [images.paths[i] for i in kept.tolist()]
    rows, learned = told_apart(model, folder, paths, outputs.logits.argmax(dim=1), truth)
    metrics = score_outputs(outputs.rows(rows), truth[rows], model, open_set=open_set)
    known = int((truth[rows] < len(model.classes)).sum())
    low, high = wilson_interval(round(metrics["accuracy"] * known / 100), known)
    metrics = {"accuracy": metrics["accuracy"], "accuracy_low": low, "accuracy_high": high} | metrics
    return metrics | ({"labels": learned} if learned else {})


def run_over(
    model: SourceModel,
    images: Any,
    batch_size: int = 64,
    runtime: RuntimeConfig | Runtime | None = None,
    progress: Any = None,
) -> tuple[Outputs, Tensor]:
    """One streamed pass, shared by the processes: outputs of all readable images on the CPU, and their positions.

    Features are left out (N×0): no figure needs them, and they would be most of the memory.
    """
    engine = runtime if isinstance(runtime, Runtime) else start_runtime(runtime)
    model.to(engine.device)
    lost: list[Skipped] = []
    options = {"workers": engine.workers, "progress": progress, "skipped": lost}
    with one_fails_all_fail(engine):
        share = own_share(len(images), batch_size, engine)
        found = Found(len(share), len(model.classes))
        try:
            for index, outputs in model.predict_batches(images, batch_size, indices=share, **options):
                found.add(index, outputs)
        except NothingReadable:
            if engine.world == 1:  # else another process may have some
                raise
    entries = [Skipped(*entry) for part in gather_json(lost, engine) for entry in part]
    images.unreadable.update(entries)
    kept, *columns = (engine.gathered(rows.to(engine.device)).cpu() for rows in found.rows())
    if len(kept) == 0:
        path, reason = entries[0]
        raise NothingReadable(f"none of the {len(images)} images of {images.name} can be read: {path} ({reason})")
    return Outputs(torch.empty(len(kept), 0), *columns), kept


class Found:
    """What one process has seen so far, in tables made at the start: small ones, batch by batch, would break up the
    memory that the batches' own work needs again and again."""

    def __init__(self, count: int, classes: int) -> None:
        self.filled = 0
        tables = (torch.empty(count, classes) for _ in range(3))
        self.tables = (torch.empty(count, dtype=torch.long), *tables, torch.empty(count))

    def add(self, index: Tensor, outputs: Outputs) -> None:
        end = self.filled + len(index)
        columns = (outputs.logits, outputs.probs, outputs.posterior_probs, outputs.mutual_information)
        for table, column in zip(self.tables, (index, *columns), strict=True):
            table[self.filled : end] = column
        self.filled = end

    def rows(self) -> tuple[Tensor, ...]:
        """Positions, logits, probs, posterior probs, mutual information."""
        return tuple(table[: self.filled] for table in self.tables)


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
