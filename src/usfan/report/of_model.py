"""The report of a model in memory: what `adapt` returned, or any model on the user's images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from usfan.errors import ConfigError, DataError
from usfan.maths.objectives import certainty_weights
from usfan.metrics.evaluate import run_over, score_outputs
from usfan.metrics.image_table import adaptation_metrics, prediction_tensors
from usfan.metrics.stored_images import ImageTable, table_of_model
from usfan.report.page import write_page
from usfan.report.run import Run
from usfan.store.model import AdaptedModel, SourceModel
from usfan.store.model_folder import model_config

if TYPE_CHECKING:
    from usfan.data.sources import ImageData


def write_model_report(
    model: SourceModel,
    out: Path,
    data: ImageData | None = None,
) -> Path:
    """Write the page; `data` brings labels, and the images of a model that did not just come from `adapt`."""
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name the HTML file to write")
    if isinstance(model, AdaptedModel) and model.passes is not None:
        run = adapted_run(model, data if data is not None else model.passes.images)
    elif data is not None:
        run = evaluated_run(model, data)
    else:
        raise DataError(
            "this model holds no images to report on: give some, report(FILE, data=…)"
        )
    run.model = model_config(model)
    return write_page([run], out, follow=True)


def adapted_run(model: AdaptedModel, images: ImageData | None) -> Run:
    """The run of a model that `adapt` returned, as its run folder would hold it."""
    if images is not None and images.labels is not None:
        images = images.for_model(model.classes, open_set=True)
    metrics = adaptation_metrics(model, images, open_set=model.unknown_rule is not None)
    name = "images in memory" if images is None else images.name
    run = Run(name, "adapt", metrics=metrics, images=table_of_model(model, images))
    run.epochs = list(model.history.get("records", []))
    return run


def evaluated_run(model: SourceModel, images: ImageData) -> Run:
    """One pass over the images: the predictions and, with labels, the figures."""
    if images.labels is not None:
        images = images.for_model(model.classes, open_set=True)
    outputs, positions = run_over(model, images)
    table = prediction_tensors(outputs, "after")
    table["weight"] = certainty_weights(outputs.posterior_probs)
    metrics: dict[str, object] = {"images": len(positions), "skipped": len(images.unreadable)}
    if images.labels is not None:
        labels = images.labels[positions]
        table["labels"] = labels
        open_set = bool((labels >= len(model.classes)).any())
        metrics["after"] = score_outputs(outputs, labels, model, open_set=open_set)
    paths = None if images.paths is None else [images.paths[i] for i in positions.tolist()]
    image_table = ImageTable(table, tuple(model.classes), paths)
    return Run(images.name, "evaluate", metrics=metrics, images=image_table)
