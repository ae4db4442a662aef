"""One run's part of the page: its overview and its sections."""

from __future__ import annotations

from dataclasses import dataclass

from usfan.metrics.stored_images import ImageTable
from usfan.report.blocks import Block, Note, Section
from usfan.report.charts import (
    map_blocks,
    reliability_charts,
    training_charts,
    uncertainty_charts,
)
from usfan.report.gallery import changed_images, galleries, sure_and_unsure_images
from usfan.report.glossary import glossary_table
from usfan.report.labels import judged_by_answers, label_blocks
from usfan.report.overview import Overview, overview
from usfan.report.run import Run
from usfan.report.tables import (
    before_after_table,
    class_table,
    confusion_table,
    metrics_tables,
    settings_table,
)

TRAINING = (
    "Losses, rates, and figures that judge each iterate without labels; epoch 0 is the source model. "
    "A dashed line marks the epoch that was kept. A figure that rises and then falls says: try fewer epochs."
)
ENTROPIES = (
    "Entropy of each prediction: filled, of the posterior predictive; dashed, of the point estimate. Adapting makes a "
    "model surer, right or wrong: a low entropy alone is no reason to deploy it."
)
CALIBRATION = (
    "Does a confidence of 80 % mean right in 80 of 100 cases? If dots lie below the line, the model is too sure: "
    "choose thresholds on its confidence with labelled images."
)
MAPS = (
    "Both on the two main axes of the adapted features, each at its own scale; the colour is the predicted class. If "
    "one group has two colours, or two groups have one, look at its images."
)
CHANGES = (
    "The surest changes, so they look better than the others. They show nonsense if there is any; the verdict above "
    "judges the model."
)
CLASSES = "Look at the images of classes that gained or lost many predictions."
NO_LABELS = "The images have no labels, so accuracy, calibration and confusions are left out."


@dataclass(frozen=True)
class RunPart:
    """One run on the page."""

    id: str
    run: Run
    overview: Overview
    sections: list[Section]


def run_part(
    id: str,
    run: Run,
    points: int,
    thumbnails: int,
) -> RunPart:
    """At most `points` images on a map, and `thumbnails` images in a gallery."""
    run = judged_by_answers(run)
    figures: list[Block] = []
    is_adaptation = run.kind == "adapt"
    if not is_adaptation:
        figures += metrics_tables(id, run.metrics)
    training = training_charts(id, run)
    sections = [Section(f"{id}-part-figures", "Figures", figures)]
    if run.images is not None:
        sections += image_sections(id, run, run.images, points, thumbnails)
    sections += [
        Section(f"{id}-part-training", "Training", training, TRAINING, folded=is_adaptation),
        Section(f"{id}-part-settings", "Settings", settings_table(id, run), folded=True),
        Section(f"{id}-part-glossary", "Glossary", glossary_table(id, run), folded=True),
    ]
    return RunPart(id, run, overview(run), [section for section in sections if section.blocks])


def image_sections(
    id: str,
    run: Run,
    images: ImageTable,
    points: int,
    thumbnails: int,
) -> list[Section]:
    uncertainty = uncertainty_charts(id, images)
    calibration: list[Block] = [*reliability_charts(id, images), *before_after_table(id, run)]
    if images.labels is None:
        calibration = [Note(NO_LABELS)]
    maps = map_blocks(id, images, points)
    classes = [class_table(id, run, images), *confusion_table(id, images)]
    changes: list[Block] = []
    labels: list[Block] = []
    if images.paths is not None:
        changes = galleries(id, images, changed_images(images), thumbnails)
        labels = label_blocks(id, run, images, thumbnails)
    pictures = galleries(id, images, sure_and_unsure_images(images), thumbnails)
    return [
        Section(f"{id}-part-changes", "Changes", changes, CHANGES, 1),
        Section(f"{id}-part-labels", "Labels", labels, columns=2),
        Section(f"{id}-part-classes", "Classes", classes, CLASSES, 2),
        Section(f"{id}-part-images", "Images", pictures, columns=2),
        Section(
            f"{id}-part-calibration",
            "Accuracy and calibration",
            calibration,
            CALIBRATION,
            2,
            folded=True,
        ),
        Section(
            f"{id}-part-uncertainty", "Uncertainty", uncertainty, ENTROPIES, 2, folded=True
        ),
        Section(f"{id}-part-map", "Map of the features", maps, MAPS, 2, folded=True),
    ]
